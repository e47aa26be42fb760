"""Every kind of network keeps the promises: the same on one rank and on two, and bit-equal after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summit_train.spec.catalog import ARCHITECTURES
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, difference, final_state, rewound
from tests.worlds import train

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
}


def test_every_architecture_is_here() -> None:
    assert {model["arch"] for model in NETWORKS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_are_one_rank_and_a_resumed_run_is_bit_equal(
    write_spec: WriteSpec, eight_videos: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Two steps on 1 rank and on 2; on 2 once more from the first step's checkpoint."""
    model, states = dict(NETWORKS[name]), {}
    data = eight_videos | {"num_frames": model.pop("num_frames")}
    scale, model = {"gpus": 2, "clips_per_gpu": 4}, {"backbone": None, **model}
    for ranks, run in ((0, "alone"), (2, "together"), (2, "resumed")):
        if run == "resumed":
            rewound(tmp_path / "runs/together", run, 2)
        output = train(ranks, write_spec(run, model=model, data=data, scale=scale, precision="fp64"))
        assert (run == "resumed") == ("step_00000001.pt" in output)
        states[run] = final_state(tmp_path / "runs" / run)
    assert_bit_equal(states["together"], states["resumed"])
    assert difference(states["alone"], states["together"]) <= 1e-9
