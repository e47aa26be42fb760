"""A run that is killed at any file operation, and whose log is then lost, ends as one that nothing interrupted.

At every operation, in some minutes: python -m tests.training.test_kills. The test takes some of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.core.run_folder import find_checkpoints, step_of
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.spec import load_spec
from tests.conftest import spec_writer
from tests.killing import killed_at
from tests.runs import assert_bit_equal, load_any
from tests.worlds import forked, main_without_reports

SECTIONS: dict[str, Any] = {
    "data": {"num_frames": 2},
    "scale": {"gpus": 2, "clips_per_gpu": 2},
    "optimizer": {"base_lr": 0.05, "freeze": [{"names": ["layer1"], "until_epoch": 1}]},
    "schedule": {"epochs": 6, "warmup_epochs": 0.5, "early_stop": {"measure": "top1", "epochs": 2}},
    "evaluate": {"every_epochs": 1},
    "checkpoint": {"keep_best": "top1"},
    "ema": {"decay": 0.5},
}
LEFT_OUT = ("metrics.jsonl", "lock", "tensorboard")  # the log, and what each start adds to


def _files(run: Path) -> set[str]:
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(LEFT_OUT)}


def _last_state(run: Path) -> dict[str, Any]:
    return load_any(find_checkpoints(run)[-1])


def _kill_everywhere(run: Path, begin: Callable[[Path], object], work: Callable[[], object], stride: int) -> int:
    """Kill `work` at each `stride`-th operation in the folder `run`, and do it again without the log; return how many.

    begin: makes the folder as it is before the work. The end must be that of a work that nothing interrupted.
    """
    whole, number = run.with_name("whole"), 1
    begin(run)
    work()
    run.rename(whole)
    begin(run)
    while killed_at(number, run, work):
        (run / "metrics.jsonl").unlink(missing_ok=True)
        work()
        assert_bit_equal(_last_state(whole), _last_state(run))
        assert _files(run) == _files(whole), f"killed at operation {number}"
        for name in ("checkpoints/best.json", "extension.json"):
            if (whole / name).exists():
                assert (run / name).read_text() == (whole / name).read_text(), f"killed at operation {number}"
        assert load_spec(run / "spec.yaml") == load_spec(whole / "spec.yaml")
        shutil.rmtree(run)
        begin(run)
        number += stride
    return (number - 1) // stride


def _train(words: list[str], train: Callable[[list[str]], int]) -> None:
    assert train(words) == 0, words


def kill_a_run(folder: Path, videos: Path, stride: int) -> int:
    """Kill a run that freezes, averages, keeps its best and stops early."""
    spec = spec_writer(videos, folder)("run", **SECTIONS)
    run = folder / "runs/run"
    number = _kill_everywhere(
        run, lambda path: path.mkdir(parents=True), lambda: _train(["train", str(spec)], main_without_reports), stride
    )
    last = step_of(find_checkpoints(run.with_name("whole"))[-1])
    assert last == 6, f"it must stop early after 3 of 6 epochs of 2 steps, got step {last}"
    return number


def kill_an_extension(folder: Path, videos: Path, stride: int) -> int:
    """Kill `--more-epochs 1` of a finished run, the report included."""
    spec = spec_writer(videos, folder)("done", **SECTIONS | {"schedule": {"epochs": 2, "warmup_epochs": 0.5}})
    _train(["train", str(spec)], main_without_reports)
    done, run = folder / "runs/done", folder / "runs/run"
    number = _kill_everywhere(
        run,
        lambda path: shutil.copytree(done, path),
        lambda: _train(["train", str(run), f"run_dir={run.parent}", "name=run", "--more-epochs", "1"], main),
        stride,
    )
    whole = json.loads((run.with_name("whole") / "extension.json").read_text())
    assert whole == {"before": 2, "after": 3, "is_done": True}
    assert step_of(find_checkpoints(run.with_name("whole"))[-1]) == 6
    return number


def _eight(folder: Path) -> Path:
    for _ in write_motion_set(folder, 8, 4, MotionSet(size=32, num_frames=8)):
        pass
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(("kill", "stride"), [(kill_a_run, 23), (kill_an_extension, 19)])
def test_a_run_killed_anywhere_is_bit_equal(
    tmp_path: Path, kill: Callable[[Path, Path, int], int], stride: int
) -> None:
    def work() -> int:
        return 0 if kill(tmp_path, _eight(tmp_path / "videos"), stride) >= 4 else 1

    status, output = forked(0, work)
    assert status == 0, output


if __name__ == "__main__":
    for kill in (kill_a_run, kill_an_extension):
        with tempfile.TemporaryDirectory() as name:
            number = kill(Path(name), _eight(Path(name) / "videos"), 1)
        print(f"{kill.__name__}: killed at {number} operations, {number} equal ends", file=sys.stderr)
