"""The gradient noise scale: by hand, on quadratics with a known covariance, and in runs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.models.network import recompute_blocks
from summit_train.models.precision import Normalise
from summit_train.training.noise import NoiseScale, PassSquares, Squares
from summit_train.training.vote import StepResult, VoteRow
from tests.conftest import WriteSpec
from tests.runs import records
from tests.training.test_step import _micro_batches, _model, _Poison, _step
from tests.worlds import take_step, train

CPU = torch.device("cpu")


def test_two_gradients_by_hand() -> None:
    """(3, 0) and (1, 2), each the mean over 2 clips: their squares are 9 and 5, that of the average (2, 1) is 5.

    |G|^2 = (4 * 5 - 2 * 7) / 2 = 3; tr(Sigma) = (7 - 5) / (1/2 - 1/4) = 8; the noise scale is 8/3 clips.
    """
    record = NoiseScale(2, 2).add(Squares(single=7.0, average=5.0))
    assert record["gradient_square"] == 3.0 and record["gradient_variance"] == 8.0
    assert record["noise_scale"] == pytest.approx(8 / 3, rel=1e-14)


def test_the_averages_are_divided_not_the_ratios_averaged() -> None:
    """After (3, 8) comes |G|^2 = (4 * 2 - 2 * 3) / 2 = 1, tr(Sigma) = 4; weights 0.95 and 1, their sum cancels."""
    noise = NoiseScale(2, 2)
    noise.add(Squares(7.0, 5.0))
    second = noise.add(Squares(3.0, 2.0))
    assert (second["gradient_square"], second["gradient_variance"]) == (1.0, 4.0)
    assert second["noise_scale"] == pytest.approx((0.95 * 8 + 4) / (0.95 * 3 + 1), rel=1e-14)


def test_estimates_below_0_are_averaged_and_named() -> None:
    noise = NoiseScale(1, 2)
    assert noise.add(Squares(single=4.0, average=1.0)) == {  # (2 * 1 - 4) / 1
        "noise_scale": math.inf, "gradient_variance": 6.0, "gradient_square": -2.0
    }  # fmt: skip
    assert noise.add(Squares(5.0, 5.0))["noise_scale"] == pytest.approx(0.95 * 6 / (5 - 2 * 0.95), rel=1e-13)
    assert NoiseScale(1, 2).add(Squares(1.0, 2.0))["noise_scale"] == 0.0
    assert NoiseScale(1, 2).add(Squares(0.0, 0.0))["noise_scale"] == math.inf


@pytest.mark.parametrize(("clips_per_gpu", "virtual_gpus"), [(1, 2), (2, 4), (8, 3)])
def test_a_quadratic_with_a_known_covariance(clips_per_gpu: int, virtual_gpus: int) -> None:
    """The loss of a clip x is |w - x|^2 / 2, its gradient w - x: G = w - mean, Sigma the clips' covariance.

    Here |G|^2 = 12, tr(Sigma) = 1 + 4 + 9 = 14. The means over 20,000 steps lie within 4 of their standard errors,
    which are small enough that b and B taken for each other, or a forgotten clips_per_gpu, would not pass.
    """
    generator = torch.Generator().manual_seed(3)
    steps, deviation = 20_000, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    shape = (steps, virtual_gpus, clips_per_gpu, 3)
    gradients = (2 + deviation * torch.randn(shape, generator=generator, dtype=torch.float64)).mean(2)
    single = gradients.square().sum(2).mean(1)
    average = gradients.mean(1).square().sum(1)
    noise = NoiseScale(clips_per_gpu, virtual_gpus)
    records = [noise.add(Squares(*pair)) for pair in zip(single.tolist(), average.tolist(), strict=True)]
    for name, truth in (("gradient_square", 12.0), ("gradient_variance", 14.0)):
        values = torch.tensor([record[name] for record in records])
        error = float(values.std()) / math.sqrt(steps)
        assert abs(float(values.mean()) - truth) < 4 * error < 0.1 * truth, name
    # The running ratio: its average over the run lies by the true 14/12, though single values scatter.
    ratios = torch.tensor([record["noise_scale"] for record in records[100:]]).clamp(max=1e3)
    assert float(ratios.median()) == pytest.approx(14 / 12, rel=0.15)


def _reference(model: nn.Module, accumulation: int) -> Squares:
    """Squares of the micro-batches' gradients and of their mean, each by a backward pass of its own."""
    gradients = []
    for batch in _micro_batches(accumulation):
        twin = copy.deepcopy(model)
        logits = twin(Normalise(torch.float64, CPU)(batch.clips))
        torch.autograd.backward(functional.cross_entropy(logits, batch.labels))
        gradients.append(torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]))
    stacked = torch.stack(gradients)
    return Squares(float(stacked.square().sum(1).mean()), float(stacked.mean(0).square().sum()))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_measures_each_virtual_gpu_and_the_average(recompute: bool) -> None:
    model = _model()
    wanted = _reference(model, 3)
    if recompute:
        assert isinstance(model, VideoNetwork)
        recompute_blocks(model)
    squares = take_step(_step(model, 3, noise_every=1), _micro_batches(3), 0.1).read(6, 3, 1).squares
    assert squares is not None and squares.single > 1.5 * squares.average
    assert squares.single == pytest.approx(wanted.single, rel=1e-10)
    assert squares.average == pytest.approx(wanted.average, rel=1e-10)


@pytest.mark.parametrize("arch", ["tsm", "trn", "i3d_3x1x1", "slowfast", "x3d_m", "ir_csn"])
def test_no_parameter_of_an_accelerated_network_is_missed(arch: str) -> None:
    """With one virtual GPU its gradient is the average, and both norms are taken in ways of their own."""
    frames = {"i3d_3x1x1": 8, "slowfast": 8, "ir_csn": 8}.get(arch, 4)
    generator = torch.Generator().manual_seed(1)
    model = build_model(arch, None, frames, 5, width=0.125, generator=generator).double()
    accelerate(model)
    squares = take_step(_step(model, 1, noise_every=1), _micro_batches(1, frames=frames), 0.0).read(2, 1, 1).squares
    assert squares is not None and squares.single > 0
    assert squares.single == pytest.approx(squares.average, rel=1e-12)


def test_every_nth_step_is_measured_which_changes_no_bit() -> None:
    measured, plain = _model(), _model()
    for model, every, wanted in ((measured, 3, [3, 6]), (plain, 0, [])):
        step, found = _step(model, 2, noise_every=every), []
        for number in range(7):
            batches = [replace(batch, step=number) for batch in _micro_batches(2, side=16)]
            if take_step(step, batches, 0.1).read(4, 2, 1).squares is not None:
                found.append(number + 1)
        assert found == wanted
    assert all(torch.equal(one, other) for one, other in zip(measured.parameters(), plain.parameters(), strict=True))


def test_a_frozen_parameter_has_no_part() -> None:
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    squares = PassSquares(layer)
    for _ in range(2):
        with squares.listening():
            torch.autograd.backward(layer(torch.tensor([3.0, 4.0])))
        torch.autograd.backward(layer(torch.tensor([5.0, 6.0])))  # after the block nothing is noted
        assert squares.take().item() == 25.0


def test_a_gradient_in_parts_is_not_measured() -> None:
    """Its norm is not that of the parts."""
    layer = nn.Linear(2, 2)
    squares, x = PassSquares(layer), torch.ones(2, requires_grad=True)
    with squares.listening():
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        torch.autograd.backward(y.sum())
    assert math.isnan(squares.take().item())
    votes = torch.tensor([math.nan if name == "pass_squares" else 0.0 for name in VoteRow._fields])
    assert StepResult(votes, votes[0], None, wait=lambda: None).read(4, 2, 1).squares is None


def test_fp16_is_unscaled_and_a_skipped_step_has_no_squares() -> None:
    wanted = _reference(_model(), 2)
    model = _model(dtype=torch.float32)
    step = _step(model, 2, "fp16", noise_every=1)
    assert step.loss_scale.scale.item() == 2.0**16
    squares = take_step(step, _micro_batches(2), 0.0).read(4, 2, 1).squares
    assert squares is not None
    assert squares.single == pytest.approx(wanted.single, rel=0.05)
    assert squares.average == pytest.approx(wanted.average, rel=0.05)
    step.loss_scale.scale = torch.tensor(2.0**60)
    vote = take_step(step, _micro_batches(2), 0.1).read(4, 2, 1)
    assert vote.skipped and vote.squares is None
    poisoned = _Poison(_model())
    poisoned.on = True
    assert take_step(_step(poisoned, 2, noise_every=1), _micro_batches(2), 0.1).read(4, 2, 1).squares is None


def test_a_run_measures_every_so_often_and_says_so(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Squares on any ranks: test_uneven_shares.py."""
    output = train(0, write_spec(schedule={"epochs": 1}), "noise_scale.every_steps=4")
    measured = [step for step in records(tmp_path / "runs/run", "step") if "noise_scale" in step]
    assert [step["step"] for step in measured] == [4, 8] and "  noise scale " in output
    assert all(step["gradient_variance"] > 0 for step in measured)


def test_one_virtual_gpu_is_told_that_nothing_is_measured(write_spec: WriteSpec, tmp_path: Path) -> None:
    output = train(0, write_spec(scale={"gpus": 1, "clips_per_gpu": 8}, schedule={"epochs": 1}))
    assert output.count("noise scale") == 1 and "noise scale: not measured; one virtual GPU" in output
    assert not any("noise_scale" in record for record in records(tmp_path / "runs/run", "step"))
