"""Fixtures that several folders of tests share: a small real data set, and a spec that trains on it in seconds."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from summit_train.core.watch import STOP_SIGNALS
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.models.network import separate_compile_cache
from tests.slurm import Slurm, missing, running_slurm
from tests.standins import Standins
from tests.worlds import Say, environment, main_said, train


def _forget_the_users_settings() -> None:
    """Leave out of the environment what changes the words of programs: a terminal's, a language's and a job's."""
    unwanted = {"COLUMNS", "LINES", "LANGUAGE", "PYTHONIOENCODING", "NO_COLOR", "FORCE_COLOR"}
    for name in unwanted | os.environ.keys() - environment().keys():
        os.environ.pop(name, None)
    os.environ["LC_ALL"] = "C.UTF-8"


_forget_the_users_settings()
# A child that collected its parent's garbage could wait for ever for the threads of a library, which it does not have.
os.register_at_fork(after_in_child=gc.freeze)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
separate_compile_cache()
settings.register_profile("shared_machine", deadline=None)  # a test's time says nothing of its code here
settings.load_profile("shared_machine")

WriteSpec = Callable[..., Path]

# Modules whose tests share what takes long to make: one process runs all tests of a name, and makes it once.
TOGETHER = {
    "tests/cli/test_golden_words.py": "golden words",
    "tests/cluster/test_environment.py": "environment",
    "tests/cluster/test_lost_nodes.py": "lost nodes",
    "tests/cluster/test_slurm.py": "slurm",
    "tests/data/video/test_mutants.py": "mutants",
    "tests/training/test_averaging_runs.py": "averaging",
    "tests/training/test_foreign.py": "foreign",
    "tests/training/test_golden_runs.py": "golden runs",
    "tests/training/test_own_parts.py": "own parts",
    "tests/training/test_run.py": "run",
    "tests/test_configs.py": "configs",
    "tests/test_house.py": "house",
    "tests/test_wheel.py": "wheel",
}


# Folders with most of the tests that wait for ranks.
RANKS = ("tests/training/", "tests/core/", "tests/cluster/")


class Together(LoadScopeScheduling):
    """Hand out tests one by one, but those of TOGETHER as one. (The marks xdist_group do nothing with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(_module(nodeid), nodeid)


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_configure() -> None:
    if sys.getfilesystemencoding() != "utf-8":
        raise pytest.UsageError("the tests have files with names in UTF-8; set PYTHONUTF8=1, as `make test` does")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long: what began last would run alone, while the other processes have nothing left."""

    def place(item: pytest.Item) -> int:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"nightly", "slow"} or _module(item.nodeid) in TOGETHER:
            return 0
        return 1 if item.nodeid.startswith(RANKS) else 2

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Leave what the modules of the tests have imported out of every garbage collection from here on."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give every test the same random numbers, those of its module's fixtures too, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Give the handlers back that a run in this process changed: one that is done ignores requests to stop."""
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process of this test session to need it makes for all of them."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        made = folder.with_suffix(".made")
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a failed try has left
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def motion_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 training and 11 validation videos of 32 x 32 pixels and 8 frames, 4 classes: real mp4 files."""

    def make(folder: Path) -> None:
        for _ in write_motion_set(folder, 80, 11, MotionSet(size=32, num_frames=8)):
            pass

    return made_once(tmp_path_factory, "motion", make)


@pytest.fixture(scope="session")
def eight_videos(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The spec's `data` for the first 8 training videos of `motion_set`, of which 2 are the validation set, too."""

    def make(folder: Path) -> None:
        rows = (motion_set / "train.csv").read_text().splitlines()
        for name, videos in (("train", 8), ("val", 2)):
            (folder / f"{name}.csv").write_text("\n".join(rows[: 1 + videos]) + "\n")
        (folder / "classes.txt").write_text((motion_set / "classes.txt").read_text())

    folder = made_once(tmp_path_factory, "eight", make)
    return {"root": str(motion_set), "train": str(folder / "train.csv"), "val": str(folder / "val.csv")}


@pytest.fixture
def write_spec(motion_set: Path, tmp_path: Path) -> WriteSpec:
    """Writes specs into the test's own folder; see `spec_writer`."""
    return spec_writer(motion_set, tmp_path)


def spec_writer(motion_set: Path, folder: Path) -> WriteSpec:
    """Writes a spec that trains a tiny TSM on `motion_set`: 4 virtual GPUs of 2 clips, 10 steps an epoch, 2 epochs,
    one of them warm-up; half an epoch of warm-up where `schedule` has one epoch.

    Sections given as keywords are laid over it: write_spec(name="a", schedule={"epochs": 1}). The file is
    `folder`/NAME.yaml, the run goes to `folder`/runs/NAME.
    """

    def write(name: str = "run", **sections: object) -> Path:
        values: dict[str, object] = {
            "name": name,
            "model": {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 4, "dropout": 0.2},
            "data": {
                "train": str(motion_set / "train.csv"),
                "val": str(motion_set / "val.csv"),
                "num_frames": 4,
                "frame_stride": 1,
                "short_side": [32, 40],
                "crop": 32,
                "workers": 0,
            },
            "scale": {"gpus": 4, "clips_per_gpu": 2},
            "optimizer": {"base_lr": 0.005, "weight_decay": 1e-3},
            "schedule": {"epochs": 2},
            "evaluate": {"every_epochs": 0, "clips": 1, "short_side": 32, "last_checkpoints": 1},
            "checkpoint": {},
            "run_dir": str(folder / "runs"),
        }
        for section, keys in sections.items():
            former: Any = values.get(section, {})
            values[section] = {**former, **keys} if isinstance(keys, dict) else keys
        schedule = values["schedule"]
        assert isinstance(schedule, dict)
        values["schedule"] = {"warmup_epochs": 1 if schedule.get("epochs", 2) > 1 else 0.5, **schedule}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


ONLINE = {"shift_direction": "past"}  # the model of `trained_run`, where it differs from `spec_writer`'s


@pytest.fixture(scope="session")
def trained_run(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained an online TSM for two epochs. Tests leave it as it is, or copy it."""

    def make(folder: Path) -> None:
        train(0, spec_writer(motion_set, folder)("run", model=ONLINE))

    return made_once(tmp_path_factory, "trained", make) / "runs/run"


@pytest.fixture(scope="session")
def one_epoch_run(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, of `spec_writer`'s own network. Tests leave it as it is, or copy it."""

    def make(folder: Path) -> None:
        train(0, spec_writer(motion_set, folder)("run", schedule={"epochs": 1}))

    return made_once(tmp_path_factory, "one_epoch", make) / "runs/run"


@pytest.fixture
def done(write_spec: WriteSpec, one_epoch_run: Path, tmp_path: Path) -> str:
    """The spec of a copy of `one_epoch_run`, at `runs/run` in the test's own folder."""
    shutil.copytree(one_epoch_run, tmp_path / "runs/run")
    return str(write_spec(schedule={"epochs": 1}))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `summit-train ...` in this process: (status, stdout, stderr)."""
    return partial(main_said, capsys)


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standins:
    """Stand-ins for the commands of schedulers, first on PATH."""
    found = Standins(tmp_path / "standins", "sbatch", "squeue", "bsub", "bjobs", "qsub", "qselect", "flux")
    for name in ("STANDINS", "PATH"):
        monkeypatch.setenv(name, found.environ[name])
    return found


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm of three nodes, started once for all tests. Skips where it cannot be; as root in CI it must be."""
    lacking = missing()
    if lacking is None:
        with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    elif os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(lacking)
    else:
        pytest.skip(lacking)
