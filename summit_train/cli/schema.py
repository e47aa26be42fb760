"""`summit-train schema`: the spec's keys as a JSON schema for editors, or as the page docs/reference.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from summit_train.core.result import Result
from summit_train.spec import Spec

_PREFACE = """\
# The keys of a spec

A spec is a YAML file; `summit-train plan SPEC` checks it. Every key can be overridden on the command line:
`summit-train train SPEC schedule.epochs=10`. Keys without a default are required. Unknown keys, wrong types and
impossible combinations are refused with file, line and the valid choices.

`extends: base.yaml` lays a spec over another one, or over several in a list; these paths are relative to the spec, and
`shipped:NAME` names one that ships (`summit-train configs`). All other relative paths start at the current directory.
`~` and `$NAME` are expanded.

For an editor with the YAML language server, write the keys to a file, and begin each spec with the line
`# yaml-language-server: $schema=spec.schema.json`. It then completes keys and marks mistakes:

```
summit-train schema > spec.schema.json
summit-train schema --markdown           # this page
```
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print docs/reference.md instead")


def run(args: argparse.Namespace) -> Result:
    schema: dict[str, Any] = json.loads(json.dumps(Spec.model_json_schema()).replace("\\n", " "))
    if args.markdown:
        return Result(_reference(schema).split("\n"))
    # A file may leave to the one it extends what a whole spec must have; `extends` itself is gone by then.
    schema["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Spec or specs that this one is laid over, relative to this file.",
    }
    for section in (schema, *schema["$defs"].values()):
        section["required"] = []
    return Result(json.dumps(schema, indent=1).split("\n"))


def _reference(schema: dict[str, Any]) -> str:
    """Return docs/reference.md without its last newline: for each section a table of its keys."""
    sections = {f"#/$defs/{name}": section for name, section in schema["$defs"].items()}
    head = ["|Key|Value|Default|Meaning|", "|---|---|---|---|"]
    keys = {name: value for name, value in schema["properties"].items() if "$ref" not in value}
    page = [_PREFACE, *head, *_rows("", keys, sections)]
    for name, value in schema["properties"].items():
        if "$ref" in value:
            section = sections[value["$ref"]]
            page += [f"\n## {name}\n\n{section['description']}\n", *head]
            page += _rows(f"{name}.", section["properties"], sections)
    return "\n".join(page)


def _rows(prefix: str, keys: dict[str, Any], sections: dict[str, Any]) -> Iterator[str]:
    """Yield a row of each key, and below a section that may be null those of its keys."""
    for name, value in keys.items():
        default = "`{}`".format(json.dumps(value["default"]).strip('"')) if "default" in value else ""
        yield f"|`{prefix}{name}`|{_value(value)}|{default}|{value['description']}|"
        for choice in value.get("anyOf", []):
            if "$ref" in choice:
                yield from _rows(f"{prefix}{name}.", sections[choice["$ref"]]["properties"], sections)


def _value(schema: dict[str, Any]) -> str:
    """Return a value's type and limits: "integer ≥1, or `null`"."""
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return ", or ".join(map(_value, choices))
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return ", ".join("`{}`".format(json.dumps(choice).strip('"')) for choice in choices)
    if "prefixItems" in schema:
        return f"[{'; '.join(_value(item) for item in schema['prefixItems'])}]"
    if "$ref" in schema:
        return "a section of keys"
    if "items" in schema:
        return f"list of {_value(schema['items'])}"
    types = {"string": "text", "boolean": "`true`, `false`", "null": "`null`", "object": "keys and values"}
    limits = []
    for keyword, sign in {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}.items():
        # A maximum of a million or more only stops nonsense; editors have it from the JSON schema.
        if keyword in schema and not (keyword == "maximum" and schema[keyword] >= 1_000_000):
            limit = schema[keyword]
            shown = "2^63" if limit == 2**63 else f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
            limits.append(sign + shown)
    return " ".join([types.get(schema["type"], schema["type"]), ", ".join(limits)]).rstrip()
