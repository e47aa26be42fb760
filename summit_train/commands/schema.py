"""`summit-train schema`: the spec's JSON schema, for editors that complete keys and check values."""

from __future__ import annotations

import argparse
import json

from summit_train.spec import Spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes nothing."""


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    schema = Spec.model_json_schema()
    # A file may leave to the one it extends what a whole spec must have; `extends` itself is gone by then.
    schema["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Spec or specs that this one is laid over, relative to this file.",
    }
    for section in (schema, *schema["$defs"].values()):
        section["required"] = []
    print(json.dumps(schema, indent=1))
    return 0
