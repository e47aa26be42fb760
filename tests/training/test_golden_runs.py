"""Tiny runs of every solver, method, task and kind of network, on 1 and on 3 ranks: a refactor must not move them.

Everything is in double, on pictures that are cropped and not scaled, so that neither decoders nor the order of sums
matter. On three ranks, which share four virtual GPUs unevenly, each run is stopped once and continued; on one rank each
is continued from its first checkpoint too, and ends in the same bits. Write the file anew only where a change is meant
to move results, and give the reason in the commit:
    python -m tests.training.test_golden_runs
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from summit_train.spec import load_spec
from summit_train.spec.keys import OptimizerSpec, TrustRatioSpec
from tests.conftest import made_once
from tests.flows import write_moving_set
from tests.runs import assert_bit_equal, load_any, records
from tests.worlds import forked, main_without_reports, signal_at, train

GOLDEN = Path(__file__).parents[1] / "golden" / "runs.json"
SECTIONS = GOLDEN.with_suffix(".yaml")
TRAIN, VAL, FRAMES, SIDE = 24, 9, 8, 32
STOPPED_AT = 4  # the update at which the run on three ranks is asked to stop, from 1
# Relative, of vectors to their norms. The order of sums moves most runs by 1e-14; rounding grows at a large LR, and in
# networks with many normalisations over few numbers.
TOLERANCE = 1e-9
TOLERANCES = {"early stop, keep best": 1e-6, "x3d": 1e-6}
# Where torch has no AVX2, its random normal numbers, and so the first weights, are others in the last bits of fp32.
OTHER_WEIGHTS = 1e-5

NOT_COMPARED = ("kind", "time", "seconds")

# The golden file has the digest of these bytes.
PARTS = '''
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Focal:
    def __init__(self, gamma=2.0):
        self.gamma = gamma

    def __call__(self, logits, targets):
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return (1 - torch.exp(-losses)) ** self.gamma * losses


def dim(clip, generator, most=0.5):
    return (clip * generator.uniform(1 - most, 1)).astype(clip.dtype)


def recall(scores, labels):
    right = scores.argmax(1) == labels
    return np.mean([right[labels == label].mean() for label in set(labels)])


def hold(progress, epoch, until=0.7):
    return min(1, (1 - progress) / (1 - until))


class Twice(nn.Module):
    """A block that runs twice in a pass, the second time recomputed, and a tied pair."""

    def __init__(self, num_classes, num_frames, width=6):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, 4)
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, num_classes)
        self.side = nn.Linear(width, num_classes)
        self.side.weight = self.head.weight

    def forward(self, clip):
        x = self.block(self.stem(clip.flatten(0, 1)))
        x = checkpoint(self.block, x, use_reentrant=False)
        x = self.drop(x.mean((2, 3)).unflatten(0, clip.shape[:2]).mean(1))
        return self.head(x) + self.side(x)
'''
SMALL = {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 4, "dropout": 0.2}


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of each run's spec that differ from a tiny TSM's."""
    text = SECTIONS.read_text().replace("PARTS", f"{folder}/parts.py")
    sections: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return sections


def write_set(folder: Path) -> None:
    """Write pictures of squares that move in one of four directions, their lists, with boxes too, flow and parts.py."""
    generator = np.random.default_rng(0)
    steps = [(2, 0), (0, 2), (-2, 0), (0, -2)]
    for name, number in (("train", TRAIN), ("val", VAL)):
        lines, boxes = ["path,label,num_frames"], ["video,frame,track,label,left,top,width,height"]
        for clip in range(number):
            label = clip % 4
            path = folder / f"{name}{clip}"
            path.mkdir(parents=True)
            pixels = generator.integers(0, 90, (FRAMES, SIDE, SIDE, 3), np.uint8)
            left, top = (int(place) for place in generator.integers(8, 16, 2))
            for frame in range(FRAMES):
                x = min(max(left + frame * steps[label][0], 0), SIDE - 8)
                y = min(max(top + frame * steps[label][1], 0), SIDE - 8)
                pixels[frame, y : y + 8, x : x + 8] += np.array([150, 100, 30 * label], np.uint8)
                Image.fromarray(pixels[frame]).save(path / f"img_{frame + 1:05}.png")
                boxes.append(f"{path.name},{frame},0,{label % 2},{x},{y},8,8")
            lines.append(f"{path.name},{label},{FRAMES}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        (folder / f"boxes_{name}.csv").write_text("\n".join(boxes) + "\n")
    (folder / "flow").mkdir()
    write_moving_set(folder / "flow", TRAIN, VAL, 8)
    (folder / "parts.py").write_text(PARTS)


def write_specs(folder: Path, runs_folder: str) -> dict[str, Path]:
    """Write each run's spec, with the set's folder as `folder`, and return the files by the runs' names."""
    paths = {}
    for place, (name, sections) in enumerate(runs(folder).items()):
        values: dict[str, Any] = {
            "name": f"run{place}",
            "model": SMALL,
            "data": {
                "train": "train.csv", "val": "val.csv", "num_frames": 4, "frame_stride": 1,
                "short_side": [SIDE, SIDE], "crop": SIDE, "workers": 0,
            },
            "scale": {"gpus": 4, "clips_per_gpu": 2},
            "optimizer": {"base_lr": 0.005, "weight_decay": 1e-3},
            "schedule": {"epochs": 2, "warmup_epochs": 0.5},
            "evaluate": {"every_epochs": 0, "clips": 1, "short_side": SIDE, "last_checkpoints": 1},
            "precision": "fp64",
            "run_dir": str(folder / runs_folder),
        }  # fmt: skip
        for section, keys in sections.items():
            values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
        for which in ("train", "val"):
            values["data"][which] = str(folder / values["data"][which])
        paths[name] = folder / f"{runs_folder}_{place}.yaml"
        paths[name].write_text(yaml.safe_dump(values))
    return paths


def train_all(folder: Path) -> None:
    """Train every run on one rank, and on three where it is stopped and continued."""
    alone, together = write_specs(folder, "alone"), write_specs(folder, "together")

    def all_alone() -> int:
        return max(main_without_reports(["train", str(path)]) for path in alone.values())

    status, output = forked(0, all_alone)
    assert status == 0, output
    for name, path in together.items():

        def stopped(path: Path = path) -> int:
            signal_at(STOPPED_AT)
            return main_without_reports(["train", str(path)])

        status, output = forked(3, stopped)
        assert status == 85, f"{name}: {output}"
        train(3, path)
    for place, number in (("alone", 1), ("together", 3)):
        train(number, folder / place / f"run{list(alone).index('more epochs')}", "--more-epochs", "1")


def train_again(folder: Path) -> None:
    """Continue a copy of every run on one rank from its first checkpoint."""
    shutil.copytree(folder / "alone", folder / "again")
    for run in (folder / "again").iterdir():
        _, *others = sorted((run / "checkpoints").glob("step_????????.pt"))
        assert others, run
        for path in others:
            path.unlink()

    def all_again() -> int:
        return max(main_without_reports(["train", str(run)]) for run in sorted((folder / "again").iterdir()))

    status, output = forked(0, all_again)
    # the three whose parts are trained from here on
    assert status == 0 and output.count("epoch 1: optimizer.freeze ends for ") == 3, output


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of a state, by their names joined by dots."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {k: v for key, part in enumerate(value) for k, v in flat(part, f"{name}.{key}").items()}
    return {name: value}


def projected(numbers: Sequence[float]) -> list[float]:
    """Return the norm of a vector and its product with a fixed one: rounding moves both a little, any change both."""
    vector = np.asarray(numbers, np.float64)
    return [float(np.linalg.norm(vector)), float(vector @ np.cos(np.arange(len(vector)) * math.sqrt(2)))]


def last_state(run: Path) -> dict[str, Any]:
    return load_any(max((run / "checkpoints").glob("step_????????.pt")))


def row_of(run: Path) -> dict[str, Any]:
    """Return what a run has ended in: its losses, validations, final state and scores."""
    state = {name.lstrip("."): value for name, value in flat(last_state(run)).items()}
    vectors: dict[str, list[float]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            group = "statistics" if "running_" in name else name.partition(".")[0]
            vectors.setdefault(group, []).extend(value.double().flatten().tolist())
    losses = {record["step"]: record["loss"] for record in records(run, "step")}
    scores = [np.load(file) for file in sorted((run / "predictions").glob("*.npz"))]
    arrays = [file[name] for file in scores for name in file.files]
    vectors["scores"] = [float(number) for array in arrays if array.dtype.kind == "f" for number in array.ravel()]
    return {
        "losses": [losses[step] for step in sorted(losses)],
        "evals": [{key: record[key] for key in record if key not in NOT_COMPARED} for record in records(run, "eval")],
        "keys": hashlib.sha256("\n".join(sorted(state)).encode()).hexdigest()[:16],
        "ends": {group: projected(vector) for group, vector in sorted(vectors.items())},
    }


def rows(folder: Path, runs_folder: str) -> dict[str, Any]:
    return {name: row_of(folder / runs_folder / f"run{place}") for place, name in enumerate(runs(folder))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        write_set(folder)
        train_all(folder)

    return made_once(tmp_path_factory, "golden_runs", make)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["alone", "together"])
def test_every_run_ends_as_in_the_golden_file(trained: Path, place: str) -> None:
    golden, found = json.loads(GOLDEN.read_text()), rows(trained, place)
    assert list(found) == list(golden)
    has_avx2 = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    for name, row in golden.items():
        assert found[name]["keys"] == row["keys"], name
        if not has_avx2:
            assert found[name]["losses"][:3] == pytest.approx(row["losses"][:3], rel=OTHER_WEIGHTS), name
            continue
        tolerance = TOLERANCES.get(name, TOLERANCE)
        assert found[name]["losses"] == pytest.approx(row["losses"], rel=tolerance), name
        assert len(found[name]["evals"]) == len(row["evals"]), name
        for validation, expected in zip(found[name]["evals"], row["evals"], strict=True):
            assert validation.pop("classes") == pytest.approx(expected.pop("classes"), rel=tolerance), name
            assert validation == pytest.approx(expected, rel=tolerance), name
        assert list(found[name]["ends"]) == list(row["ends"]), name
        for group, (norm, product) in row["ends"].items():
            assert found[name]["ends"][group] == pytest.approx([norm, product], abs=tolerance * norm), (name, group)


@pytest.mark.nightly
def test_every_run_that_continues_ends_in_the_same_bits(trained: Path) -> None:
    train_again(trained)
    for place, name in enumerate(runs(trained)):
        whole, again = (trained / folder / f"run{place}" for folder in ("alone", "again"))
        assert len(records(again, "start")) == len(records(whole, "start")) + 1, name
        assert_bit_equal(last_state(whole), last_state(again))


@pytest.mark.slow
def test_every_solver_and_trust_ratio_is_here(trained: Path) -> None:
    optimizers = [load_spec(path).optimizer for path in trained.glob("alone_*.yaml")]
    assert {one.name for one in optimizers} == set(get_args(OptimizerSpec.model_fields["name"].annotation))
    ratios = {one.trust_ratio.kind for one in optimizers if one.trust_ratio is not None}
    assert ratios == set(get_args(TrustRatioSpec.model_fields["kind"].annotation))


@pytest.mark.slow
def test_the_trust_ratios_are_recorded(trained: Path) -> None:
    """Of each parameter in each step, and the same on one rank and on three."""
    place = list(runs(trained)).index("bounded")
    alone, together = (records(trained / folder / f"run{place}", "trust_ratio") for folder in ("alone", "together"))
    assert [record["step"] for record in alone] == [record["step"] for record in together] == list(range(1, 7))
    for one, other in zip(alone, together, strict=True):
        assert one["ratios"] == pytest.approx(other["ratios"], rel=1e-6)
        assert all(0.1 <= ratio <= 1000 for ratio in one["ratios"].values())
    first = alone[0]["ratios"]
    assert len(first) == 62 and first["bn1.bias"] == 1.0  # it begins at 0
    assert sum(0.1 < ratio < 1000 and ratio != 1 for ratio in first.values()) > 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_set(Path(name))
        train_all(Path(name))
        lines = ",\n".join(f" {json.dumps(run)}: {json.dumps(row)}" for run, row in rows(Path(name), "alone").items())
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")
        print(f"{os.path.relpath(GOLDEN)}: {len(runs(Path(name)))} runs")
