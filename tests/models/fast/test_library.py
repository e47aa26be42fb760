"""The kernels' library: compiled once, kept, chosen by what the processor knows, and missed with a reason."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from summit_train.core.errors import RunFailed
from summit_train.models import build_model
from summit_train.models.fast import accelerate, execution
from summit_train.models.fast import kernels as library
from summit_train.models.fast.kernels import Kernels, compiled, library_file, targets
from tests.networks import clips
from tests.worlds import PATIENCE_S, forked


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "summit_train" / "kernels"


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once, where the real one takes seconds."""
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(library, "SOURCE", source)
    return source


def asked_again() -> Kernels | RunFailed:
    """`loaded` as in a process that has not asked yet."""
    return library.loaded.__wrapped__()


def test_the_best_level_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    v3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    for flags, expected in (
        ({"sse2"}, ["x86-64"]),
        (v3 | {"sse2"}, ["x86-64-v3", "x86-64"]),
        (v3 | v4, ["x86-64-v4", "x86-64-v3", "x86-64"]),
        (v4 | v3 - {"fma"}, ["x86-64"]),  # a level has all of those below it
    ):
        monkeypatch.setattr(library.machine, "instruction_sets", lambda flags=flags: frozenset(flags))
        assert targets() == expected
    monkeypatch.setattr(library.platform, "machine", lambda: "ppc64le")
    assert targets() == ["ppc64le"]


def test_it_is_compiled_once_and_kept(empty_cache: Path, small_source: Path) -> None:
    target, source = targets()[-1], small_source.read_text()
    before = library_file(target)
    small_source.write_text(f"{source}\n")
    assert library_file(target) != before
    umask = os.umask(0)
    path = compiled(target)
    os.umask(umask)
    kept = (path, path.parent, path.parent.parent)  # whatever the umask
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o755}
    assert path.with_suffix(".lock").stat().st_mode & 0o777 == 0o644
    assert sorted(empty_cache.iterdir()) == [path.with_suffix(".lock"), path]
    made = path.stat().st_mtime_ns
    assert compiled(target).stat().st_mtime_ns == made
    found = asked_again()
    assert isinstance(found, Kernels) and found.target == target  # the best would have to be compiled first
    assert found.library.answer() == 42


def test_native_code_is_kept_for_each_kind_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of x86-64 is the same on all; without levels the code is that of the processor that compiled it."""
    before = [library_file(target) for target in ("x86-64-v3", "ppc64le", "aarch64")]
    monkeypatch.setattr(library.machine, "processor_name", lambda: "another model")
    after = [library_file(target) for target in ("x86-64-v3", "ppc64le", "aarch64")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]


def test_without_a_compiler_there_is_a_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = asked_again()
    assert isinstance(found, RunFailed) and "no compiler on PATH among no-such-compiler" in str(found)
    assert not empty_cache.exists()


def test_what_the_compiler_says_is_passed_on(empty_cache: Path, small_source: Path) -> None:
    small_source.write_text("int main( {\n")
    with pytest.raises(RunFailed, match=r"cannot compile kernels\.cpp: .*error"):
        compiled(targets()[-1])
    assert [file.suffix for file in empty_cache.iterdir()] == [".lock"]
    small_source.write_text("int main() {}\n")  # the next process tries again
    assert compiled(targets()[-1]).is_file()


def quick_compiler(path: Path) -> str:
    """A compiler whose file is no library."""
    path.write_text('#!/bin/sh\nfor last; do :; done\necho "no library" > "$last"\n')
    path.chmod(0o755)
    return str(path)


def ask() -> int:
    """Print how networks are computed, in a process that has not asked yet."""
    library.loaded.cache_clear()
    print(execution())
    return 0


@pytest.mark.usefixtures("small_source")
def test_one_rank_compiles_and_says_so_and_all_use_it(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "")
    status, output = forked(2, ask)
    file = library_file(targets()[0])
    assert status == 0 and file.parent == empty_cache and file.is_file()
    said = sorted(output.splitlines())
    assert re.fullmatch(rf"C\+\+ kernels: compiled to {file} in \d+ s", said[0]) and said[1:] == [targets()[0]] * 2
    assert isinstance(asked_again(), Kernels) and capsys.readouterr().err == ""


class Elsewhere:
    """A process whose compiler has begun, and ends with an error where `go` says so."""

    def __init__(self, folder: Path) -> None:
        self.compiler, self.begun, self.go = folder / "compiler", folder / "begun", folder / "go"
        wait = f"echo >> {self.begun}; until [ -e {self.go} ]; do sleep 0.05; done"
        self.compiler.write_text(f"#!/bin/sh\n{wait}\necho 'error: no good' >&2; exit 1\n")
        self.compiler.chmod(0o755)
        self.output = folder / "output"
        self.process = get_context("fork").Process(target=self._ask)
        self.process.start()
        until = time.monotonic() + PATIENCE_S
        while not self.begun.exists():
            assert time.monotonic() < until
            time.sleep(0.05)

    def _ask(self) -> None:
        os.environ |= {"SUMMIT_TRAIN_RANK": "1", "SUMMIT_TRAIN_RANKS": "2", "CXX": str(self.compiler)}
        with self.output.open("w") as output, redirect_stdout(output), redirect_stderr(output):
            ask()


def test_ranks_that_waited_for_a_compiler_that_failed_do_not_try_again(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Elsewhere(tmp_path)
    monkeypatch.setenv("CXX", str(other.compiler))

    def wait(seconds: float) -> None:
        other.go.touch()
        other.process.join(PATIENCE_S)

    monkeypatch.setattr(library, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    found, why = asked_again(), f"{other.compiler} cannot compile kernels.cpp: error: no good"
    assert isinstance(found, RunFailed) and str(found) == why and other.begun.read_text() == "\n"
    assert other.output.read_text() == f"none: {why}\n"  # the first rank says it
    assert capsys.readouterr().err.splitlines() == [
        f"C++ kernels: none: {why}; PyTorch's operators are used, and steps on CPUs take longer"
    ]


def test_a_process_that_was_killed_keeps_no_other_from_compiling(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Elsewhere(tmp_path)
    other.process.kill()
    other.process.join()
    monkeypatch.setenv("CXX", quick_compiler(tmp_path / "quick"))
    assert compiled(targets()[0]).is_file() and other.begun.read_text() == "\n"
    other.go.touch()  # its compiler has outlived it


def test_a_compiler_that_cannot_be_started_is_a_reason(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_processes(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setenv("CXX", quick_compiler(tmp_path / "quick"))
    monkeypatch.setattr(library.subprocess, "run", no_more_processes)
    with pytest.raises(RunFailed, match=f"quick cannot be run in {empty_cache}: Resource temporarily unavailable"):
        compiled(targets()[0])


def test_nobody_waits_for_ever(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def held(path: Path, *, wait: bool) -> Iterator[None]:
        path.touch()
        raise BlockingIOError
        yield

    monkeypatch.setattr(library, "locked", held)
    passing = SimpleNamespace(monotonic=iter(range(0, 1000, 100)).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(library, "time", passing)
    with pytest.raises(RunFailed, match=r"another process has held .*\.lock for 240 s"):
        compiled(targets()[0])


@pytest.mark.usefixtures("empty_cache", "small_source")
def test_a_file_system_without_locks_does(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unable(path: Path, *, wait: bool) -> Iterator[None]:
        path.touch()
        raise OSError(errno.ENOLCK, "No locks available")
        yield

    monkeypatch.setattr(library, "locked", unable)
    assert compiled(targets()[0]).is_file()


@pytest.mark.parametrize("number", [0, 1])
def test_a_cache_that_cannot_be_written_is_said_by_the_first_rank(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("SUMMIT_TRAIN_RANK", str(number))
    monkeypatch.setenv("SUMMIT_TRAIN_RANKS", "2")
    found, why = asked_again(), f"{tmp_path}/file/summit_train/kernels cannot be written: Not a directory"
    assert isinstance(found, RunFailed) and str(found) == why
    assert capsys.readouterr().err.count(f"C++ kernels: none: {why}; PyTorch's") == (number == 0)


def test_a_compiled_file_that_cannot_be_loaded_is_a_reason(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process that compiles it and in later ones, as on a cache that is mounted noexec."""
    monkeypatch.setenv("CXX", quick_compiler(tmp_path / "compiler"))
    first, later = asked_again(), asked_again()
    assert capsys.readouterr().err.count(f"C++ kernels: none: {first}; ") == 2
    assert isinstance(first, RunFailed) and str(first) == str(later)
    assert str(first).startswith(f"{library_file(targets()[0])} cannot be loaded: ")
    monkeypatch.setattr("summit_train.models.fast.loaded", lambda: first)
    assert execution() == f"none: {first}"


def computed() -> list[str]:
    """What a network is made of, how it is computed, and what comes out, with the norm of a gradient."""
    generator = torch.Generator().manual_seed(0)
    model = build_model("tsm", "resnet18", 4, 3, width=0.25, generator=generator).train()
    said = accelerate(model)
    clip = clips(2, 4)
    logits = model.double()(clip.double())
    logits.square().sum().backward()
    return [said, execution(), *(f"{x:.12g}" for x in (*logits.flatten().tolist(), model.conv1.weight.grad.norm()))]


def test_networks_run_without_them(tmp_path: Path) -> None:
    """A process without kernels computes the same network by PyTorch's operators, to rounding, and says so."""

    def work() -> int:
        os.environ |= {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
        os.environ |= {"SUMMIT_TRAIN_RANK": "1", "SUMMIT_TRAIN_RANKS": "2"}  # the first one would say it
        library.loaded.cache_clear()
        print(*computed(), sep="\n")
        return 0

    status, output = forked(0, work)
    assert status == 0, output
    without, with_kernels = output.splitlines(), computed()
    assert without[0] == "no C++ kernels; replaced: 8 ShiftedConv2d"
    assert without[1] == "none: no compiler on PATH among no-such-compiler"
    assert with_kernels[0] == f"C++ kernels: {with_kernels[1]}; replaced: 20 FusedNorm, 8 FusedBlock, 8 ShiftedConv2d"
    numbers = [[float(word) for word in lines[2:]] for lines in (without, with_kernels)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-8)
