"""Freezing by name in a run, until an epoch; an unfrozen weight's first update, with every solver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.models.build import build_model
from summit_train.models.by_name import freeze_by_name, frozen_until
from summit_train.models.network import initial_network
from summit_train.optim.solvers import build_solver, parameter_groups, set_learning_rate
from summit_train.spec import load_spec
from summit_train.spec.keys import OptimizerSpec
from summit_train.training.exchange import Exchange
from summit_train.training.timer import StepTimer
from tests.conftest import made_once, spec_writer
from tests.runs import load_any
from tests.worlds import succeed, train

# conv1 and a norm inside for the whole run, layer1 for two epochs of three, fc's weight for one.
UNTIL = [{"names": ["layer1.*"], "until_epoch": 2}, {"names": ["fc.weight"], "until_epoch": 1}]
FREEZE = ["conv1", "layer2.0.bn1", *UNTIL]
SECTIONS: dict[str, Any] = {
    "precision": "fp64",
    "schedule": {"epochs": 3},
    "optimizer": {"freeze": FREEZE, "lr_factors": {"fc": 2.0, "layer1.*": 0.5}, "clip_norm": 1.0},
    "scale": {"gpus": 6, "clips_per_gpu": 2},
    "checkpoint": {"keep": 9},
    "evaluate": {"precise_bn": 1, "last_checkpoints": 3},
}


def _states(run: Path) -> dict[int, dict[str, Any]]:
    """The run's checkpoints by epoch, of 6 steps each."""
    return {epoch: load_any(run / f"checkpoints/step_{6 * epoch:08d}.pt") for epoch in (1, 2, 3)}


@pytest.fixture(scope="module")
def whole(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        out = train(0, spec_writer(motion_set, folder)("whole", **SECTIONS))
        assert "epoch 1: optimizer.freeze ends for 256 parameters" in out  # fc's weight, 4 x 64
        assert "epoch 2: optimizer.freeze ends for 2,368 parameters" in out  # 4 x 576 and 4 x 16
        assert out.count("optimizer.freeze ends") == 2

    return made_once(tmp_path_factory, "unfrozen", make) / "runs/whole"


def test_each_part_begins_to_move_after_its_epochs(whole: Path) -> None:
    first = initial_network(load_spec(whole / "spec.yaml"), torch.device("cpu")).state_dict()
    states = {0: first} | {epoch: state["model"] for epoch, state in _states(whole).items()}

    begins = {
        "conv1.weight layer2.0.bn1.weight layer2.0.bn1.running_mean": 3,
        "layer1.0.conv1.weight layer1.1.bn2.bias layer1.1.bn2.running_var": 2,
        "fc.weight": 1,
        "fc.bias layer2.0.conv1.weight bn1.running_mean layer4.1.bn2.weight": 0,
    }
    for names, begin in begins.items():
        for name in names.split():
            moves = [not torch.equal(states[epoch][name], states[epoch + 1][name]) for epoch in range(3)]
            assert moves == [epoch >= begin for epoch in range(3)], name
    # Of 62 parameters conv1 and a norm are never trained, layer1 has 12. Only what is trained has a momentum.
    assert [len(state["optimizer"]["state"]) for state in _states(whole).values()] == [62 - 3 - 12 - 1, 47, 59]


def test_eval_recomputes_the_statistics_that_each_checkpoint_trained(whole: Path) -> None:
    """The run ends with all norms trained, `eval` begins with the fewest; in both each checkpoint has its own."""

    def scores() -> list[list[list[float]]]:
        return [np.load(file)["scores"].tolist() for file in sorted((whole / "predictions").glob("*.npz"))]

    before = scores()
    shutil.rmtree(whole / "predictions")
    succeed(0, "eval", str(whole))
    assert len(before) == 3 and scores() == before


def test_an_unfrozen_parameter_begins_as_in_a_new_run() -> None:
    """LAMB and Adam count the updates of each group: the first one of an unfrozen weight is that of a new solver."""
    for name in ("sgd", "rmsprop", "adagrad", "adam", "adamw", "lamb"):
        keys = {"name": name, "momentum": 0.5} if name in ("sgd", "rmsprop") else {"name": name}
        keys |= {"freeze": [{"names": ["fc.weight"], "until_epoch": 1}]}
        spec = OptimizerSpec.model_validate(keys)
        moved = []
        for updates in (3, 0):  # of the other parameters before
            model = build_model("tsm", "resnet18", 4, 5, width=0.125)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(0.5 + number)
            model.frozen_until = frozen_until(model, spec)
            freeze_by_name(model, 0)
            optimizer = build_solver(spec, parameter_groups(model, 0.1))
            set_learning_rate(optimizer, 0.1)
            for epoch in [0] * updates + [1]:
                freeze_by_name(model, epoch)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
                if epoch == 0:
                    before = model.fc.weight.clone()
                optimizer.step()
                if epoch == 0:
                    assert torch.equal(model.fc.weight, before) and not optimizer.state[model.fc.weight]
            moved.append(model.fc.weight.detach().clone())
        assert torch.equal(*moved) and not torch.equal(moved[0], torch.full_like(moved[0], 60.5)), name


class _Two(World):
    """A world of two ranks whose messages nobody sends."""

    size = 2


def test_an_exchange_that_is_closed_leaves_its_parameters() -> None:
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    exchange = Exchange(layer.named_parameters(), _Two(), 2)
    assert [bucket.flat.numel() for bucket in exchange.buckets] == [2]  # frozen ones take no memory
    exchange.begin_step(StepTimer(torch.device("cpu")))
    exchange.close()
    assert layer.weight.grad is None and not layer.weight._post_accumulate_grad_hooks
    layer.bias.requires_grad_(True)
    assert [bucket.flat.numel() for bucket in Exchange(layer.named_parameters(), _Two(), 2).buckets] == [3]
