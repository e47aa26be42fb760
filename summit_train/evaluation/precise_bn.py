"""Recompute BN's statistics for fixed weights (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", section 3).

The running statistics lag behind the weights, and those of an average of weights belong to no network that was trained.
Here the mean and the variance over all inputs of a normalisation in K training batches are put in their place. Each
input is normalised by its own statistics on the way, as in training. With n_i elements a channel, mean m_i and variance
v_i (biased) of the i-th input of N elements in all, the law of total variance gives

    mean = 1/N sum_i n_i m_i        variance = 1/N sum_i n_i (v_i + m_i^2) - mean^2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog, leave_if_asked
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.dataset import Dataset
from summit_train.evaluation.scores import Scored
from summit_train.evaluation.scoring import VideoScorer
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.models.video import norm_momentum, trained_norms
from summit_train.plan import Plan
from summit_train.spec import Spec


def recompute_from_training(
    model: VideoNetwork, scorer: VideoScorer[Scored], plan: Plan, train: Dataset, watchdog: Watchdog
) -> None:
    """Recompute the statistics over the batches of the first `evaluate.precise_bn` steps of training. Collective.

    They are the same on any number of ranks. If scorer.stop asks one to stop, all raise Stopped between two batches.
    """
    spec = scorer.spec
    world = scorer.world
    steps = spec.evaluate.precise_bn
    count = steps * plan.accumulation

    def watched(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for number in range(count):
            watchdog.at(f"waiting for the other ranks before BN's batch {number + 1} of {count}", waits=True)
            leave_if_asked(world, scorer.stop)
            watchdog.at(f"recomputing BN's statistics, batch {number + 1} of {count}")
            yield from islice(batches, 1)  # none where others have larger shares
        watchdog.at("waiting for the other ranks' BN statistics", waits=True)

    with train.training_batches(plan.order(), world.rank, world.size, range(steps)) as batches:
        recompute_statistics(model, watched(batches), spec, world, scorer.device)


def recompute_statistics(
    model: VideoNetwork, batches: Iterable[MicroBatch], spec: Spec, world: World, device: torch.device
) -> None:
    """Set the running statistics of `model` to those over all ranks' `batches`. Collective.

    A rank adds up n_i, n_i m_i and n_i (v_i + m_i^2). Normalisations that are frozen or not used stay as they are.
    """
    norms = trained_norms(model)
    if not norms:
        return
    sums = {norm: torch.zeros(3, norm.num_features, dtype=torch.float64, device=device) for norm in norms}

    def add(norm: _BatchNorm, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if norm.training:
            n = inputs[0].numel() // norm.num_features
            mean = norm.get_buffer("running_mean").double()
            variance = norm.get_buffer("running_var").double()
            # The variance arrives as torch estimates that of the population, n / (n - 1) times its own.
            sums[norm] += n * torch.stack([torch.ones_like(mean), mean, variance * (n - 1) / n + mean.square()])

    normalise = Normalise(parameter_type(spec.precision), device, spec.data.input)
    was_training = model.training
    model.train()
    hooks = [norm.register_forward_hook(add) for norm in norms]
    try:
        # With a momentum of 1 the running statistics after a call are those of its input alone. Eager, as a compiled
        # network would not see the hooks.
        with (
            torch.no_grad(),
            norm_momentum(norms, 1.0),
            mixed_precision(spec.precision, device),
            torch.compiler.set_stance("force_eager"),
        ):
            for batch in batches:
                model.reseed(rng.seed_of(spec.seed, "dropout", batch.step, batch.virtual_gpu))
                model(normalise(batch.clips))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    sizes = [norm.num_features for norm in norms]
    total = world.sum(torch.cat(list(sums.values()), 1), "precise_bn")
    for norm, (n, sum_of_means, sum_of_squares) in zip(norms, torch.split(total, sizes, 1), strict=True):
        if n[0] > 0:
            mean = sum_of_means / n
            norm.get_buffer("running_mean").copy_(mean)
            # As torch does, the population's variance is kept: N / (N - 1) times that of the N elements.
            norm.get_buffer("running_var").copy_((sum_of_squares / n - mean.square()) * n / (n - 1))
