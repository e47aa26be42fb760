"""Parts of the user's own: callables that a spec names, FILE.py:NAME or package.module:NAME (docs/own_parts.md)."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256


@dataclass(frozen=True)
class OwnPart:
    """A callable with its options, as the run began with it; other processes make it from this.

    key: of the spec that names it. digest: as of `digest_of`.
    """

    key: str
    name: str
    options: Mapping[str, Any]
    digest: str

    @classmethod
    def open(cls, key: str, name: str, options: Mapping[str, Any]) -> OwnPart:
        """Hash the files of `name`. Raises UserError where there is none; nothing in a file runs."""
        return cls(key, name, options, digest_of(key, name))

    def load(self) -> Callable[..., Any]:
        """Import the callable. Raises UserError where it cannot be imported, is not there, or has changed."""
        if digest_of(self.key, self.name) != self.digest:
            raise UserError(f"{self.key}: {self.name} has changed since the run began; restore the file")
        module_name, _, attribute = self.name.rpartition(":")
        with _importing(self.key, self.name):
            if module_name.endswith(".py"):
                module = _executed(Path(module_name).absolute(), self.digest)
            else:
                module = import_module(module_name)
        found = getattr(module, attribute, None)
        if not callable(found):
            raise UserError(f"{self.key}: {module_name} must have a class or function {attribute}, found none")
        return found  # type: ignore[no-any-return]

    def call(self, **arguments: Any) -> Any:
        """Call it once with `arguments` and its options. Raises UserError as `make` does."""
        called = self.load()
        key = f"{self.key.partition('.')[0]}.options"
        self._check(key, called, [*arguments, key], lambda signature: signature.bind(**arguments, **self.options))
        with _importing(self.key, self.name):
            return called(**arguments, **self.options)

    def make(self, *arguments: str) -> Callable[..., Any]:
        """Return a callable of `arguments`: a function with its options, or the object that a class makes of them.

        Raises UserError where it is not there, has changed, or does not take them; its own errors keep their traceback.
        """
        found = self.load()
        if not isinstance(found, type):
            names = [*arguments, *self.options]
            self._check(self.key, found, names, lambda signature: signature.bind(*arguments, **self.options))
            return partial(found, **self.options)
        self._check(self.key, found, self.options, lambda signature: signature.bind(**self.options))
        with _importing(self.key, self.name):
            made = found(**self.options)
        if not callable(made):
            raise UserError(f"{self.key}: {self.name} must have a method __call__({', '.join(arguments)})")
        self._check(self.key, made, arguments, lambda signature: signature.bind(*arguments))
        return made  # type: ignore[no-any-return]

    def _check(
        self, key: str, called: Callable[..., Any], names: Iterable[str], bind: Callable[[inspect.Signature], object]
    ) -> None:
        """Raise UserError, about `key`, if `called` does not take the arguments of `bind`, which are `names`."""
        try:
            signature = inspect.signature(called)
        except ValueError as error:
            right = "try a function that calls it"
            raise UserError(f"{key}: {self.name} is built in and has no signature; {right}") from error
        try:
            bind(signature)
        except TypeError as error:
            right = ", ".join(names) or "no arguments"
            raise UserError(f"{key}: {self.name}{signature} must take {right}: {error}") from error

    def wrong(self, returned: str, got: object) -> UserError:
        """Return the error of what it returned. returned: what that must be."""
        return UserError(f"{self.key}: {self.name} must return {returned}, got {got}")


def digest_of(key: str, name: str) -> str:
    """Return the SHA-256 of the file that has the callable, or of all files that `_sources` returns.

    Nothing in the files runs. Of a dotted name, the packages that contain the module are imported.
    """
    with _importing(key, name):
        files = _sources(key, name.rpartition(":")[0])
    if len(files) == 1:
        return file_sha256(files[0])
    common = Path(os.path.commonpath(files))
    return hashlib.sha256(
        "".join(f"{file.relative_to(common)} {file_sha256(file)}\n" for file in files).encode()
    ).hexdigest()


def _sources(key: str, place: str) -> list[Path]:
    """Return the source file of a module and, in a package of the user's, those of it that its imports name in turn.

    Of a FILE.py, and of a package that is installed with a version, the file alone; empty files are left out.
    """
    first = _source_of(key, place)
    top = place.partition(".")[0]
    package = None if place.endswith(".py") else importlib.util.find_spec(top)
    folders = package.submodule_search_locations if package is not None else None
    if not folders or top == "summit_train" or {"site-packages", "dist-packages"} & {*first.parts}:
        return [first]
    above = Path(next(iter(folders))).parent
    found = set[Path]()
    left = [place]
    while left:
        words = left.pop().split(".")
        for end in range(1, len(words) + 1):  # the packages that contain a module run, too
            folder = above.joinpath(*words[:end])
            for file, within in ((folder / "__init__.py", end), (Path(f"{folder}.py"), end - 1)):
                if file not in found and file.is_file() and file.stat().st_size:
                    found.add(file)
                    left += _imports(file, tuple(words[:within]), file.stat().st_mtime_ns)
    return sorted(found | {first})


@cache
def _imports(file: Path, package: tuple[str, ...], changed: int) -> list[str]:
    """Return the names of modules of its top package that a file of `package` may import. changed: when it was."""
    names = list[str]()
    with suppress(SyntaxError, ValueError):  # which its import will report
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else ()
                module = ".".join([*base, *filter(None, [node.module])])
                names += [f"{module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.partition(".")[0] == (package or (file.stem,))[0]]


@contextmanager
def _importing(key: str, name: str) -> Iterator[None]:
    """Raise UserError where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        right = "install what is missing, or add its folder to PYTHONPATH"
        raise UserError(f"{key}: {name} cannot be imported: {error}; {right}") from error


def _source_of(key: str, place: str) -> Path:
    """Return the source file of the module `place`, dotted or FILE.py."""
    path = Path(place).absolute()
    if place.endswith(".py"):
        if not path.is_file():
            raise UserError(f"{key}: {path} not found; a relative path starts at the current directory")
        return path
    if (spec := importlib.util.find_spec(place)) is None:
        raise ModuleNotFoundError(f"No module named {place!r}")
    if not spec.has_location or spec.origin is None:
        raise UserError(f"{key}: {place} must have a source file, because its SHA-256 is part of the experiment")
    return Path(spec.origin)


@cache
def _executed(path: Path, digest: str) -> ModuleType:
    """Run a file as a module; one with other bytes is another module."""
    name = f"{path.stem}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({name: module})  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    return module


class _Source(SourceFileLoader):
    """Reads only the source: bytecode may be that of an older file that changed within the same second."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("no bytecode")
