"""`summit-train schema`: a JSON schema that knows every key and tells a right spec from a wrong one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from summit_train.commands.schema import run
from summit_train.spec import Spec

ROOT = Path(__file__).resolve().parents[2]

# What a schema of ours may say of a value; a keyword that is not here fails the test.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda v, name: _TYPES[name](v),
    "enum": lambda v, choices: v in choices,
    "const": lambda v, choice: bool(v == choice),
    "minimum": lambda v, limit: bool(v >= limit),
    "maximum": lambda v, limit: bool(v <= limit),
    "exclusiveMinimum": lambda v, limit: bool(v > limit),
    "exclusiveMaximum": lambda v, limit: bool(v < limit),
    "minItems": lambda v, limit: len(v) >= limit,
    "maxItems": lambda v, limit: len(v) <= limit,
    "required": lambda v, names: set(names) <= set(v),
}
_REMARKS = {"title", "description", "default", "$defs"}


def _valid(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """JSON Schema 2020-12, as much of it as the spec's schema uses."""
    for keyword, content in schema.items():
        if keyword == "$ref":
            fits = _valid(root["$defs"][content.removeprefix("#/$defs/")], value, root)
        elif keyword == "anyOf":
            fits = any(_valid(choice, value, root) for choice in content)
        elif keyword == "properties":
            fits = all(_valid(content[name], value[name], root) for name in value if name in content)
        elif keyword == "additionalProperties":
            assert content is False
            fits = set(value) <= set(schema["properties"])
        elif keyword == "prefixItems":
            fits = all(_valid(item, part, root) for item, part in zip(content, value, strict=False))
        elif keyword == "items":
            fits = all(_valid(content, part, root) for part in value)
        else:
            fits = keyword in _REMARKS or _LIMITS[keyword](value, content)
        if not fits:
            return False
    return True


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints, with "type" first: what follows it may then rely on the type."""
    assert run(argparse.Namespace()) == 0
    found: dict[str, Any] = _type_first(json.loads(capsys.readouterr().out))
    return found


def _type_first(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _type_first(part[key]) for key in sorted(part, key=lambda key: key != "type")}
    return [_type_first(item) for item in part] if isinstance(part, list) else part


def test_the_schema_lists_every_key_of_every_section(schema: dict[str, Any]) -> None:
    assert set(schema["properties"]) == {*Spec.model_fields, "extends"}
    for name, field in Spec.model_fields.items():
        section = schema["$defs"].get(getattr(field.annotation, "__name__", ""))
        if section is not None:
            assert set(section["properties"]) == set(field.annotation.model_fields), name  # type: ignore[union-attr]
            assert section["additionalProperties"] is False
    assert len(schema["$defs"]) == 9
    assert schema["additionalProperties"] is False


NO_SPECS = {"sites", "machines", "sweeps"}
SPECS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in NO_SPECS)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_fit_the_schema(schema: dict[str, Any], path: Path) -> None:
    assert _valid(schema, yaml.safe_load(path.read_text(encoding="utf-8")), schema)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),  # a file may leave everything to the one it extends
        ("{extends: base.yaml}", True),
        ("{extends: [a.yaml, b.yaml]}", True),
        ("{extends: 3}", False),
        ("{sead: 1}", False),
        ("{seed: -1}", False),
        ("{seed: '1'}", False),
        ("{model: {arch: tsm}}", True),
        ("{model: {arch: tms}}", False),
        ("{model: {arhc: tsm}}", False),
        ("{model: tsm}", False),
        ("{model: {width: 0}}", False),
        ("{model: {pretrained: null}}", True),
        ("{data: {short_side: [256, 320]}}", True),
        ("{data: {short_side: [256]}}", False),
        ("{data: {short_side: [256, 320, 384]}}", False),
        ("{data: {flip: 1}}", False),
        ("{scale: {gpus: null}}", True),
        ("{scale: {gpus: 0}}", False),
        ("{evaluate: {crops: full}}", True),
        ("{evaluate: {crops: 3}}", True),
        ("{evaluate: {crops: 2}}", False),
        ("{optimizer: {momentum: 1.0}}", False),
        ("{optimizer: {base_lr: 0.01}}", True),
    ],
)
def test_the_schema_tells_right_from_wrong(schema: dict[str, Any], text: str, fits: bool) -> None:
    assert _valid(schema, yaml.safe_load(text), schema) is fits
