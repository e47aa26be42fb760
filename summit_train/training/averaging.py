"""Train by model averaging: learners that step alone, and every K steps the mean of their networks.

Source: Cong et al., "Accelerating Deep Neural Network Training for Action Recognition on a Cluster of GPUs" (AAVG),
Algorithms 1 and 2. A learner is a virtual GPU. With mu_j and s_j the running mean and variance of a normalisation of
learner j of P:

    w  <- 1/P sum_j w_j                                      the solver's state (momentum, m, v) likewise
    mu <- 1/P sum_j mu_j
    s  <- 1/P sum_j s_j + 1/P sum_j (mu_j - mu)^2            the law of total variance

Algorithm 2 writes the last line as 1/P sum_j (s_j + mu_j^2) - mu^2: the same value, which rounding can make negative.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.run_folder import learner_path
from summit_train.core.saved import Checkpoint, bound_of, check_fit, load_checkpoint
from summit_train.data.batches.loader import MicroBatch
from summit_train.models.by_name import freeze_by_name
from summit_train.models.video import trained_norms
from summit_train.spec.keys import ParallelSpec
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.exchange import average
from summit_train.training.step import TrainStep, count_updates
from summit_train.training.timer import Mark, StepTimer
from summit_train.training.vote import NO_REQUESTS, VOTES, Averaging, Requests, StepResult, VoteRow

Tensors = list[torch.Tensor]


class AveragingStep:
    """Makes a step by TrainStep's three calls: each of this rank's learners updates its own network.

    A round of spec.period steps ends with an average of the networks; so does an epoch. A learner whose gradient is not
    finite skips its update. Nothing here waits for the device.
    """

    on_skip = "the learner concerned skipped its update"

    def __init__(
        self,
        spec: ParallelSpec,
        model: nn.Module,
        learners: Mapping[int, TrainStep],
        virtual_gpus: int,
        world: World,
        device: torch.device,
        steps_per_epoch: int,
    ) -> None:
        """learners: each learner's step, in a world of one rank, by the number of its virtual GPU.

        virtual_gpus: of the run. model: becomes the average. steps_per_epoch: of the first batch (see Plan).
        """
        self._spec = spec
        self._model = model
        self._learners = dict(learners)
        self._virtual_gpus = virtual_gpus
        self._world = world
        self._device = device
        self._steps_per_epoch = steps_per_epoch
        self._in_round = 0  # steps since the last average
        self._votes = cycle(VOTES)
        self._sent = 0  # bytes given to averages

    def begin(self, lr: float, timer: StepTimer | None = None) -> None:
        """Begin an update of each learner. The arguments are those of TrainStep.begin."""
        self._lr = lr
        self._timer = timer or StepTimer(self._device)
        self._results = list[StepResult]()

    def accumulate(self, batch: MicroBatch) -> None:
        """Update the learner of the micro-batch's virtual GPU."""
        learner = self._learners[batch.virtual_gpu]
        learner.begin(self._lr, self._timer)
        learner.accumulate(batch)
        self._results.append(learner.update())
        learner.optimizer.zero_grad()  # the next learner's gradients take their place
        self._step = batch.step

    def update(self, requests: Requests = NO_REQUESTS) -> StepResult:
        """Average the learners' networks if an average is due, and begin the vote of all learners. Collective.

        The trust ratios are those of the rank's first learner.
        """
        results = self._results
        self._results = []
        assert len(results) == len(self._learners), "begin comes first"
        rows = [result.votes for result in results]
        votes = torch.stack([*rows, VoteRow(**requests._asdict()).tensor(self._device)]).sum(0)
        loss = torch.stack([result.local_loss for result in results]).sum()
        self._in_round += 1
        ends_epoch = (self._step + 1) % self._steps_per_epoch == 0
        averaging = self._end_round() if ends_epoch or self._in_round == self._spec.period else None
        self._timer.lap("allreduce")
        wait = self._world.start_total(votes, next(self._votes))
        return StepResult(votes, loss, results[0].ratios, wait, averaging)

    def unfreeze(self, epoch: int) -> int:
        """Train what optimizer.freeze has frozen for `epoch` epochs, as TrainStep does; return its elements."""
        for learner in self._learners.values():
            learner.unfreeze(epoch)
        return freeze_by_name(self._model, epoch)

    @torch.no_grad()
    def _end_round(self) -> Averaging:
        start = Mark(self._device)
        before = self._sent
        self._average_networks()
        for learner in self._learners.values():
            _copy(_weights(learner.model), _weights(self._model))
            if self._spec.bn == "merge":
                for buffers, merged in zip(_statistics(learner.model), _statistics(self._model), strict=True):
                    _copy(buffers, merged)
        if self._spec.optimizer_state == "average":
            self._average_state()
        self._in_round = 0
        return Averaging(start, Mark(self._device), self._sent - before)

    @torch.no_grad()
    def _average_networks(self) -> None:
        """Give the model the mean of the weights and the merged statistics of all learners."""
        learners = [learner.model for learner in self._learners.values()]
        _copy(_weights(self._model), self._mean(list(map(_weights, learners)), "weights"))
        means, variances = _statistics(self._model)
        if not means:
            return
        # In double, as each is small and the spread of the means can be smaller still.
        statistics = [[_doubles(buffers) for buffers in _statistics(learner)] for learner in learners]
        pooled = self._mean([learner_means + within for learner_means, within in statistics], "batch_norm")
        mean = pooled[: len(means)]
        within = pooled[len(means) :]
        spreads = [torch._foreach_sub(learner_means, mean) for learner_means, _ in statistics]
        between = self._mean([list(torch._foreach_mul(spread, spread)) for spread in spreads], "batch_norm_spread")
        _copy(means, mean)
        _copy(variances, torch._foreach_add(within, between))

    def _average_state(self) -> None:
        """Give the solver of each learner the mean of all solvers' states.

        The numbers of updates, scalars, are averaged too. They are equal unless a learner skipped one.
        """
        states = [_state(learner.optimizer) for learner in self._learners.values()]
        for name, are_counts in (("solver_state", False), ("solver_counts", True)):
            tensors = [[tensor for tensor in state if (tensor.ndim == 0) == are_counts] for state in states]
            # Counts in double, as the sum of many is beyond the whole numbers of fp32.
            mean = self._mean(list(map(_doubles, tensors)) if are_counts else tensors, name)
            for of_learner in tensors:
                _copy(of_learner, mean)

    def _mean(self, learners: Sequence[Tensors], name: str) -> Tensors:
        """Return the mean over the learners of all ranks, given the tensors of each of this rank's learners."""
        first = learners[0]
        if not first:
            return []
        total = torch.cat([tensor.flatten() for tensor in first])
        for tensors in learners[1:]:
            total += torch.cat([tensor.flatten() for tensor in tensors])
        total /= self._virtual_gpus / self._world.size  # the mean over the ranks is then that over all learners
        average(total, self._world, name)
        self._sent += total.nbytes
        parts = torch.split(total, [tensor.numel() for tensor in first])
        return [part.view_as(tensor) for part, tensor in zip(parts, first, strict=True)]

    def checkpoint(self, path: Path, step: int) -> dict[str, Any]:
        """Return the parts of the checkpoint `path`, after `step` updates, other than the network. Collective.

        In the middle of a round the network becomes the current average. Where learners differ, the file of each is
        written first, and the checkpoint lists their SHA-256. The optimizer's state is the first learner's.
        """
        if self._in_round:
            self._average_networks()
        differ = self._in_round > 0 or self._spec.optimizer_state == "local" or self._spec.bn == "local"
        count_updates(self._model, step)
        parts = {number: learner.checkpoint(path, step) for number, learner in self._learners.items()}
        digests_and_scales = []
        for number, learner in self._learners.items():
            state = {"step": step, "model": learner.model.state_dict(), **parts[number]}
            digest = save_checkpoint(learner_path(path, number), state) if differ else None
            digests_and_scales.append((digest, parts[number]["loss_scale"]))
        learners = list(chain.from_iterable(self._world.gather(digests_and_scales) or []))
        return parts[min(parts)] | {
            "in_round": self._in_round,
            "learner_digests": [digest for digest, _ in learners] if differ else [],
            "loss_scales": [scale for _, scale in learners],
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, of whose learners' files the ranks have checked the SHA-256. Collective."""
        saved = checkpoint.state
        scales = self._world.together(lambda: self._begin_restore(checkpoint.path, saved))
        if saved.get("learner_digests"):
            self._world.together(lambda: self._read_learners(checkpoint.path))
            return
        first, *others = self._learners.values()
        first.restore(checkpoint)
        for learner in others:
            learner.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        for number, learner in self._learners.items():
            learner.model.load_state_dict(self._model.state_dict())
            learner.loss_scale.load_state_dict(scales.get(number, saved["loss_scale"]))

    def _begin_restore(self, path: Path, saved: Mapping[str, Any]) -> Mapping[int, Any]:
        """Take over where in a round a checkpoint was written; return the loss scales by their learners, if any."""
        in_round = saved.get("in_round", 0)
        check_fit(path, "in_round", in_round, 0)
        self._in_round = in_round
        scales: Any = saved.get("loss_scales") or {}
        if scales:
            scales = dict(enumerate(scales)) if isinstance(scales, list) else scales
            first = next(iter(self._learners.values())).loss_scale.state_dict()
            check_fit(path, "loss_scales", scales, dict.fromkeys(range(self._virtual_gpus), first))
        return cast(Mapping[int, Any], scales)

    def _read_learners(self, path: Path) -> None:
        for number, learner in self._learners.items():
            file = learner_path(path, number)
            state = load_checkpoint(file, bound_of(learner.model), checked=True)
            checkpoint = Checkpoint(file, state, World())
            checkpoint.restore(learner.model)
            learner.restore(checkpoint)


def _weights(model: nn.Module) -> Tensors:
    """Return the weights that are trained; frozen ones stay as they are, to the bit."""
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]


def _statistics(model: nn.Module) -> tuple[Tensors, Tensors]:
    norms = trained_norms(model)
    return [norm.running_mean for norm in norms], [norm.running_var for norm in norms]  # type: ignore[misc]


def _state(optimizer: torch.optim.Optimizer) -> Tensors:
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor)
    ]


def _doubles(tensors: Tensors) -> Tensors:
    return [tensor.double() for tensor in tensors]


def _copy(targets: Tensors, values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
