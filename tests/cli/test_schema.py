"""`summit-train schema`: a JSON schema of every key, and the page of all keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from summit_train.__main__ import main
from summit_train.spec import Spec
from summit_train.spec.keys import EarlyStopSpec, GrowBatchSpec, TrustRatioSpec
from summit_train.spec.model_data import AugmentSpec, DetectorSpec, MixSpec, RandAugmentSpec
from summit_train.spec.typed import OwnSpec

ROOT = Path(__file__).resolve().parents[2]


def test_the_schema_lists_every_key_of_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    """A file may leave everything to the one it extends; a key that is in no section is wrong."""
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {*Spec.model_fields, "extends"}
    assert [choice["type"] for choice in schema["properties"]["extends"]["anyOf"]] == ["string", "array"]
    sections = {kind.__name__: kind for kind in map(_section, Spec.model_fields.values()) if kind is not None}
    sections |= {
        kind.__name__: kind
        for kind in (
            TrustRatioSpec, GrowBatchSpec, EarlyStopSpec, MixSpec, RandAugmentSpec, DetectorSpec, OwnSpec, AugmentSpec,
        )
    }  # fmt: skip
    assert set(schema["$defs"]) == set(sections) and len(sections) == 21
    for name, kind in sections.items():
        assert set(schema["$defs"][name]["properties"]) == set(kind.model_fields)
    for section in (schema, *schema["$defs"].values()):
        assert section["required"] == [] and section["additionalProperties"] is False


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


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
        for choice in get_args(kind) if get_origin(kind) is not tuple else ():  # a list's text describes its sections
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from _keys(choice, f"{prefix}{name}.")


def _rows() -> Iterator[list[str]]:
    """Key, value, default and meaning of each row."""
    for line in re.findall(r"^\|`.*", REFERENCE, re.M):
        yield [cell.strip() for cell in line[1:-1].split("|")]


def test_the_reference_has_every_key_with_its_default() -> None:
    shown = {key.strip(" `"): yaml.safe_load(default.strip("`")) for key, _, default, _ in _rows() if default}
    required = {key.strip(" `") for key, _, default, _ in _rows() if not default}
    fields = dict(_keys(Spec))
    defaults = {name: field.default for name, field in fields.items() if field.default is not PydanticUndefined}
    assert shown == {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    assert required == set(fields) - set(defaults)


def test_every_key_has_a_description_that_is_a_sentence() -> None:
    for name, field in _keys(Spec):
        assert field.description and field.description.endswith("."), name
        assert "|" not in field.description, f"{name}: it would end the cell of the table"
