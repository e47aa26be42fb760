"""The kernels' library: compiled once, kept, chosen by what the processor knows, and missed with a reason."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from summit_train.core.errors import RunFailed
from summit_train.models.fast import execution
from summit_train.models.fast import kernels as library
from summit_train.models.fast.kernels import Kernels, compiled, library_file, targets
from tests.worlds import PATIENCE_S, environment


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "summit_train" / "kernels"


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


def test_it_is_compiled_once_and_kept(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, of_another = tmp_path / "kernels.cpp", library_file(targets()[-1])
    source.write_text('extern "C" int answer() { return 42; }')  # small, as the real one takes seconds
    monkeypatch.setattr(library, "SOURCE", source)
    target = targets()[-1]
    assert library_file(target) != of_another
    before = os.umask(0)
    path = compiled(target)
    os.umask(before)
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


def test_what_the_compiler_says_is_passed_on(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text("int main( {\n")
    monkeypatch.setattr(library, "SOURCE", source)
    with pytest.raises(RunFailed, match=r"cannot compile kernels\.cpp: .*error"):
        compiled(targets()[-1])
    assert [file.suffix for file in empty_cache.iterdir()] == [".lock"]
    source.write_text("int main() {}\n")  # the next process tries again
    assert compiled(targets()[-1]).is_file()


def quick_compiler(path: Path) -> str:
    """A compiler whose file is no library."""
    path.write_text('#!/bin/sh\nfor last; do :; done\necho "no library" > "$last"\n')
    path.chmod(0o755)
    return str(path)


ASKING = "from summit_train.models.fast import execution; print(execution())"


def rank(number: int, ranks: int, **more: str) -> subprocess.Popen[str]:
    """A rank, as `--ranks` starts it, that needs the kernels."""
    environ = environment(SUMMIT_TRAIN_RANK=str(number), SUMMIT_TRAIN_RANKS=str(ranks), **more)
    return subprocess.Popen(
        [sys.executable, "-c", ASKING], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_one_rank_compiles_and_says_so_and_all_use_it(tmp_path: Path, empty_cache: Path) -> None:
    ranks = [rank(number, 2, XDG_CACHE_HOME=str(tmp_path), CXX="") for number in range(2)]
    said = [process.communicate(timeout=PATIENCE_S) for process in ranks]
    assert [out for out, _ in said] == [f"{targets()[0]}\n"] * 2
    (line,) = "".join(err for _, err in said).splitlines()
    file = empty_cache / library_file(targets()[0]).name
    assert re.fullmatch(rf"C\+\+ kernels: compiled to {file} in \d+ s", line) and file.is_file()
    out, err = rank(0, 1, XDG_CACHE_HOME=str(tmp_path)).communicate(timeout=PATIENCE_S)
    assert (out, err) == (f"{targets()[0]}\n", "")


class Elsewhere:
    """A process whose compiler has begun, and ends with an error where `go` says so."""

    def __init__(self, folder: Path) -> None:
        self.compiler, self.begun, self.go = folder / "compiler", folder / "begun", folder / "go"
        wait = f"echo >> {self.begun}; until [ -e {self.go} ]; do sleep 0.05; done"
        self.compiler.write_text(f"#!/bin/sh\n{wait}\necho 'error: no good' >&2; exit 1\n")
        self.compiler.chmod(0o755)
        self.process = rank(1, 2, XDG_CACHE_HOME=str(folder), CXX=str(self.compiler))
        until = time.monotonic() + PATIENCE_S
        while not self.begun.exists():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_ranks_that_waited_for_a_compiler_that_failed_do_not_try_again(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Elsewhere(tmp_path)
    monkeypatch.setenv("CXX", str(other.compiler))

    def wait(seconds: float) -> None:
        other.go.touch()
        other.process.wait(PATIENCE_S)

    monkeypatch.setattr(library, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    found, why = asked_again(), f"{other.compiler} cannot compile kernels.cpp: error: no good"
    assert isinstance(found, RunFailed) and str(found) == why and other.begun.read_text() == "\n"
    assert other.process.communicate() == (f"none: {why}\n", "")  # the first rank says it
    assert capsys.readouterr().err.splitlines() == [
        f"C++ kernels: none: {why}; PyTorch's operators are used, and steps on CPUs take longer"
    ]


def test_a_process_that_was_killed_keeps_no_other_from_compiling(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Elsewhere(tmp_path)
    other.process.kill()
    other.process.wait()
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


def test_a_file_system_without_locks_does(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unable(path: Path, *, wait: bool) -> Iterator[None]:
        path.touch()
        raise OSError(errno.ENOLCK, "No locks available")
        yield

    (tmp_path / "kernels.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(library, "SOURCE", tmp_path / "kernels.cpp")
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


def test_networks_run_without_them(tmp_path: Path) -> None:
    """A process without kernels computes the same network by PyTorch's operators, to rounding, and says so."""
    program = (
        "import torch\n"
        "from summit_train.models import build_model\n"
        "from summit_train.models.fast import accelerate, execution\n"
        "model = build_model('tsm', 'resnet18', 4, 3, width=0.25, generator=torch.Generator().manual_seed(0)).train()\n"
        "print(accelerate(model), execution(), sep='\\n')\n"
        "clip = torch.randn(2, 4, 32, 32, 3, generator=torch.Generator().manual_seed(1)).permute(0, 1, 4, 2, 3)\n"
        "logits = model.double()(clip.double())\n"
        "logits.square().sum().backward()\n"
        "print(*(f'{x:.12g}' for x in (*logits.flatten().tolist(), model.conv1.weight.grad.norm().item())))\n"
    )

    def told(cxx: str, cache: Path | None) -> list[str]:
        environment = {**library.os.environ, "CXX": cxx}
        if cache is not None:
            environment["XDG_CACHE_HOME"] = str(cache)
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    without, with_kernels = told("no-such-compiler", tmp_path), told("", None)
    assert without[0] == "no C++ kernels; replaced: 8 ShiftedConv2d"
    assert without[1] == "none: no compiler on PATH among no-such-compiler"
    assert with_kernels[0] == f"C++ kernels: {with_kernels[1]}; replaced: 20 FusedNorm, 8 FusedBlock, 8 ShiftedConv2d"
    numbers = [[float(word) for word in lines[2].split()] for lines in (without, with_kernels)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-8)
