"""When a run validates."""

from __future__ import annotations

import pytest

from summit_train.spec import spec_from_values
from summit_train.training.loop import validates


@pytest.mark.parametrize(("every", "epochs"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_a_run_validates_every_so_often_and_after_its_last_epoch(every: int, epochs: list[int]) -> None:
    data = {"train": "train.csv", "val": "val.csv", "num_frames": 8}
    spec = spec_from_values(
        {
            "name": "run",
            "model": {"arch": "tsm", "num_classes": 4},
            "data": data,
            "scale": {"gpus": 1, "clips_per_gpu": 2},
            "schedule": {"epochs": 5},
            "evaluate": {"every_epochs": every},
        },
        "here",
    )
    assert [epoch for epoch in range(1, 6) if validates(spec, epoch)] == epochs
