"""Every kind of network keeps the promises: the same on one rank and on two, and bit-equal after a kill.

What was begun over Horovod goes on over torch.distributed: on two ranks both add the same two numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from summit_train.spec.catalog import ARCHITECTURES
from tests.closeness import assert_near
from tests.conftest import spec_writer
from tests.runs import assert_bit_equal, final_state, rewound
from tests.worlds import needs_ranks, train_each

pytestmark = [needs_ranks]

NETWORKS: dict[str, dict[str, object]] = {
    "tsm_mobilenet": {"arch": "tsm", "backbone": "mobilenet_v2", "num_frames": 2},
    "tsm_resnext": {"arch": "tsm", "backbone": "resnext101_32x4d", "num_frames": 2},
    "tsn_resnet152": {"arch": "tsn", "backbone": "resnet152", "num_frames": 1},
    "tsm_non_local": {"arch": "tsm", "backbone": "resnet50", "num_frames": 2, "non_local": "tsm"},
    "i3d_3x3x3": {"arch": "i3d_3x3x3", "backbone": "resnet18", "num_frames": 16},
    "i3d_3x1x1": {"arch": "i3d_3x1x1", "num_frames": 8, "non_local": "original"},
    "i3d_replace": {"arch": "i3d_replace", "num_frames": 2},
    "trn": {"arch": "trn", "backbone": "resnet18", "num_frames": 4},
    "eco_lite": {"arch": "eco_lite", "num_frames": 4},
    "slowfast": {"arch": "slowfast", "num_frames": 8, "zero_init_residual": True},
    "x3d_m": {"arch": "x3d_m", "num_frames": 2},
    "ir_csn": {"arch": "ir_csn", "num_frames": 8},
}


@pytest.fixture(scope="module")
def runs(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each network trained for four steps on 1 rank and on 2; on 2 it is continued from the second step, too."""
    folder = tmp_path_factory.mktemp("networks")
    rows = (motion_set / "train.csv").read_text().splitlines()[:9]
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    (folder / "val.csv").write_text("\n".join(rows[:3]) + "\n")
    (folder / "classes.txt").write_text((motion_set / "classes.txt").read_text())
    specs: dict[str, dict[str, Path]] = {place: {} for place in ("alone", "together", "resumed")}
    for place, written in specs.items():
        write = spec_writer(motion_set, folder)
        for name, model in NETWORKS.items():
            options = dict(model)
            data = {
                "train": str(folder / "train.csv"),
                "root": str(motion_set),
                "num_frames": options.pop("num_frames"),
            }
            written[name] = write(
                f"{place}_{name}",
                model={"backbone": None, **options},
                data={"val": str(folder / "val.csv"), **data},
                scale={"gpus": 2, "clips_per_gpu": 2},
                precision="fp64",
            )
    train_each(0, specs["alone"].values())
    train_each(2, specs["together"].values(), "horovod")
    for name in NETWORKS:
        rewound(folder / "runs" / f"together_{name}", f"resumed_{name}", 4)
    train_each(2, specs["resumed"].values(), "torch")
    return folder / "runs"


def test_every_architecture_is_here() -> None:
    assert {model["arch"] for model in NETWORKS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_are_one_rank(runs: Path, name: str) -> None:
    alone, together = (final_state(runs / f"{place}_{name}")["model"] for place in ("alone", "together"))
    assert isinstance(alone, dict) and isinstance(together, dict) and alone.keys() == together.keys()
    for part in ("running_", ""):
        keys = [key for key in alone if ("running_" in key) == bool(part) and alone[key].is_floating_point()]
        one, other = (torch.cat([state[key].flatten() for key in keys]) for state in (alone, together))
        assert_near(other, one, 1e-9, part or "weights")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_resumed_run_is_bit_equal(runs: Path, name: str) -> None:
    resumed = runs / f"resumed_{name}"
    assert_bit_equal(final_state(runs / f"together_{name}"), final_state(resumed))
    starts = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts if start["kind"] == "start"] == [0, 2]
