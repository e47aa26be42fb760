"""`summit-train schema`: the spec's keys as a JSON schema for editors, or as the page docs/reference.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from summit_train.spec import Spec

_PREFACE = """\
# The keys of a spec

A spec is a YAML file; `summit-train plan SPEC` checks it. Every key can be overridden on the command line:
`summit-train train SPEC schedule.epochs=10`. Keys without a default are required. Unknown keys, wrong types and
impossible combinations are refused with file, line and the valid choices.

`extends: base.yaml` lays a spec over another one, or over several in a list; these paths are relative to the spec. All
other relative paths start at the current directory. `~` and `$NAME` are expanded.

`summit-train schema > spec.schema.json` writes the same keys for editors. This page is the output of
`summit-train schema --markdown`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--markdown", action="store_true", help="print docs/reference.md instead")


def run(args: argparse.Namespace) -> int:
    """Print the schema or the page."""
    print(reference() if args.markdown else json.dumps(_editor_schema(), indent=1))
    return 0


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(json.dumps(Spec.model_json_schema()).replace("\\n", " "))
    return schema


def _editor_schema() -> dict[str, Any]:
    schema = _schema()
    # A file may leave to the one it extends what a whole spec must have; `extends` itself is gone by then.
    schema["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Spec or specs that this one is laid over, relative to this file.",
    }
    for section in (schema, *schema["$defs"].values()):
        section["required"] = []
    return schema


def reference() -> str:
    """Return docs/reference.md without its last newline: for each section a table of its keys."""
    schema = _schema()
    keys = {name: value for name, value in schema["properties"].items() if "$ref" not in value}
    tables = [_table("", {**schema, "properties": keys}, {})]
    for name, value in schema["properties"].items():
        if "$ref" in value:
            tables.append(_table(f"{name}.", _section(value, schema["$defs"]), schema["$defs"]))
    return "\n".join([_PREFACE, *tables]).rstrip("\n")


def _section(value: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a value refers to."""
    section: dict[str, Any] = sections[value["$ref"].removeprefix("#/$defs/")]
    return section


def _table(prefix: str, section: dict[str, Any], sections: dict[str, Any]) -> str:
    heading = f"## {prefix.rstrip('.')}\n\n{section['description']}\n\n" if prefix else ""
    head = ["| Key | Value | Default | Meaning |", "|---|---|---|---|"]
    return heading + "\n".join([*head, *_rows(prefix, section, sections)]) + "\n"


def _rows(prefix: str, section: dict[str, Any], sections: dict[str, Any]) -> Iterator[str]:
    """Yield a row of each key, and below a section that may be null those of its keys."""
    for name, value in section["properties"].items():
        default = "`{}`".format(json.dumps(value["default"]).strip('"')) if "default" in value else ""
        yield f"| `{prefix}{name}` | {_value(value)} | {default} | {value['description']} |"
        for choice in value.get("anyOf", []):
            if "$ref" in choice:
                yield from _rows(f"{prefix}{name}.", _section(choice, sections), sections)


def _value(schema: dict[str, Any]) -> str:
    """Return a value's type and limits in words: "integer, at least 1, or `null`"."""
    if "anyOf" in schema:
        return ", or ".join(_value(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return ", ".join("`{}`".format(json.dumps(choice).strip('"')) for choice in choices)
    if "prefixItems" in schema:
        return f"[{'; '.join(_value(item) for item in schema['prefixItems'])}]"
    if "$ref" in schema:
        return "a section of keys"
    if "items" in schema:
        return f"list of {_value(schema['items'])}"
    kind = {"string": "text", "boolean": "`true`, `false`", "null": "`null`"}.get(schema["type"], schema["type"])
    return ", ".join([kind, *_limits(schema)])


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    for keyword, word in words.items():
        if keyword in schema:
            limit = schema[keyword]
            yield f"{word} " + ("2^63" if limit == 2**63 else f"{limit:,}" if isinstance(limit, int) else f"{limit:g}")
