"""`summit-train schema`: a JSON schema that tells a right spec from a wrong one, and the page of all keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from summit_train.__main__ import main
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
    assert main(["schema"]) == 0
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
    assert len(schema["$defs"]) == 15
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
        ("{optimizer: {trust_ratio: null}}", True),
        ("{optimizer: {trust_ratio: {kind: bounded, lower: 0.5}}}", True),
        ("{optimizer: {trust_ratio: {kind: bonded}}}", False),
        ("{optimizer: {trust_ratio: {kind: lars, limit: 1}}}", False),
        ("{optimizer: {betas: [0.9, 1]}}", False),
        ("{schedule: {milestones: [30, 60.5]}}", True),
        ("{schedule: {milestones: 30}}", False),
        ("{schedule: {milestones: [-1]}}", False),
    ],
)
def test_the_schema_tells_right_from_wrong(schema: dict[str, Any], text: str, fits: bool) -> None:
    assert _valid(schema, yaml.safe_load(text), schema) is fits


REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_the_reference_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    # After a change of the spec: summit-train schema --markdown > docs/reference.md
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == REFERENCE


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        yield prefix + name, field
        for choice in get_args(kind):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from _keys(choice, f"{prefix}{name}.")


def _rows() -> Iterator[list[str]]:
    """Key, value, default and meaning of each row."""
    for line in re.findall(r"^\| `.*", REFERENCE, re.M):
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_reference_has_every_key_with_its_default() -> None:
    shown = {key.strip(" `"): yaml.safe_load(default.strip("`")) for key, _, default, _ in _rows() if default}
    required = {key.strip(" `") for key, _, default, _ in _rows() if not default}
    fields = dict(_keys(Spec))
    defaults = {name: field.default for name, field in fields.items() if field.default is not PydanticUndefined}
    assert shown == {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    assert required == set(fields) - set(defaults)


def test_the_reference_says_types_and_limits_in_words() -> None:
    values = {key.strip(" `"): value for key, value, _, _ in _rows()}
    assert values["seed"] == "integer, at least 0, below 2^63"
    assert values["data.flip"] == "`true`, `false`"
    assert values["data.root"] == "text, or `null`"
    assert values["data.short_side"] == "[integer, at least 1, at most 4,096; integer, at least 1, at most 4,096]"
    assert values["schedule.milestones"] == "list of number, at least 0"
    assert values["evaluate.crops"] == "`1`, `3`, `full`"
    assert values["optimizer.momentum"] == "number, at least 0, below 1, or `null`"
    assert values["optimizer.trust_ratio"] == "a section of keys, or `null`"
    assert values["optimizer.trust_ratio.kind"] == "`lars`, `bounded`"


def test_every_key_has_a_description_that_is_a_sentence() -> None:
    for name, field in _keys(Spec):
        assert field.description and field.description.endswith("."), name
        assert "|" not in field.description, f"{name}: it would end the cell of the table"
