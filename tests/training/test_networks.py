"""Every kind of network keeps the promises: the same on one rank and on two, and bit-equal after a resume.

What was begun over Horovod goes on over torch.distributed: on two ranks both add the same two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from summit_train.spec.catalog import ARCHITECTURES
from tests.conftest import made_once, spec_writer
from tests.runs import assert_bit_equal, difference, final_state, rewound
from tests.worlds import needs_ranks, train, train_each

WriteNetwork = Callable[[str, str], Path]
NETWORKS: dict[str, dict[str, Any]] = {
    "tsm_mobilenet": {"arch": "tsm", "backbone": "mobilenet_v2", "num_frames": 2},
    "tsm_resnext": {"arch": "tsm", "backbone": "resnext101_32x4d", "num_frames": 2},
    "tsn": {"arch": "tsn", "backbone": "resnet18", "num_frames": 1},
    "tsm_non_local": {"arch": "tsm", "backbone": "resnet50", "num_frames": 2, "non_local": "tsm"},
    "i3d_3x3x3": {"arch": "i3d_3x3x3", "backbone": "resnet18", "num_frames": 16},
    "i3d_3x1x1": {"arch": "i3d_3x1x1", "num_frames": 8, "non_local": "original"},
    "i3d_replace": {"arch": "i3d_replace", "num_frames": 2},
    "trn": {"arch": "trn", "backbone": "resnet18", "num_frames": 4},
    "eco_lite": {"arch": "eco_lite", "num_frames": 4},
    "slowfast": {"arch": "slowfast", "num_frames": 8, "zero_init_residual": True},
    "x3d_m": {"arch": "x3d_m", "num_frames": 2},
    "ir_csn": {"arch": "ir_csn", "num_frames": 8},
    "vit": {"arch": "vit", "num_frames": 2, "adapter": "st", "drop_path": 0.5},
}


@pytest.fixture(scope="module")
def write(motion_set: Path, eight_videos: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> WriteNetwork:
    """Writes the spec of a network for a place. All are trained for two steps on 2 ranks over Horovod, "together"."""

    def write(folder: Path, place: str, name: str) -> Path:
        model = dict(NETWORKS[name])
        return spec_writer(motion_set, folder)(
            f"{place}_{name}",
            data=eight_videos | {"num_frames": model.pop("num_frames")},
            model={"backbone": None, **model},
            scale={"gpus": 2, "clips_per_gpu": 4},
            precision="fp64",
        )

    def train_all(folder: Path) -> None:
        train_each(2, [write(folder, "together", name) for name in NETWORKS], "horovod")

    return partial(write, made_once(tmp_path_factory, "networks", train_all))


def test_every_architecture_is_here() -> None:
    assert {model["arch"] for model in NETWORKS.values()} == set(ARCHITECTURES)


@needs_ranks
@pytest.mark.slow  # the first one: it trains all networks on two ranks
@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_are_one_rank_and_a_resumed_run_is_bit_equal(write: WriteNetwork, name: str) -> None:
    """On 1 rank, and on 2 once more from the first step's checkpoint, over torch.distributed."""
    alone, resumed = write("alone", name), write("resumed", name)
    runs = alone.parent / "runs"
    rewound(runs / f"together_{name}", f"resumed_{name}", 2)
    assert "step_00000001.pt" not in train(0, alone)
    assert "step_00000001.pt" in train(2, resumed)
    states = {place: final_state(runs / f"{place}_{name}") for place in ("alone", "together", "resumed")}
    assert (states["together"]["backend"], states["resumed"]["backend"]) == ("horovod", "torch (gloo)")
    assert_bit_equal(states["together"], states["resumed"])
    assert difference(states["alone"], states["together"]) <= 1e-9
