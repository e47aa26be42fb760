"""The wheel, in an environment of its own and an empty folder: what a user does without the checkout.

The environment has this one's packages that the wheel requires, and no others. `make setup` installed them by pip.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cluster.test_job import CASES, script
from tests.worlds import PATIENCE_S, ROOT, Said, Say, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * PATIENCE_S)]

_PACKAGES = sysconfig.get_path("purelib")
# Where the checkout is an empty folder to the command, and the packages are in $1. Only root needs no user namespace.
_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
_HIDE = f"mount --bind '{_PACKAGES}' \"$1\" && mount -t tmpfs none '{ROOT}' && shift && exec \"$@\""
_HIDDEN = [*_UNSHARE, "sh", "-c", _HIDE, "sh"]
_COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from summit_train.__main__ import main
said = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = main(words)
        except SystemExit as leaving:  # argparse
            status = leaving.code
    said.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""
_RENDER = """
import pickle, sys
from pathlib import Path
from summit_train.cluster.job import render
from summit_train.cluster.site import load_site
for case, (site, overrides, job) in pickle.load(sys.stdin.buffer).items():
    Path(f"{case}.sh").write_text(render(load_site(site, overrides), job))
"""


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment, and an empty folder to work in."""

    wheel: Path
    sdist: Path
    python: Path
    packages: Path
    folder: Path

    def run(self, *words: str, given: bytes = b"") -> str:
        """Run Python, with the checkout out of sight; return its output."""
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*_HIDDEN, str(self.packages), str(self.python), *words],
            cwd=self.folder, input=given, env=variables, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip
        output = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == 0, output
        return output

    def __call__(self, *words: str) -> str:
        """Run summit-train; return its output."""
        return self.run("-m", "summit_train", *words)

    def each(self, commands: Sequence[Sequence[str]]) -> list[Said]:
        """Run commands of summit-train in one process, which imports torch once; return what each of them said."""
        return [(status, out, err) for status, out, err in json.loads(self.run("-c", _COMMANDS, json.dumps(commands)))]


def _made(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3 * PATIENCE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def tracked() -> list[str]:
    """Return the files of the checkout that git does not ignore."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and os.path.lexists(ROOT / name)]


def _required(wheel: Path, extra: str) -> set[str]:
    """Return the entries of site-packages that hold what a wheel requires, and what that requires in turn, and pip."""
    [own] = metadata.distributions(path=[str(wheel)])
    found, seen = set[str](), set[tuple[str, str]]()
    waiting = [(metadata.distribution("pip"), ""), (own, ""), (own, extra)]
    while waiting:
        distribution, extra = waiting.pop()
        if distribution is not own:
            found |= {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for line in map(Requirement, distribution.requires or ()):
            if line.marker is None or line.marker.evaluate({"extra": extra}):
                more = {(line.name, extra) for extra in ("", *line.extras)} - seen
                waiting += [(metadata.distribution(name), extra) for name, extra in more]
                seen |= more
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build an sdist of the tracked files, a wheel of the sdist, and install it into what it requires."""
    tmp = tmp_path_factory.mktemp("wheel")
    for name in ("source", "made", "packages", "work"):
        (tmp / name).mkdir()
    tried = subprocess.run([*_HIDDEN, str(tmp / "packages"), "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs to hide the checkout, which this user cannot: {tried.stderr.strip()}")
    for name in tracked():  # a copy, because setuptools leaves files in build/
        (tmp / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp / "source" / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp / 'made')!r})"
    _made([sys.executable, "-c", build], tmp / "source")
    [sdist] = (tmp / "made").glob("*.tar.gz")
    _made([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp / "made"), str(sdist)], tmp)
    [wheel] = (tmp / "made").glob("*.whl")
    _made([sys.executable, "-m", "venv", "--without-pip", str(tmp / "venv")], tmp)
    [site] = (tmp / "venv/lib").glob("*/site-packages")
    for entry in _required(wheel, "export"):
        (site / entry).symlink_to(tmp / "packages" / entry)
    made = Installed(wheel, sdist, tmp / "venv/bin/python", tmp / "packages", tmp / "work")
    made.run("-m", "pip", "install", "--no-index", "--no-compile", f"{wheel}[export]")  # or it says what is missing
    return made


def test_it_has_all_that_ships_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as file:
        wheel = {name for name in file.namelist() if ".dist-info/" not in name}
    kept = {name for name in tracked() if name.startswith("summit_train/")}
    shipping = r"jobs/(\w+\.sh\.j2|(build_horovod|copy)\.sh|constraints\.txt)"
    jobs = {name for name in tracked() if re.fullmatch(shipping, name)}
    shipped = {f"summit_train/{name}" for name in tracked() if name.startswith("configs/") or name in jobs}
    assert wheel == kept - {"summit_train/configs", "summit_train/jobs"} | shipped
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert wheel <= names


def test_every_job_script_is_that_of_the_checkout_byte_for_byte(installed: Installed) -> None:
    installed.run("-c", _RENDER, given=pickle.dumps(CASES))
    assert {case: (installed.folder / f"{case}.sh").read_bytes() for case in CASES} == {
        case: script(case).encode() for case in CASES
    }


def test_from_a_folder_of_videos_to_an_exported_network(installed: Installed) -> None:
    """The commands are those that `init` prints, but for a run that is small enough for a test."""
    run = installed
    run("data", "motion", "made", "--train", "16", "--val", "8", "--size", "32")
    said = run("init", "made", "--out", "mine.yaml")
    assert "summit-train plan mine.yaml" in said and "summit-train train mine.yaml" in said
    small = ["model.backbone=resnet18", "model.width=0.25", "data.crop=32", "data.short_side=[32,32]"]
    small += ["data.num_frames=4", "evaluate.short_side=32", "evaluate.clips=1", "schedule.epochs=1", "data.workers=1"]
    small += ["schedule.warmup_epochs=0", "scale={gpus: 2, clips_per_gpu: 4}", "checkpoint.every_minutes=null"]
    assert "virtual GPUs   2 = 2 ranks x 1 accumulation" in run("plan", "mine.yaml", "--ranks", "2", *small)
    assert "top-1" in run("train", "mine.yaml", *small, "name=one")
    assert "top-1" in run("train", "mine.yaml", "--ranks", "2", *small, "name=two")
    one, two = (json.loads((run.folder / f"runs/{name}/eval.json").read_text()) for name in ("one", "two"))
    assert one["videos"] == two["videos"] == 8 and (run.folder / "runs/two/report.html").is_file()
    run("report", "runs/one", "runs/two", "--out", "both.html")
    assert (run.folder / "both.html").stat().st_size > 10_000
    run("export", "runs/two", "--out", "net.onnx")
    assert (run.folder / "net.onnx").is_file()


def test_a_job_is_written_for_every_scheduler_as_from_the_checkout(
    installed: Installed, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(installed.folder)
    sites = ("slurm_generic", "lsf_generic", "pbs_generic", "flux_generic", "local")
    words = ["--nodes", "1", "--clips", "240000", "--dry-run", "model.pretrained=null", "data.stage=null"]
    words += ["--set", "account=abc"]
    commands = [["submit", "shipped:kinetics/tsm_r50_8f", "--site", site, *words] for site in sites]
    for command, (status, out, err) in zip(commands, installed.each(commands), strict=True):
        ours = [text.replace(sys.executable, str(installed.python)) for text in say(*command)[1:]]
        assert status == 0 and [out, err] == ours


def test_sweeps_and_simulations_know_what_ships(installed: Installed) -> None:
    words = ("--site", "summit", "--clips", "240000", "--dry-run", "model.pretrained=null", "data.stage=null")
    helped = ("simulate", "bench", "submit", "doctor", "sweep")
    sweep, simulate, configs, *helps = installed.each(
        [
            ["sweep", "shipped:sweeps/table3", *words],
            ["simulate", "shipped:kinetics/tsm_r50_8f_1536gpu", "--machine", "summit", "--nodes", "1,256"],
            ["configs"],
            *([command, "--help"] for command in helped),
        ]
    )
    assert "nodes-1024" in sweep[1] and "256" in simulate[1] and "shipped:kinetics/tsm_r50_8f" in configs[1]
    assert [status for status, _, _ in (sweep, simulate, configs, *helps)] == [0] * (3 + len(helped))
    assert all(f"usage: summit-train {name}" in out for name, (_, out, _) in zip(helped, helps, strict=True))


def test_doctor_finds_an_environment_without_horovod_in_order(installed: Installed) -> None:
    assert "checkout" not in installed("doctor")
