"""What Flux's own command line makes of words: python flux_words.py batch SCRIPT, or run OPTION ... COMMAND.

Prints the job specification as JSON. flux-python has Flux's parsers of directives and options, which are Python; what
they import of libflux-core, which no package index has, is nothing here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class Nothing(ModuleType):
    """A module, class or function of the library, whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Nothing("result")

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _stub(name: str, folder: Path | None = None) -> Any:
    module = sys.modules[name] = Nothing(name)
    module.__path__ = [str(folder)] if folder else []
    return module


def main(kind: str, words: list[str]) -> None:
    """Print the specification of the job."""
    found = importlib.util.find_spec("flux")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent
    for name in ("_flux", "_flux._core", "_flux._hostlist", "_flux._idset", "_flux._security", "flux.conf_builtin"):
        _stub(name)
    flux, job = _stub("flux", folder), _stub("flux.job", folder / "job")
    flux.job = job
    importlib.import_module("flux.util")
    job.JobspecV1 = importlib.import_module("flux.job.Jobspec").JobspecV1
    if kind == "batch":
        command = importlib.import_module("flux.cli.batch").BatchCmd("flux batch")
        command.argv = words
        command.script, args = command.process_script(command.parser.parse_args(words))
    else:
        command = importlib.import_module("flux.cli.run").RunCmd("flux run")
        args = command.parser.parse_args(words)
    print(json.dumps(command.jobspec_create(args).jobspec, default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
