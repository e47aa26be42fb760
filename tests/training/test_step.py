"""A step against plain SGD, skipping, precision, and the average of the weights."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.models import build_model
from summit_train.models.precision import Normalise
from summit_train.models.video import freeze_norms
from summit_train.optim.solvers import build_solver, parameter_groups
from summit_train.optim.trust import TrustRatio
from summit_train.spec.keys import OptimizerSpec, TrustRatioSpec
from summit_train.spec.model_data import MixSpec
from summit_train.training.loss import Loss
from summit_train.training.step import LossScale, StepSettings, TrainStep, WeightAverage
from summit_train.training.vary import draw_mix, erase
from summit_train.training.vote import Requests
from tests.closeness import assert_all_near, assert_near
from tests.conftest import WriteSpec
from tests.runs import final_state
from tests.worlds import take_step, train

CPU = torch.device("cpu")


def _micro_batches(count: int, clips: int = 2, frames: int = 4, side: int = 32) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(7)
    return [
        MicroBatch(
            step=0,
            virtual_gpu=number,
            clips=torch.randint(0, 256, (clips, frames, side, side, 3), dtype=torch.uint8, generator=generator),
            labels=torch.randint(0, 5, (clips,), generator=generator),
            ids=torch.arange(clips),
        )
        for number in range(count)
    ]


def _model(dropout: float = 0.0, dtype: torch.dtype = torch.float64, arch: str = "tsm") -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    return build_model(arch, "resnet18", 4, 5, width=0.125, dropout=dropout, generator=generator).to(dtype)


def _step(
    model: nn.Module,
    accumulation: int,
    precision: str = "fp64",
    *,
    solver: str = "sgd",
    trust: str | None = None,
    **settings: Any,
) -> TrainStep:
    """A step of one rank; trust: the kind of a trust ratio."""
    spec = OptimizerSpec.model_validate({"name": solver, "weight_decay": 0.1})
    optimizer = build_solver(spec, parameter_groups(model, spec.weight_decay))
    ratio = None
    if trust is not None:
        trust_spec = TrustRatioSpec.model_validate({"kind": trust, "lower": 1.0, "upper": 1e5})
        ratio = TrustRatio(trust_spec, model, optimizer)
    keys = StepSettings(seed=0, virtual_gpus=accumulation, precision=precision, **settings)
    return TrainStep(model, optimizer, World(), CPU, keys, ratio)


def _reference_gradients(model: nn.Module, batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """The mean over the micro-batches of each one's gradient, one backward pass at a time."""
    total: dict[str, torch.Tensor] = {}
    for batch in batches:
        model.zero_grad()
        loss = functional.cross_entropy(model(Normalise(torch.float64, CPU)(batch.clips)), batch.labels)
        torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, 0) + parameter.grad / len(batches)
    return total


def _clip_factor(gradients: Mapping[str, torch.Tensor], clip_norm: float | None) -> float:
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return 1.0 if clip_norm is None else min(1.0, clip_norm / float(norm))


def _moved(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of weights and statistics that differ; a norm's counter may."""
    return [n for n, t in model.state_dict().items() if "tracked" not in n and not torch.equal(t, before[n])]


@dataclasses.dataclass(frozen=True)
class _Changed(Loss):
    """The loss of a batch, times `factor` plus `more`."""

    factor: float = 1.0
    more: float = 0.0

    def of_batch(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, correct = super().of_batch(*arguments)
        return loss * self.factor + self.more, correct


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_two_steps_are_sgd_with_momentum_on_the_mean_gradient(clip_norm: float | None) -> None:
    model, batches = _model(), _micro_batches(3)
    reference = copy.deepcopy(model)
    step = _step(model, 3, clip_norm=clip_norm)
    momentum = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    for lr in (0.1, 0.05):
        result = take_step(step, batches, lr)
        gradients = _reference_gradients(reference, batches)
        factor = _clip_factor(gradients, clip_norm)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                decay = 0.1 if parameter.ndim > 1 else 0.0
                momentum[name] = 0.9 * momentum[name] + factor * gradients[name] + decay * parameter
                parameter -= lr * momentum[name]
        vote = result.read(6, 3, 1)
        assert not vote.skipped and not vote.broken
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        # grad_scale goes through the fused kernel in single precision
        assert_near(one, other, 1e-12 if clip_norm is None else 1e-6, name)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_the_vote_has_the_mean_loss_the_top1_and_the_requests(smoothing: float) -> None:
    """The loss of a clip: (1 - e) * -log p[label] + e * mean over the classes of -log p."""
    model, batches = _model(), _micro_batches(2)
    losses, right = [], 0
    with torch.no_grad():
        for batch in batches:
            logs = -functional.log_softmax(copy.deepcopy(model)(Normalise(torch.float64, CPU)(batch.clips)), 1)
            chosen = logs[torch.arange(len(logs)), batch.labels]
            losses.append(float(((1 - smoothing) * chosen + smoothing * logs.mean(1)).mean()))
            right += int((logs.argmin(1) == batch.labels).sum())
    step = _step(model, 2, loss=Loss(label_smoothing=smoothing))
    vote = take_step(step, batches, 0.1, Requests(stop=True, data_wait_s=0.25)).read(4, 2, 1)
    assert vote.loss == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert vote.top1 == pytest.approx(100 * right / 4)
    assert (vote.stop, vote.checkpoint, vote.data_wait_s) == (True, False, 0.25)


def test_mixed_and_erased_clips_are_keyed_by_step_and_virtual_gpu() -> None:
    """The loss and top-1 of what `erase` and `draw_mix` make of a micro-batch with their keys, erased first."""
    spec, losses, right = MixSpec(mixup=0.8, cutmix=1.0), list[float](), 0
    model, batches = _model(), _micro_batches(3, clips=4)
    for batch in batches:
        clips, key = Normalise(torch.float64, CPU)(batch.clips), (0, "erase", 0, batch.virtual_gpu)
        erase(clips, 0.5, rng.key(*key), torch.Generator().manual_seed(rng.seed_of(*key)))
        mix = draw_mix(spec, rng.key(0, "mix", 0, batch.virtual_gpu), 32, 32)
        mix.apply(clips)
        logits = copy.deepcopy(model)(clips)
        shares = mix.targets(batch.labels, logits)
        losses.append(float(functional.cross_entropy(logits.detach(), shares, label_smoothing=0.1)))
        larger = batch.labels if mix.share >= 0.5 else batch.labels.flip(0)
        right += int((logits.argmax(1) == larger).sum())
    step = _step(model, 3, mix=spec, erase=0.5, loss=Loss(label_smoothing=0.1))
    vote = take_step(step, batches, 0.1).read(12, 3, 1)
    assert vote.loss == pytest.approx(sum(losses) / 3, rel=1e-12)
    assert vote.top1 == pytest.approx(100 * right / 12)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dropout": 0.5}, "fc.weight"), ({"arch": "trn"}, "consensus.fc_fusion_scales.2.1.weight")],
)
def test_masks_and_tuples_are_keyed_by_step_and_virtual_gpu(options: dict[str, Any], name: str) -> None:
    """The same micro-batches in another order: the same mean gradient, so what was drawn went with them."""
    models, batches = [_model(**options) for _ in range(3)], _micro_batches(2)
    swapped = [dataclasses.replace(batch, virtual_gpu=1 - batch.virtual_gpu) for batch in batches]
    for model, order in zip(models, (batches, batches[::-1], swapped), strict=True):
        take_step(_step(model, 2), order, 0.1)
    first, second, unkeyed = (model.state_dict()[name] for model in models)
    assert_near(first, second, 1e-12)
    assert (first - unkeyed).norm() > 1e-9 * first.norm()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_the_trust_ratio_is_that_of_the_mean_gradient_as_it_is_clipped(clip_norm: float | None) -> None:
    model, batches = _model(), _micro_batches(2)
    gradients = _reference_gradients(copy.deepcopy(model), batches)
    factor = _clip_factor(gradients, clip_norm)
    lengths = {name: float(parameter.detach().norm()) for name, parameter in model.named_parameters()}
    result = take_step(_step(model, 2, trust="bounded", clip_norm=clip_norm), batches, 0.1)
    assert result.ratios is not None
    found = result.ratios.read()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        wanted = lengths[name] / (factor * float(gradient.norm())) if lengths[name] else 1.0
        assert found[name] == pytest.approx(min(max(wanted, 1), 1e5), rel=1e-6), name
    assert sum(1 < ratio < 1e5 for ratio in found.values()) > 20


@pytest.mark.parametrize(
    ("solver", "kind"),
    [("sgd", None), ("sgd", "lars"), ("rmsprop", "bounded"), ("adagrad", None), ("adam", "lars"), ("lamb", None)],
)
def test_every_solver_skips_an_overflow_of_fp16_and_goes_on(solver: str, kind: str | None) -> None:
    model = _model(dtype=torch.float32)
    step = _step(model, 2, "fp16", solver=solver, trust=kind, clip_norm=1.0)
    step.loss_scale.scale = torch.tensor(2.0**40)
    before = copy.deepcopy(model.state_dict())
    vote = take_step(step, _micro_batches(2), 0.01).read(4, 2, 1)
    assert vote.skipped and not vote.broken
    assert _moved(model, before) == [] and step.loss_scale.scale.item() == 2.0**39
    step.loss_scale.scale = torch.tensor(2.0**8)
    assert not take_step(step, _micro_batches(2), 0.01).read(4, 2, 1).skipped
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not torch.equal(model.state_dict()["fc.weight"], before["fc.weight"])


def test_a_loss_that_alone_is_not_finite_is_reported_and_the_gradient_decides() -> None:
    """A rank knows its own losses alone, and the mean gradient is that of all ranks: all must decide alike."""
    models = [_model() for _ in range(2)]
    vote = take_step(_step(models[0], 2, loss=_Changed(more=torch.inf)), _micro_batches(2), 0.1).read(4, 2, 1)
    assert vote.broken and not vote.skipped and vote.loss == torch.inf
    take_step(_step(models[1], 2), _micro_batches(2), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


ALONE = [(name, None) for name in ("sgd", "adam", "adamw", "lamb", "rmsprop", "adagrad")]


@pytest.mark.parametrize(("solver", "kind"), [*ALONE, ("sgd", "lars"), ("sgd", "bounded"), ("adam", "lars")])
def test_every_solver_clips_in_the_precision_of_the_run(solver: str, kind: str | None) -> None:
    """The clipped gradient is that of a loss times clip_norm / norm."""
    models, batches = [_model() for _ in range(2)], _micro_batches(2)
    factor = _clip_factor(_reference_gradients(copy.deepcopy(models[0]), batches), 0.05)
    assert factor < 1
    take_step(_step(models[0], 2, solver=solver, trust=kind, clip_norm=0.05), batches, 0.1)
    take_step(_step(models[1], 2, solver=solver, trust=kind, loss=_Changed(factor=factor)), batches, 0.1)
    assert_all_near(models[0].parameters(), models[1].parameters(), 1e-12)


class _Poison(nn.Module):
    """Wraps a network; its logits are NaN while `on`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.on = model, False

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(clips)
        return logits * float("nan") if self.on else logits

    def reseed(self, seed: int) -> None:
        """As the networks do."""


def test_a_step_that_is_not_finite_changes_nothing_not_even_the_first_one() -> None:
    model = _Poison(_model())
    step = _step(model, 2)
    before = copy.deepcopy(model.state_dict())
    model.on = True
    vote = take_step(step, _micro_batches(2), 0.1).read(4, 2, 1)
    assert vote.skipped and vote.broken and _moved(model, before) == []
    model.on = False
    reference = _Poison(_model())
    take_step(_step(reference, 2), _micro_batches(2), 0.1)
    assert not take_step(step, _micro_batches(2), 0.1).read(4, 2, 1).skipped
    assert_all_near(model.parameters(), reference.parameters(), 1e-12)


def test_frozen_norms_keep_their_values_to_the_bit() -> None:
    model = _model()
    freeze_norms(model, "all_but_first")
    before = copy.deepcopy(model.state_dict())
    take_step(_step(model, 2), _micro_batches(2), 0.1)
    norms = {name for name in _moved(model, before) if "bn" in name or "downsample.1" in name}
    assert norms == {f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}


def test_bf16_is_close_to_fp32_and_keeps_fp32_weights() -> None:
    models = {precision: _model(dtype=torch.float32) for precision in ("fp32", "bf16")}
    losses = {}
    for precision, model in models.items():
        step = _step(model, 2, precision)
        losses[precision] = [take_step(step, _micro_batches(2), 0.05).read(4, 2, 1).loss for _ in range(3)]
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)
    assert losses["bf16"] != losses["fp32"]


def test_the_scale_doubles_after_the_interval_and_survives_a_checkpoint() -> None:
    scale = LossScale(True, CPU, interval=3)
    for _ in range(2):
        scale.update(torch.zeros(()))
    again = LossScale(True, CPU, interval=3)
    again.load_state_dict(scale.state_dict())
    again.update(torch.zeros(()))
    assert again.scale.item() == 2.0**17
    again.update(torch.ones(()))
    assert again.scale.item() == 2.0**16


def test_normalise_is_a_channels_last_view_of_imagenets_units() -> None:
    frames = torch.randint(0, 256, (2, 4, 6, 8, 3), dtype=torch.uint8)
    clips = Normalise(torch.float32, CPU)(frames)
    assert clips.shape == (2, 4, 3, 6, 8)
    assert clips.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    red = (frames[1, 2, 3, 4, 0].item() / 255 - 0.485) / 0.229
    assert clips[1, 2, 0, 3, 4].item() == pytest.approx(red, abs=1e-5)


def test_a_compiled_network_is_compiled_once_for_any_number_of_virtual_gpus() -> None:
    """Dynamo makes a graph for each value of what it guards on, such as a norm's momentum, and no more than eight."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    batches, model = _micro_batches(10), _model()
    plain = copy.deepcopy(model)
    model.extract = torch.compile(model.extract, backend=backend)  # type: ignore[assignment, arg-type]
    for step in (_step(model, 10), _step(plain, 10)):
        take_step(step, batches, 0.1)
        take_step(step, batches, 0.1)
    assert len(graphs) == 1
    assert_all_near(model.state_dict().values(), plain.state_dict().values(), 1e-12)


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
