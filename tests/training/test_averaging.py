"""Model averaging against arithmetic written out: what a round does to weights, solver state and BN."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.run_folder import CheckpointError, checkpoint_path, learner_path
from summit_train.core.saved import Checkpoint, bound_of, load_checkpoint
from summit_train.data.batches.loader import MicroBatch
from summit_train.spec.keys import ParallelSpec
from summit_train.training.averaging import AveragingStep
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.vote import Requests
from tests.closeness import assert_near
from tests.training.test_step import _micro_batches, _model, _Poison, _step
from tests.worlds import take_step

STEPS_OF_AN_EPOCH = 100


class _Learners:
    """Some learners on one rank, and the average of them."""

    def __init__(self, model: nn.Module, count: int, solver: str = "sgd", precision: str = "fp64", **keys: Any) -> None:
        self.average = model
        self.steps = {number: _step(copy.deepcopy(model), 1, precision, solver=solver) for number in range(count)}
        spec = ParallelSpec.model_validate({"method": "averaging", **keys})
        self.step = AveragingStep(spec, model, self.steps, count, World(), torch.device("cpu"), STEPS_OF_AN_EPOCH)

    @property
    def models(self) -> list[nn.Module]:
        return [step.model for step in self.steps.values()]

    def states(self, name: str) -> list[torch.Tensor]:
        """One state of every learner, all parameters in one vector."""
        optimizers = [step.optimizer for step in self.steps.values()]
        return [torch.cat([state[name].flatten() for state in one.state.values()]) for one in optimizers]


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _steps(count: int, learners: int, first: int = 0) -> list[list[MicroBatch]]:
    """Micro-batches of some steps, other clips in each."""
    batches = iter(_micro_batches(count * learners))
    steps = range(first, first + count)
    return [[replace(next(batches), step=step, virtual_gpu=number) for number in range(learners)] for step in steps]


def test_sgd_that_averages_every_step_is_synchronous_sgd_of_the_whole_batch() -> None:
    """Momentum is linear in the gradients, so its mean is that of the mean gradient."""
    model = _model()
    together, learners = _step(copy.deepcopy(model), 3), _Learners(model, 3, period=1)
    for number, batches in enumerate(_steps(3, 3)):
        lr = 0.1 / (number + 1)
        one = take_step(together, batches, lr).read(6, 3, 1)
        other = take_step(learners.step, batches, lr, Requests(stop=True, data_wait_s=0.25)).read(6, 3, 1)
        assert (one.loss, one.top1) == (pytest.approx(other.loss, rel=1e-12), other.top1)
        # The rank asks once, whatever the number of its learners.
        assert (other.stop, other.checkpoint, other.data_wait_s, other.squares) == (True, False, 0.25, None)
    assert_near(_flat(learners.average), _flat(together.model), 1e-12)
    velocity = torch.cat([state["momentum_buffer"].flatten() for state in together.optimizer.state.values()])
    for mine in learners.states("momentum_buffer"):
        assert_near(mine, velocity, 1e-12)


def test_sgd_whose_momentum_stays_local_is_synchronous_sgd_all_the_same_in_its_average() -> None:
    """The mean of the velocities moves the mean of the weights, whoever holds them; but the velocities differ."""
    model = _model()
    together, learners = _step(copy.deepcopy(model), 2), _Learners(model, 2, period=1, optimizer_state="local")
    for batches in _steps(3, 2):
        take_step(together, batches, 0.1)
        take_step(learners.step, batches, 0.1)
    assert_near(_flat(learners.average), _flat(together.model), 1e-10)
    one, other = learners.states("momentum_buffer")
    assert (one - other).norm() > 0.1 * one.norm()


@pytest.mark.parametrize("solver", ["adam", "lamb", "rmsprop", "adagrad"])
def test_a_round_averages_weights_and_every_state_of_the_solver(solver: str) -> None:
    """Two steps alone, then the mean of what plain runs of the same clips have; the counts of updates stay 2."""
    model = _model()
    alone = [_step(copy.deepcopy(model), 1, solver=solver) for _ in range(3)]
    learners = _Learners(model, 3, solver, period=2)
    for batches in _steps(2, 3):
        for plain, batch in zip(alone, batches, strict=True):
            take_step(plain, [batch], 0.01)
        averaging = take_step(learners.step, batches, 0.01).averaging
    assert averaging is not None
    weights = torch.stack([_flat(plain.model) for plain in alone]).mean(0)
    assert (weights - _flat(alone[0].model)).norm() > 1e-4
    for mine in (learners.average, *learners.models):
        assert_near(_flat(mine), weights, 1e-12)
    states = [step.optimizer.state.values() for step in (*alone, *learners.steps.values())]
    for of_parameter in zip(*states, strict=True):
        for name in of_parameter[0]:
            values = [state[name] for state in of_parameter]
            for value in values[3:]:
                assert_near(value, torch.stack(values[:3]).mean(0), 1e-12, name)
                assert value.ndim > 0 or value.item() == 2


def test_the_rounds_are_of_period_steps_and_end_with_the_epoch() -> None:
    """Period 3, epochs of 100 steps: after steps 96, 99, 100, 103 of the run."""
    learners = _Learners(_model(), 2, period=3)
    ends = []
    for batches in _steps(10, 2, first=93):
        if take_step(learners.step, batches, 0.01).averaging is not None:
            ends.append(batches[0].step + 1)
        distance = (_flat(learners.models[0]) - _flat(learners.models[1])).abs().max()
        assert (distance == 0) == (batches[0].step + 1 in ends)
    assert ends == [96, 99, 100, 103]


def test_the_bytes_of_an_average_are_those_of_weights_momentum_and_statistics() -> None:
    learners = _Learners(_model(dtype=torch.float32), 2, "adam", "fp32", period=1)
    averaging = take_step(learners.step, _micro_batches(2), 0.01).averaging
    assert averaging is not None and averaging.start.seconds_to(averaging.end) > 0
    weights, tensors = _flat(learners.average).numel(), len(list(learners.average.parameters()))
    channels = sum(m.num_features for m in learners.average.modules() if isinstance(m, nn.BatchNorm2d))
    assert averaging.num_bytes == 4 * 3 * weights + 8 * tensors + 8 * 3 * channels


def _statistics(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the first norm."""
    norm = model.get_submodule("bn1")
    return norm.get_buffer("running_mean"), norm.get_buffer("running_var")


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_merged_statistics_are_those_of_the_pooled_samples(offset: float) -> None:
    """Equal shards; population variance. Far from 0 too, where mean squares minus squared means would cancel."""
    learners = _Learners(_model(), 4, period=1)
    generator = torch.Generator().manual_seed(5)
    samples = offset + torch.randn(4, 50, 8, generator=generator, dtype=torch.float64) * torch.arange(1, 9)
    samples += torch.arange(4.0).view(4, 1, 1)
    for model, shard in zip(learners.models, samples, strict=True):
        mean, variance = _statistics(model)
        mean.copy_(shard.mean(0))
        variance.copy_(shard.var(0, unbiased=False))
    learners.step._end_round()
    pooled = samples.flatten(0, 1)
    for model in (learners.average, learners.models[0], learners.models[3]):
        mean, variance = _statistics(model)
        assert_near(mean, pooled.mean(0), 1e-12)
        assert_near(variance, pooled.var(0, unbiased=False), 1e-8)


def test_local_statistics_stay_local_and_the_average_has_the_merged_ones() -> None:
    learners = _Learners(_model(), 2, period=1, bn="local")
    take_step(learners.step, _micro_batches(2), 0.1)
    (first, _), (second, _), (merged, _) = map(_statistics, [*learners.models, learners.average])
    assert not torch.equal(first, second)
    assert_near(merged, (first + second) / 2, 1e-12)


@pytest.mark.parametrize("solver", ["sgd", "adam", "lamb"])
def test_one_learner_is_the_plain_run_to_the_bit(solver: str) -> None:
    model = _model(dropout=0.3, dtype=torch.float32)
    plain = _step(copy.deepcopy(model), 1, "fp32", solver=solver)
    learners = _Learners(model, 1, solver, "fp32", period=2)
    for batches in _steps(4, 1):
        take_step(plain, batches, 0.01)
        take_step(learners.step, batches, 0.01)
    for name, value in plain.model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, learners.average.state_dict()[name]), name
    for one, other in zip(plain.optimizer.state.values(), learners.steps[0].optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_learner_that_is_not_finite_skips_its_own_update() -> None:
    learners = _Learners(_Poison(_model()), 2, "adam", period=2)
    before = [_flat(model).clone() for model in learners.models]
    assert isinstance(learners.models[1], _Poison)
    learners.models[1].on = True
    first, second = _steps(2, 2)
    vote = take_step(learners.step, first, 0.01).read(4, 2, 1)
    assert vote.skipped and vote.broken
    assert torch.equal(_flat(learners.models[1]), before[1])
    assert not torch.equal(_flat(learners.models[0]), before[0])
    learners.models[1].on = False
    assert not take_step(learners.step, second, 0.01).read(4, 2, 1).skipped
    counts = learners.states("step")
    assert counts[0].unique().tolist() == [1.5] == counts[1].unique().tolist()
    assert all(torch.isfinite(_flat(model)).all() for model in learners.models)


def test_frozen_weights_are_not_averaged() -> None:
    """(x + x + x) / 3 need not be x."""
    model = _model(dtype=torch.float32)
    for parameter in model.get_submodule("bn1").parameters():
        parameter.data.fill_(0.1)
        parameter.requires_grad_(False)
    learners = _Learners(model, 3, "sgd", "fp32", period=1)
    take_step(learners.step, _micro_batches(3), 0.1)
    assert torch.equal(learners.average.state_dict()["bn1.weight"], torch.full((8,), 0.1))


def _saved(learners: _Learners, path: Path) -> dict[str, Any]:
    return {"model": learners.average.state_dict(), **learners.step.checkpoint(path, 0)}


def test_each_learner_has_a_loss_scale_of_its_own_through_a_checkpoint(tmp_path: Path) -> None:
    """After a whole round the scales are all that differs, so they stand in the checkpoint itself."""
    learners, again = (_Learners(_Poison(_model(dtype=torch.float32)), 2, "sgd", "fp16", period=1) for _ in range(2))
    assert isinstance(learners.models[1], _Poison)
    learners.models[1].on = True
    take_step(learners.step, _micro_batches(2), 0.01)
    path = checkpoint_path(tmp_path, 0)
    saved = _saved(learners, path)
    assert saved["learner_digests"] == [] and not path.parent.exists()
    save_checkpoint(path, saved)
    again.step.restore(Checkpoint(path, saved, World()))
    assert [step.loss_scale.scale.item() for step in again.steps.values()] == [2.0**16, 2.0**15]
    one, other = (step.optimizer.state[next(step.model.parameters())] for step in again.steps.values())
    assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
    assert one["momentum_buffer"].data_ptr() != other["momentum_buffer"].data_ptr()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss_scale": None, "loss_scales": []}, "loss_scale must be values by name, got NoneType"),
        ({"in_round": "x"}, "in_round must be int, got str"),
        ({"loss_scales": [{"scale": torch.ones(()), "good_steps": torch.zeros(())}]}, "loss_scales has no 1"),
        ({"loss_scales": 7}, "loss_scales must be values by name, got int"),
    ],
)
def test_a_checkpoint_whose_parts_do_not_fit_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    learners, path = _Learners(_model(), 2, period=1), checkpoint_path(tmp_path, 0)
    saved = {name: value for name, value in (_saved(learners, path) | changed).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        learners.step.restore(Checkpoint(path, saved, World()))
    assert str(caught.value) == f"{path}: does not fit: {said}"


def test_a_learners_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    learners, path = _Learners(_model(), 2, period=1, bn="local"), checkpoint_path(tmp_path, 0)
    saved, file = _saved(learners, path), learner_path(path, 1)
    state = load_checkpoint(file, bound_of(learners.average))
    for part in ("model", "loss_scale"):
        save_checkpoint(file, {**state, part: {"other": torch.zeros(3)}})
        with pytest.raises(CheckpointError) as caught:
            learners.step.restore(Checkpoint(path, saved, World()))
        assert str(caught.value).startswith(f"{file}: does not fit: {part} has no ")
