"""Every solver and trust ratio keeps the promises: the same on one rank and on two, bit-equal after a resume or a kill.

All of them with an average of the weights and a noise scale, which are parts of the checkpoint too. What was begun over
Horovod goes on over torch.distributed: on two ranks both add the same two numbers.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from summit_train.spec.optimizer import OptimizerSpec
from tests.conftest import spec_writer
from tests.runs import assert_bit_equal, difference, final_state, records, rewound
from tests.worlds import forked, main_without_reports, needs_ranks, train, train_each

pytestmark = [needs_ranks]

BOUNDED = {"kind": "bounded"}
# The name, what the spec's optimizer says, and the schedule that goes with it.
SOLVERS: dict[str, dict[str, Any]] = {
    "rmsprop": {"name": "rmsprop", "momentum": 0.9, "base_lr": 1e-4},
    "adagrad": {"name": "adagrad", "base_lr": 1e-3, "clip_norm": 1.0},
    "adam": {"name": "adam", "base_lr": 1e-4},
    "adamw": {"name": "adamw", "base_lr": 1e-4, "layer_decay": 0.75, "decay_norms": True},
    "lamb": {"name": "lamb", "base_lr": 1e-3, "clip_norm": 1.0},
    "lars": {"trust_ratio": {"kind": "lars"}, "base_lr": 1.0},
    "bounded": {"trust_ratio": {**BOUNDED, "upper": 1000}, "clip_norm": 1.0, "base_lr": 1e-5},
    "bounded_rmsprop": {"name": "rmsprop", "trust_ratio": BOUNDED, "base_lr": 1e-4},
}
DATE = {"warmup_epochs": 0.5, "warmup": "squared", "decay": "linear"}
PLACES = {"alone": (0, "torch"), "together": (2, "horovod"), "resumed": (2, "torch")}


@pytest.fixture(scope="module")
def runs(motion_set: Path, eight_videos: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each solver trained for four steps of 2 virtual GPUs on 1 rank and on 2, and on 2 again from the second step.

    On 1 again, too, killed while it wrote the fourth step's checkpoint, and continued.
    """
    folder = tmp_path_factory.mktemp("solvers")

    def spec(place: str, name: str) -> Path:
        return spec_writer(motion_set, folder)(
            f"{place}_{name}",
            data=eight_videos,
            scale={"gpus": 2, "clips_per_gpu": 2},
            optimizer={"base_lr": 0.005, "weight_decay": 1e-3, **SOLVERS[name]},
            schedule={"epochs": 2, **DATE},
            precision="fp64",
            ema={"decay": 0.5},
            noise_scale={"every_steps": 1},
        )

    for name in SOLVERS:
        killed = spec("killed", name)
        assert forked(0, partial(_killed_in_its_last_checkpoint, killed))[0] == -signal.SIGKILL
        saved = {path.suffix for path in (folder / f"runs/killed_{name}/checkpoints").glob("*step_00000004*")}
        assert saved == {".writing", ".sha256"}
        train(0, killed)
    for place, (ranks, comm) in PLACES.items():
        if place == "resumed":
            for name in SOLVERS:
                rewound(folder / "runs" / f"together_{name}", f"resumed_{name}", 4)
        train_each(ranks, [spec(place, name) for name in SOLVERS], comm)
    return folder / "runs"


def _killed_in_its_last_checkpoint(spec: Path) -> int:
    """Train in this process, which dies when the file is written and has no name yet."""

    def die(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("step_00000004.pt"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    return main_without_reports(["train", str(spec)])


def test_every_solver_is_here() -> None:
    names = {optimizer.get("name", "sgd") for optimizer in SOLVERS.values()}
    assert names == set(OptimizerSpec.model_json_schema()["properties"]["name"]["enum"])


@pytest.mark.parametrize("name", SOLVERS)
def test_two_ranks_are_one_rank(runs: Path, name: str) -> None:
    """Two micro-batches on one rank are one on each of two."""
    assert difference(final_state(runs / f"alone_{name}"), final_state(runs / f"together_{name}")) <= 1e-9


@pytest.mark.parametrize(("whole", "again"), [("together", "resumed"), ("alone", "killed")])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_that_continues_is_bit_equal(runs: Path, name: str, whole: str, again: str) -> None:
    continued = runs / f"{again}_{name}"
    state = final_state(continued)
    assert {"ema", "noise_scale"} < state.keys()
    assert_bit_equal(final_state(runs / f"{whole}_{name}"), state)
    assert [start["step"] for start in records(continued, "start")] == [0, 2]


def test_the_trust_ratios_are_recorded(runs: Path) -> None:
    """Of each parameter in each of the four steps, and the same on one rank and on two."""
    found = {}
    for place in ("alone", "together"):
        ratios = records(runs / f"{place}_bounded", "trust_ratio")
        assert [record["step"] for record in ratios] == [1, 2, 3, 4]
        found[place] = [record["ratios"] for record in ratios]
    assert len(found["alone"][0]) == 62 and found["alone"][0]["bn1.bias"] == 1.0  # it begins at 0
    for one, other in zip(found["alone"], found["together"], strict=True):
        assert one == pytest.approx(other, rel=1e-6)
        assert all(0.1 <= ratio <= 1000 for ratio in one.values())
    assert sum(0.1 < ratio < 1000 and ratio != 1 for ratio in found["alone"][0].values()) > 20
