"""One step of synchronous SGD over virtual GPUs: forward, backward, synchronise, update, vote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.saved import Checkpoint, check_fit
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.models.by_name import freeze_by_name
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.models.video import trained_norms
from summit_train.optim.solvers import begin_momentum, set_learning_rate
from summit_train.optim.trust import Ratios, TrustRatio
from summit_train.spec.catalog import RGB, Modality
from summit_train.spec.model_data import MixSpec
from summit_train.training.checkpoint import begin_solver_state
from summit_train.training.exchange import Exchange
from summit_train.training.loss import Loss, TaskLoss
from summit_train.training.noise import PassSquares
from summit_train.training.running_statistics import RunningStatistics
from summit_train.training.timer import StepTimer
from summit_train.training.vary import Mix, draw_mix, erase
from summit_train.training.vote import NO_REQUESTS, VOTES, Requests, StepResult, VoteRow


class LossScale:
    """Dynamic loss scaling for fp16, kept on the device: no step waits for it.

    The scale halves when a gradient is not finite and doubles after `interval` good updates (Micikevicius et al.,
    *Mixed Precision Training*, section 3.2). Disabled, it is the constant 1.
    """

    def __init__(self, enabled: bool, device: torch.device, interval: int = 2000) -> None:
        self.enabled = enabled
        self._interval = interval
        self.scale = torch.full((), 2.0**16 if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def update(self, skipped: torch.Tensor) -> None:
        """Adapt the scale to one step; `skipped`: a float scalar, 1 if the step was skipped, else 0."""
        if not self.enabled:
            return
        self._good_steps = (self._good_steps + 1) * (1 - skipped)
        grow = (self._good_steps >= self._interval).to(self.scale.dtype)
        self.scale = self.scale * (1 + grow) * (1 - 0.5 * skipped)
        self._good_steps = self._good_steps * (1 - grow)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale.cpu(), "good_steps": self._good_steps.cpu()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.scale = state["scale"].to(self.scale, copy=True)  # what is read may be mapped
        self._good_steps = state["good_steps"].to(self._good_steps, copy=True)


class WeightAverage:
    """The moving average of a network's weights and running statistics (Polyak and Juditsky, 1992), on the device.

    After n updates, w_1 .. w_n the weights behind each, it is

        sum_i decay^(n - i) w_i / sum_i decay^(n - i),    so    e <- e + (w - e) (1 - decay) / (1 - decay^n).

    The random weights that a run begins with have no part in it, however few the updates. BN's running mean and
    variance are averaged as the weights are; other buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._sources = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        self._averages = {name: value.clone() for name, value in self._sources.items()}
        self._updates = torch.zeros((), dtype=torch.float64, device=next(iter(self._sources.values())).device)

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take the weights in after a step; a step that was `skipped` (1, else 0) does not count."""
        taken = 1 - skipped.double()
        self._updates += taken
        # A first step that is skipped would divide 0 by 0.
        rate = taken * (1 - self._decay) / (1 - self._decay ** self._updates.clamp(min=1))
        averages = list(self._averages.values())
        moves = torch._foreach_sub(list(self._sources.values()), averages)
        torch._foreach_mul_(moves, rate.to(moves[0].dtype))
        torch._foreach_add_(averages, moves)

    def state_dict(self) -> dict[str, Any]:
        return {"model": {**self._model.state_dict(), **self._averages}, "updates": int(self._updates.item())}

    def begin_restore(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Take over the number of updates; return the averages, to be filled, by their names in the checkpoint."""
        self._updates.fill_(state["updates"])
        return {f"ema.model.{name}": average for name, average in self._averages.items()}


def count_updates(model: nn.Module, steps: int) -> None:
    """Set num_batches_tracked to the updates of the weights: the forward passes depend on the accumulation."""
    for norm in trained_norms(model):
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(steps)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The keys of a spec that a step depends on.

    virtual_gpus: of all ranks together; clip_norm: L2 norm of the gradient, or None; noise_every: updates between two
    measurements of the gradient noise scale, 0: never; ema_decay: of the average of the weights, or None; modality: of
    the clips, or None where the network takes them as they are; compression: fp16 sends gradients as halves; mix,
    erase: what varies the clips on the device.
    """

    seed: int
    virtual_gpus: int
    precision: str
    clip_norm: float | None = None
    loss: TaskLoss = field(default_factory=Loss)
    noise_every: int = 0
    ema_decay: float | None = None
    modality: Modality | None = RGB
    compression: str = "none"
    mix: MixSpec | None = None
    erase: float = 0.0


class TrainStep:
    """A step in three calls: begin, accumulate each micro-batch of this rank, update the weights on all ranks."""

    on_skip = "the update was skipped on all ranks"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        device: torch.device,
        settings: StepSettings,
        trust: TrustRatio | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._world = world
        self._device = device
        self._trust = trust
        self._settings = settings
        self._dtype = parameter_type(settings.precision)
        self._normalise = None if settings.modality is None else Normalise(self._dtype, device, settings.modality)
        self._accumulation = len(virtual_gpus_of(world.rank, world.size, settings.virtual_gpus))
        self.loss_scale = LossScale(settings.precision == "fp16", device)
        self.average = None if settings.ema_decay is None else WeightAverage(model, settings.ema_decay)
        self._votes = itertools.cycle(VOTES)
        self._take_trained()

    def _take_trained(self) -> None:
        """Set up what depends on which parameters are trained, from the next step on."""
        model = self.model
        settings = self._settings
        self.statistics = RunningStatistics(model, settings.virtual_gpus, self._world)
        self._exchange = Exchange(model.named_parameters(), self._world, settings.virtual_gpus, settings.compression)
        self._squares = PassSquares(model)

    def unfreeze(self, epoch: int) -> int:
        """Train what optimizer.freeze has frozen for `epoch` epochs, with a new solver state; return its elements."""
        if number := freeze_by_name(self.model, epoch):
            self._exchange.close()
            self.statistics.close()
            self._take_trained()
            begin_momentum(self.optimizer)
        return number

    def begin(self, lr: float, timer: StepTimer | None = None) -> None:
        """Begin an update at learning rate `lr`. timer: records its phases, PHASES, and the gradients' messages."""
        self._lr = lr
        self._timer = timer or StepTimer(self._device)
        self._losses = list[torch.Tensor]()
        self._corrects = list[torch.Tensor]()
        self._num_bad = 0
        self._exchange.begin_step(self._timer)
        self.statistics.begin_step()

    def accumulate(self, batch: MicroBatch) -> None:
        """Compute the gradient of one micro-batch and add it to the step's.

        Call this once for each of the rank's virtual GPUs. Gradients are sent during the rank's last pass, so a rank
        with fewer micro-batches sends them earlier.
        """
        loss, correct = self._forward(batch)
        if len(self._losses) == self._accumulation - 1:
            self.statistics.start_mean()
            self._exchange.begin_last_pass()
            self._timer.lap("other")
        self._step = batch.step
        every = self._settings.noise_every
        self._is_measured = every > 0 and (batch.step + 1) % every == 0
        with self._squares.listening() if self._is_measured else nullcontext(), self.statistics.kept():
            torch.autograd.backward(loss * self.loss_scale.scale)
        self._timer.lap("backward")
        self._losses.append(loss.detach())
        self._corrects.append(correct)
        self._num_bad += len(batch.bad)

    def update(self, requests: Requests = NO_REQUESTS) -> StepResult:
        """Update the weights by the gradient averaged over all virtual GPUs, and begin the vote. Collective.

        All ranks have the same mean, so all skip the update where its norm is not finite.
        """
        losses = self._losses
        self._losses = []
        assert len(losses) == self._accumulation, "begin comes first"
        timer = self._timer
        self._exchange.finish()
        timer.lap("allreduce")

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        # The L2 norm of the averaged gradient, still scaled. It is finite if every entry is.
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        skipped = (~torch.isfinite(norm)).float()
        loss = torch.stack(losses).sum()
        row = self._row(loss, norm, skipped, requests).tensor(self._device)
        self.statistics.finish(skipped, self._step)
        timer.lap("other")
        ratios = self._update_weights(gradients, norm, skipped)
        if self.average is not None:
            self.average.update(skipped)
        timer.lap("update")
        wait = self._world.start_total(row, next(self._votes))
        return StepResult(row, loss, ratios, wait)

    def checkpoint(self, path: Path, step: int) -> dict[str, Any]:
        count_updates(self.model, step)
        parts = {"optimizer": self.optimizer.state_dict(), "loss_scale": self.loss_scale.state_dict()}
        return parts if self.average is None else parts | {"ema": self.average.state_dict()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore solver, loss scale and averaged weights from a checkpoint. Collective."""
        checkpoint.fill(checkpoint.world.together(lambda: self._begin_restore(checkpoint.path, checkpoint.state)))

    def _begin_restore(self, path: Path, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors that those of a checkpoint go into, by their names there."""
        tensors = begin_solver_state(path, self.optimizer, saved["optimizer"])
        check_fit(path, "loss_scale", saved.get("loss_scale"), self.loss_scale.state_dict())
        self.loss_scale.load_state_dict(saved["loss_scale"])
        if self.average is not None:
            check_fit(path, "ema", saved.get("ema"), self.average.state_dict())
            tensors |= self.average.begin_restore(saved["ema"])
        return tensors

    def _forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the micro-batch's mean loss, and how many clips are right; a mixed one by its larger share's class."""
        settings = self._settings
        key = (batch.step, batch.virtual_gpu)
        normalise = self._normalise
        clips = batch.clips.to(self._device, non_blocking=True) if normalise is None else normalise(batch.clips)
        labels = batch.labels.to(self._device, non_blocking=True)
        if settings.erase:
            noise = torch.Generator(self._device).manual_seed(rng.seed_of(settings.seed, "erase", *key))
            erase(clips, settings.erase, rng.key(settings.seed, "erase", *key), noise)
        mix: Mix | None = None
        if settings.mix is not None:
            mix = draw_mix(settings.mix, rng.key(settings.seed, "mix", *key), *clips.shape[-2:])
            mix.apply(clips)
        self.model.reseed(rng.seed_of(settings.seed, "dropout", *key))  # type: ignore[operator]
        self._timer.lap("other")
        with mixed_precision(settings.precision, self._device):
            outputs = self.model(clips)
        self.statistics.end_pass()
        outputs = outputs.to(self._dtype)
        targets = labels if mix is None else mix.targets(labels, outputs)
        size = (clips.shape[-2], clips.shape[-1])
        loss, correct = settings.loss.of_batch(outputs, targets, size, rng.seed_of(settings.seed, "loss", *key))
        self._timer.lap("forward")
        return loss, correct

    def _row(self, loss: torch.Tensor, norm: torch.Tensor, skipped: torch.Tensor, requests: Requests) -> VoteRow:
        """Return this rank's numbers for the vote. norm: of the gradient, still scaled."""
        scale = self.loss_scale.scale.double()
        return VoteRow(
            loss=loss,
            correct=torch.stack(self._corrects).sum(),
            skipped=skipped,
            # An fp16 gradient that overflows is the loss scale's business until the scale has come down to 1.
            broken=~torch.isfinite(loss) | ((skipped > 0) & (scale <= 1)),
            pass_squares=self._squares.take() / scale.square() if self._is_measured else math.nan,
            mean_square=(norm.double() / scale).square(),
            bad_clips=self._num_bad,
            **requests._asdict(),
        )

    def _update_weights(
        self, gradients: list[torch.Tensor], norm: torch.Tensor, skipped: torch.Tensor
    ) -> Ratios | None:
        """Unscale, clip and update, or do nothing where `skipped` is 1; return the layers' trust ratios, if any."""
        divisor = self.loss_scale.scale
        clip_norm = self._settings.clip_norm
        if clip_norm is not None:
            divisor = divisor * torch.clamp(norm / divisor / clip_norm, min=1.0)
        unscaled = not self.loss_scale.enabled and clip_norm is None
        if not unscaled and divisor.dtype == torch.float64:  # the fused solvers take a divisor in single precision only
            torch._foreach_div_(gradients, divisor)
            unscaled = True
        set_learning_rate(self.optimizer, self._lr)
        # The solvers read both attributes; torch.amp.GradScaler hands them over to the fused ones in the same way.
        self.optimizer.grad_scale = None if unscaled else divisor  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        ratios = None
        if self._trust is None:
            self.optimizer.step()
        else:
            ratios = self._trust.update(skipped)
        self.loss_scale.update(skipped)
        return ratios
