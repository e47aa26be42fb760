"""A task is a folder and a line: tests/tasks/moment, which finds the frame of an event by regression, as a third one.

The folder and its line are added to a copy of the package, which reads real videos, trains, scores and reports.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from summit_train.data.video.encode import write_video
from tests.runs import records
from tests.worlds import environment, needs_ranks

HERE = Path(__file__).parent
FRAMES = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package that has the third task, its videos and its spec: the light goes on in each of them."""
    place = tmp_path_factory.mktemp("third")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE.parents[1] / "summit_train", place / "summit_train", ignore=skipped)
    shutil.copytree(HERE / "moment", place / "summit_train/tasks/moment", ignore=skipped)
    table = place / "summit_train/tasks/task.py"
    line = '    "detection",\n'
    assert table.read_text().count(line) == 1
    table.write_text(table.read_text().replace(line, f'{line}    "moment",\n'))
    draw = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 9)):
        rows = ["path,label,moment"]
        for number in range(count):
            event = 2 + number % (FRAMES - 3)
            frames = draw.integers(40, 80, (FRAMES, 48, 48, 3), np.uint8)
            frames[event:] += 120
            write_video(place / f"{split}{number}.mp4", frames, 25, quality=12)
            rows.append(f"{split}{number}.mp4,0,{event}")
        (place / f"{split}.csv").write_text("\n".join(rows) + "\n")
    spec = {
        "name": "found", "task": "moment", "precision": "fp64", "run_dir": str(place / "runs"),
        "model": {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 1,
                  "moment": {"tolerance": 2.5}},
        "data": {"train": str(place / "train.csv"), "val": str(place / "val.csv"), "root": str(place), "num_frames": 8,
                 "sampling": "uniform", "short_side": [36, 40], "crop": 32, "workers": 1},
        "scale": {"gpus": 2, "clips_per_gpu": 4},
        "optimizer": {"base_lr": 0.002, "weight_decay": 5e-4},
        "schedule": {"epochs": 10, "warmup_epochs": 1},
        "evaluate": {"every_epochs": 5, "clips": 2, "short_side": 32, "last_checkpoints": 1},
        "checkpoint": {"keep_best": "within"},
    }  # fmt: skip
    (place / "spec.yaml").write_text(yaml.safe_dump(spec))
    return place


def said(place: Path, *words: str) -> tuple[int, str, str]:
    """Run a command of the package with the third task: (exit status, stdout, stderr)."""
    command = [sys.executable, "-m", "summit_train", *words]
    done = subprocess.run(command, cwd=place, env=environment(PYTHONPATH=str(place)), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly
@needs_ranks
def test_a_third_task_is_trained_on_ranks_evaluated_and_reported(place: Path) -> None:
    status, out, err = said(place, "train", "spec.yaml", "--ranks", "2", "name=on_2")
    assert status == 0, out + err
    run = place / "runs/on_2"
    result = json.loads((run / "eval.json").read_text())
    # In the middle of the training videos' events, 8, the mean error would be 2.7.
    assert result["within_mean"] > 60 and result["frames_mean"] < 1.8
    with np.load(next((run / "predictions").glob("*.npz"))) as file:
        errors = np.abs(file["moments"] - file["events"])
    assert result["frames_mean"] == pytest.approx(errors.mean(), rel=1e-6)
    assert result["within_mean"] == pytest.approx(100 * (errors <= 2.5).mean(), rel=1e-6)
    losses = [step["loss"] for step in records(run, "step")]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) / 2
    page = (run / "report.html").read_text()
    assert "<h3>Moments</h3>" in page and f"{result['frames_mean']:.2f} frames" in page
    worst = re.search(r"<p>(val\d\.mp4): found in frame", page)
    assert worst is not None and worst.group(1) == f"val{errors.argmax()}.mp4"
    assert json.loads((run / "checkpoints/best.json").read_text())["measure"] == "within"
    status, out, err = said(place, "eval", "runs/on_2", "--json", "model.moment.tolerance=0")
    assert status == 0, err
    assert json.loads(out)["within_mean"] == pytest.approx(100 * (errors == 0).mean()), "the key decides"


def test_its_keys_and_its_list_are_checked_with_the_others(place: Path) -> None:
    words = ["model.num_classes=2", "loss.kind=softmax", "data.augment=whole", "data.span_frames=4"]
    status, _, err = said(place, "plan", "spec.yaml", *words)
    assert status == 2 and "model.num_classes: must be 1 with task moment, the event, got 2" in err
    assert "loss.kind: must be moment with task moment, got softmax" in err
    assert "data.augment: must not be whole with task moment" in err and "data.span_frames: must be null with" in err
    status, _, err = said(place, "plan", "spec.yaml", "model.moment.tolerance=-1", "model.moment.wide=3")
    assert status == 2 and "model.moment.tolerance: Input should be greater than or equal to 0" in err
    assert "model.moment.wide: unknown key; valid: tolerance" in err
    status, _, err = said(place, "plan", "spec.yaml", "task=classification")
    assert status == 2 and "model.moment: must be null with task classification" in err
    others = ["task=classification", "model.moment=null", "checkpoint.keep_best=null"]
    status, _, err = said(place, "plan", "spec.yaml", *others)
    assert status == 2 and "is a list with events; set task to moment, got classification" in err
    (place / "wrong.csv").write_text("path,label,moment\ntrain0.mp4,0,soon\n")
    status, _, err = said(place, "plan", "spec.yaml", "data.train=wrong.csv")
    assert status == 2 and "wrong.csv:2: moment must be a whole number from 0 on, got 'soon'" in err


@pytest.mark.nightly
def test_its_list_is_scanned_split_and_packed_with_the_events(place: Path) -> None:
    (place / "late.csv").write_text("path,label,moment\ntrain0.mp4,0,16\ntrain1.mp4,0,3\n")
    status, out, err = said(place, "data", "index", "late.csv", "--root", str(place), "--out", "good.csv")
    assert status == 0 and "its event is in frame 16, and it has 16" in (place / "good.left_out.csv").read_text(), err
    assert [row["moment"] for row in csv.DictReader((place / "good.csv").read_text().splitlines())] == ["3"]
    status, out, err = said(place, "data", "pack", "val.csv", "packed", "--root", str(place), "--kind", "bytes")
    assert status == 0, err
    assert np.load(place / "packed/manifest/moment.npy").tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    status, out, err = said(place, "plan", "spec.yaml", "--json", "data.train=packed")
    assert status == 0 and json.loads(out)["clips"] == 9, err
