"""The wheel, in an environment of its own and an empty folder: what a user does without the checkout."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.test_job import CASES, GOLDEN
from tests.worlds import PATIENCE_S, ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S)]

# Where the checkout is an empty folder to the command. Only root needs no user namespace.
_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
_HIDDEN = [*_UNSHARE, "sh", "-c", f"mount -t tmpfs none '{ROOT}' && exec \"$@\"", "sh"]
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
    folder: Path

    def run(self, *words: str, given: bytes = b"", status: int = 0) -> str:
        """Run Python, with the checkout out of sight; return its output."""
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*_HIDDEN, str(self.python), *words],
            cwd=self.folder, input=given, env=variables, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip
        output = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == status, output
        return output

    def __call__(self, *words: str, status: int = 0) -> str:
        """Run summit-train; return its output."""
        return self.run("-m", "summit_train", *words, status=status)


def _made(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3 * PATIENCE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def tracked() -> list[str]:
    """Return the files of the checkout that git does not ignore."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build an sdist of the tracked files, a wheel of the sdist, and install it with what it requires."""
    tried = subprocess.run([*_HIDDEN, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs to hide the checkout, which this user cannot: {tried.stderr.strip()}")
    tmp = tmp_path_factory.mktemp("wheel")
    for name in ("source", "made", "work"):
        (tmp / name).mkdir()
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
    python, pins = tmp / "venv/bin/python", ROOT / "jobs/constraints.txt"
    install = [*pip, f"--python={python}", "install", "--no-compile", "-c", str(pins)]
    _made([*install, "torch"], tmp)  # first and alone, as docs/install.md has it
    _made([*install, f"{wheel}[export]"], tmp)
    return Installed(wheel, sdist, python, tmp / "work")


def test_it_has_all_that_ships_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as file:
        wheel = {name for name in file.namelist() if ".dist-info/" not in name}
    kept = {name for name in tracked() if name.startswith("summit_train/")}
    jobs = {name for name in tracked() if re.fullmatch(r"jobs/(\w+\.sh\.j2|build_horovod\.sh|constraints\.txt)", name)}
    shipped = {f"summit_train/{name}" for name in tracked() if name.startswith("configs/") or name in jobs}
    assert wheel == kept - {"summit_train/configs", "summit_train/jobs"} | shipped
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert wheel <= names


def test_every_job_script_is_the_golden_file_byte_for_byte(installed: Installed) -> None:
    installed.run("-c", _RENDER, given=pickle.dumps(CASES))
    assert {case: (installed.folder / f"{case}.sh").read_bytes() for case in CASES} == {
        case: (GOLDEN / f"{case}.sh").read_bytes() for case in CASES
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


@pytest.mark.parametrize("site", ["slurm_generic", "lsf_generic", "pbs_generic", "flux_generic", "local"])
def test_a_job_is_written_for_every_scheduler_as_from_the_checkout(installed: Installed, site: str) -> None:
    words = ["-m", "summit_train", "submit", "shipped:kinetics/tsm_r50_8f", "--site", site, "--nodes", "1"]
    words += ["--clips", "240000", "--dry-run", "model.pretrained=null", "data.stage=null", "--set", "account=abc"]
    ours = [sys.executable, *words]
    done = subprocess.run(ours, cwd=installed.folder, env=environment(), capture_output=True, text=True)
    theirs = (done.stdout + done.stderr).replace(sys.executable, str(installed.python))
    assert done.returncode == 0 and installed.run(*words) == theirs


def test_sweeps_and_simulations_know_what_ships(installed: Installed) -> None:
    words = ("--site", "summit", "--clips", "240000", "--dry-run")
    said = installed("sweep", "shipped:sweeps/table3", *words, "model.pretrained=null", "data.stage=null")
    assert "nodes-1024" in said
    said = installed("simulate", "shipped:kinetics/tsm_r50_8f_1536gpu", "--machine", "summit", "--nodes", "1,256")
    assert "256" in said
    assert "shipped:kinetics/tsm_r50_8f" in installed("configs")
    for command in ("simulate", "bench", "submit", "doctor", "sweep"):
        assert "usage: summit-train" in installed(command, "--help")


def test_doctor_finds_an_environment_without_horovod_in_order(installed: Installed) -> None:
    assert "checkout" not in installed("doctor")
