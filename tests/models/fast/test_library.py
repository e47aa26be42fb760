"""The kernels' library: compiled once, kept, chosen by what the processor knows, and missed with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.core.errors import RunFailed
from summit_train.models.fast import execution
from summit_train.models.fast import kernels as library
from summit_train.models.fast.kernels import Kernels, compiled, library_file, targets


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
    assert {file.stat().st_mode & 0o777 for file in (path, path.parent)} == {0o755}  # whatever the umask
    assert path.parent == empty_cache and [entry.name for entry in empty_cache.iterdir()] == [path.name]
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
    assert not list(empty_cache.glob("*.so"))


def test_what_the_compiler_says_is_passed_on(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text("int main( {\n")
    monkeypatch.setattr(library, "SOURCE", source)
    with pytest.raises(RunFailed, match=r"cannot compile kernels\.cpp: .*error"):
        compiled(targets()[-1])
    assert list(empty_cache.iterdir()) == []


def test_a_compiled_file_that_cannot_be_loaded_is_a_reason(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process that compiles it and in later ones, as on a cache that is mounted noexec."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "no library" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    first, later = asked_again(), asked_again()
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
    assert without[0] == "C++ kernels: none: no compiler on PATH among no-such-compiler; replaced: 8 ShiftedConv2d"
    assert without[1] == "none: no compiler on PATH among no-such-compiler"
    assert with_kernels[0] == f"C++ kernels: {with_kernels[1]}; replaced: 20 FusedNorm, 8 FusedBlock, 8 ShiftedConv2d"
    numbers = [[float(word) for word in lines[2].split()] for lines in (without, with_kernels)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-8)
