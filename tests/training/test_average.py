"""The average of the weights: by hand, in a step, and in the final evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.training.step import WeightAverage
from tests.closeness import assert_near
from tests.conftest import WriteSpec
from tests.runs import final_state
from tests.training.test_step import _micro_batches, _model, _Poison, _step
from tests.worlds import take_step, train

DONE, SKIPPED = torch.zeros(()), torch.ones(())


def _values(average: WeightAverage) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = average.state_dict()["model"]
    return model


def test_three_updates_by_hand_without_the_first_weights() -> None:
    """Decay 1/2 over 8, 2, 6: (8/4 + 2/2 + 6) / (1/4 + 1/2 + 1) = 36/7. The 100 that it began with has no part."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 100.0)
    average = WeightAverage(layer, 0.5)
    expected = {8.0: 8.0, 2.0: 4.0, 6.0: 36 / 7}
    for weight, mean in expected.items():
        nn.init.constant_(layer.weight, weight)
        average.update(DONE)
        assert _values(average)["weight"].item() == pytest.approx(mean, rel=1e-15)
    assert layer.weight.item() == 6.0 and average.state_dict()["updates"] == 3


def test_a_skipped_step_does_not_count_not_even_the_first() -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 100.0)
    average = WeightAverage(layer, 0.5)
    average.update(SKIPPED)
    assert _values(average)["weight"].item() == 100.0 and average.state_dict()["updates"] == 0
    for weight, skipped in ((8.0, DONE), (50.0, SKIPPED), (2.0, DONE)):
        nn.init.constant_(layer.weight, weight)
        average.update(skipped)
    assert _values(average)["weight"].item() == 4.0 and average.state_dict()["updates"] == 2


def test_running_statistics_are_averaged_and_counters_copied() -> None:
    norm = nn.BatchNorm1d(1)
    average = WeightAverage(norm, 0.5)
    for value in (4.0, 10.0):
        for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
            assert buffer is not None
            buffer.fill_(value)
        average.update(DONE)
    values = _values(average)
    assert values["running_mean"].item() == values["running_var"].item() == 8.0  # (4/2 + 10) / (3/2)
    assert values["num_batches_tracked"].item() == 10


def test_a_step_averages_what_it_leaves_behind_and_changes_no_bit() -> None:
    states = {}
    for decay in (0.25, None):
        model = _Poison(_model())
        step = _step(model, 2, ema_decay=decay)
        after = []
        for model.on in (False, True, False):
            take_step(step, _micro_batches(2), 0.1)
            after.append({name: value.clone() for name, value in model.state_dict().items()})
        states[decay] = after
        if step.average is not None:
            for name, value in _values(step.average).items():
                if value.is_floating_point():
                    wanted = (0.25 * after[0][name] + after[2][name]) / 1.25
                    assert_near(value, wanted, 1e-12, name)
    assert all(torch.equal(value, states[None][-1][name]) for name, value in states[0.25][-1].items())


def test_the_average_is_evaluated_with_its_checkpoints(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Two epochs, whose two checkpoints are evaluated."""
    output = train(0, str(write_spec("alone")), "ema.decay=0.8", "evaluate.last_checkpoints=2")
    alone = final_state(tmp_path / "runs/alone")
    assert alone["ema"]["updates"] == 20
    assert not torch.equal(alone["ema"]["model"]["conv1.weight"], alone["model"]["conv1.weight"])
    result = json.loads((tmp_path / "runs/alone/eval.json").read_text())
    assert [row["step"] for row in result["ema"]["checkpoints"]] == [10, 20]
    assert f"average of the weights: top-1 {result['ema']['top1_mean']:.2f} +- " in output
    folder = tmp_path / "runs/alone/predictions"
    plain, averaged = (np.load(folder / f"step_00000020{end}.npz")["scores"] for end in ("", "_ema"))
    assert plain.shape == averaged.shape and not np.array_equal(plain, averaged)
    top1 = 100 * float(np.mean(averaged.argmax(1) == np.load(folder / "step_00000020_ema.npz")["label"]))
    assert result["ema"]["checkpoints"][1]["top1"] == pytest.approx(top1)
