"""AdamW, layer decay, RandAugment, repeats, erasing and mixing together keep the promises: any ranks, any stop."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, difference, final_state, records, rewound
from tests.worlds import train

RECIPE = {
    "data": {"augment": "rand_augment", "repeats": 2, "erase": 0.5, "mix": {"mixup": 0.8, "cutmix": 1.0}},
    "optimizer": {"name": "adamw", "layer_decay": 0.75, "base_lr": 1e-4, "weight_decay": 0.05},
    "loss": {"label_smoothing": 0.1},
}


def test_a_recipe_of_today_is_the_same_on_any_ranks_and_after_a_resume(write_spec: WriteSpec, tmp_path: Path) -> None:
    """6 virtual GPUs of 4 clips twice; 3 steps an epoch. One rank has worker processes, the others have none."""
    places = {"on1": 1, "on2": 2, "on3": 3, "resumed": 3}
    for name, ranks in places.items():
        if name == "resumed":
            rewound(tmp_path / "runs/on3", name, 6)
        data = {**RECIPE["data"], "workers": 2 if ranks == 1 else 0}
        keys = {**RECIPE, "data": data, "scale": {"gpus": 6, "clips_per_gpu": 8}, "precision": "fp64"}
        train(ranks, write_spec(name, **keys))
    alone, whole = (final_state(tmp_path / "runs" / name) for name in ("on1", "on3"))
    assert alone["step"] == 6
    for ranks in (2, 3):
        assert difference(alone, final_state(tmp_path / f"runs/on{ranks}")) <= 1e-12, ranks
    assert_bit_equal(whole, final_state(tmp_path / "runs/resumed"))
    assert [start["step"] for start in records(tmp_path / "runs/resumed", "start")] == [0, 3]
    # A tenth of the labels is everywhere, so that the loss of no clip is small; top-1 counts the larger share.
    for step in records(tmp_path / "runs/on1", "step"):
        assert 1.0 < step["loss"] < 3.0 and 0 <= step["top1"] <= 100
