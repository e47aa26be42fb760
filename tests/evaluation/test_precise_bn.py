"""BN's statistics recomputed for fixed weights, against one batch of all the clips."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.core.comm import World
from summit_train.core.watch import Stopped, StopRequest, Watchdog
from summit_train.data.batches.loader import MicroBatch
from summit_train.evaluation.precise_bn import recompute_from_training, recompute_statistics
from summit_train.evaluation.scoring import Scorer
from summit_train.models import VideoNetwork, build_model
from summit_train.models.network import initial_network
from summit_train.models.precision import Normalise
from summit_train.spec import Spec, load_spec
from summit_train.training.inputs import read_inputs
from tests.closeness import assert_near
from tests.conftest import WriteSpec
from tests.worlds import lines, succeed

CPU = torch.device("cpu")
_LOOP = """
import torch
from torch import nn

class Loop(nn.Module):
    def __init__(self, num_classes, num_frames):
        super().__init__()
        self.norm, self.other, self.head = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Linear(3, num_classes)

    def forward(self, x):
        frames = [*x[:, :3].unbind(1), x[:, 3, :, ::2]]
        return self.head(sum(self.norm(frame).mean((2, 3)) for frame in frames))
"""


def _batches(count: int, clips: int = 2) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(9)
    return [
        MicroBatch(
            step=number,
            virtual_gpu=0,
            # Batches of different brightness, so that the variance between them counts.
            clips=torch.randint(0, 60 * (number + 1), (clips, 4, 32, 32, 3), dtype=torch.uint8, generator=generator),
            labels=torch.zeros(clips, dtype=torch.int64),
            ids=torch.arange(clips),
        )
        for number in range(count)
    ]


@pytest.fixture
def spec(write_spec: WriteSpec) -> Spec:
    return load_spec(write_spec(precision="fp64"))


def _network(spec: Spec) -> VideoNetwork:
    return initial_network(spec, CPU)


def test_the_first_norm_gets_mean_and_variance_of_all_inputs(spec: Spec) -> None:
    """Its input depends on no other norm, so it is known: the first convolution of all 8 clips."""
    model, batches = _network(spec), _batches(4)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    momenta = [m.momentum for m in model.modules() if isinstance(m, _BatchNorm)]
    model.eval()
    recompute_statistics(model, batches, spec, World(), CPU)
    clips = torch.cat([Normalise(torch.float64, CPU)(batch.clips) for batch in batches])
    inputs = nn.functional.conv2d(clips.flatten(0, 1), model.get_parameter("conv1.weight"), stride=2, padding=3)
    var, mean = torch.var_mean(inputs, (0, 2, 3))
    assert_near(model.get_buffer("bn1.running_mean"), mean, 1e-12, beside=var.sqrt())
    assert_near(model.get_buffer("bn1.running_var"), var, 1e-11)
    assert (
        not model.training
        and len(momenta) == 20
        and momenta == [m.momentum for m in model.modules() if isinstance(m, _BatchNorm)]
    )
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


def test_one_batch_gives_its_own_statistics_in_every_norm(spec: Spec) -> None:
    """With one batch no variance lies between batches: as a pass with a momentum of 1."""
    one, other, batches = _network(spec), _network(spec), _batches(1)
    recompute_statistics(one, batches, spec, World(), CPU)
    for module in other.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
    other.train()
    with torch.no_grad():
        other(Normalise(torch.float64, CPU)(batches[0].clips))
    theirs = dict(other.named_buffers())
    for name, value in one.named_buffers():
        if "running_" in name:
            assert_near(value, theirs[name], 1e-11, name)


def test_a_norm_that_runs_often_gets_the_statistics_of_all_its_inputs(spec: Spec, tmp_path: Path) -> None:
    """Once per frame, the last frame on fewer pixels; and one that never runs stays as it is."""
    (tmp_path / "nets.py").write_text(_LOOP)
    model, batches = build_model(f"{tmp_path}/nets.py:Loop", None, 4, 4).double(), _batches(3)
    recompute_statistics(model, batches, spec, World(), CPU)
    clips = torch.cat([Normalise(torch.float64, CPU)(batch.clips) for batch in batches])
    inputs = torch.cat([clips[:, :3].transpose(1, 2).flatten(2), clips[:, 3, :, ::2].flatten(2)], 2)
    var, mean = torch.var_mean(inputs, (0, 2))
    assert_near(model.get_buffer("norm.running_mean"), mean, 1e-12)
    assert_near(model.get_buffer("norm.running_var"), var, 1e-11)
    assert torch.equal(model.get_buffer("other.running_var"), torch.ones(3).double())


def test_frozen_norms_stay(write_spec: WriteSpec) -> None:
    spec = load_spec(write_spec(precision="fp64", model={"freeze_bn": "all_but_first", "pretrained": "w.pth"}))
    model = _network(spec)
    recompute_statistics(model, _batches(2), spec, World(), CPU)
    assert not torch.equal(model.get_buffer("bn1.running_var"), torch.ones(8).double())
    assert torch.equal(model.get_buffer("layer1.0.bn1.running_var"), torch.ones(8).double())


def test_the_first_steps_are_taken_and_a_request_to_stop_is_heard_between(write_spec: WriteSpec) -> None:
    inputs = read_inputs(load_spec(write_spec(evaluate={"precise_bn": 2})), 1)
    stop, model, passes = StopRequest(), _network(inputs.spec).eval(), list[bool]()

    def count(module: nn.Module, arguments: object, output: object) -> None:
        passes.append(module.training)
        if len(passes) == 3:
            stop.receive(signal.SIGUSR2, None)

    model.register_forward_hook(count)
    scorer = Scorer(inputs.spec, inputs.val, World(), CPU, stop)
    with pytest.raises(Stopped):
        recompute_from_training(model, scorer, inputs.plan, inputs.train, Watchdog(World(), None))
    assert passes == [True] * 3 and not model.training
    scorer = Scorer(inputs.spec, inputs.val, World(), CPU)
    recompute_from_training(model, scorer, inputs.plan, inputs.train, Watchdog(World(), None))
    assert len(passes) == 3 + 2 * 4  # two steps of 4 virtual GPUs
    assert {m.momentum for m in model.modules() if isinstance(m, _BatchNorm)} == {0.1}


def test_the_accuracy_is_the_same_on_any_number_of_ranks(done: str, tmp_path: Path) -> None:
    plain = json.loads((tmp_path / "runs/run/eval.json").read_text())
    file = "predictions/step_00000010.npz"
    results, scores = [], [np.load(tmp_path / "runs/run" / file)["scores"]]
    for ranks in (1, 2):
        words = ("--name", f"on_{ranks}", "evaluate.precise_bn=3", "precision=fp64")
        output = succeed(ranks, "eval", done, "--json", *words)
        results.append(json.loads(next(line for line in lines(output) if line.startswith("{"))))
        del results[-1]["written"]
        scores.append(np.load(tmp_path / f"runs/run/evals/on_{ranks}" / file)["scores"])
    assert results[0] == results[1] and results[0]["precise_bn"] == 3 and "precise_bn" not in plain
    assert scores[1] == pytest.approx(scores[2], rel=1e-5) and np.abs(scores[1] / scores[0] - 1).max() > 1e-3
