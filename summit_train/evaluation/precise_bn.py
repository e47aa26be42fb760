"""Recompute BN's statistics for fixed weights (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", section 3).

The running statistics lag behind the weights, and those of an average of weights belong to no network that was trained.
Here the mean and the variance over all inputs of K training batches, n elements a channel each, are put in their place.
Each batch is normalised by its own statistics on the way, as in training. With m_i and v_i (biased) of batch i, the law
of total variance gives

    mean = 1/K sum_i m_i        variance = 1/K sum_i v_i + 1/K sum_i m_i^2 - mean^2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog, leave_if_asked
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.dataset import Dataset
from summit_train.evaluation.scoring import Scorer
from summit_train.models import VideoNetwork
from summit_train.models.network import build_network
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.models.video import is_frozen, norm_momentum
from summit_train.plan import Plan
from summit_train.spec import Spec


def recompute_from_training(
    model: VideoNetwork, scorer: Scorer, plan: Plan, train: Dataset, watchdog: Watchdog
) -> None:
    """Recompute the statistics over the batches of the first `evaluate.precise_bn` steps of training. Collective.

    These are the same on any number of ranks. Where scorer.stop asks one rank to stop, all leave between two batches
    and raise Stopped.
    """
    spec, world, steps = scorer.spec, scorer.world, scorer.spec.evaluate.precise_bn
    count = steps * plan.accumulation

    def watched(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for number in range(count):
            watchdog.at(f"waiting for the other ranks before BN's batch {number + 1} of {count}", waits=True)
            leave_if_asked(world, scorer.stop)
            watchdog.at(f"recomputing BN's statistics, batch {number + 1} of {count}")
            yield next(batches)
        watchdog.at("waiting for the other ranks' BN statistics", waits=True)

    with train.training_batches(plan.order(), world.rank, world.size, range(steps)) as batches:
        recompute_statistics(model, watched(batches), spec, world, scorer.device)


def recompute_statistics(
    model: VideoNetwork, batches: Iterable[MicroBatch], spec: Spec, world: World, device: torch.device
) -> None:
    """Set the running statistics of `model` to those over all ranks' `batches`, equally many on each. Collective.

    A rank adds up 1, m_i, v_i and m_i^2 of its batches; frozen normalisations stay as they are.
    """
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, _BatchNorm)}
    norms = {name: norm for name, norm in norms.items() if not is_frozen(norm) and norm.running_mean is not None}
    if not norms:
        return
    elements = _elements_per_clip(spec)
    means, variances = ([norm.get_buffer(name) for norm in norms.values()] for name in ("running_mean", "running_var"))
    # The elements of a channel in one batch, n, for each entry.
    counts = [spec.scale.clips_per_gpu * elements[name] for name in norms]
    n = torch.cat([torch.full_like(mean, k, dtype=torch.float64) for mean, k in zip(means, counts, strict=True)])
    # A batch's variance arrives as torch estimates that of the population, n / (n - 1) times its own.
    biased = ((n - 1) / n).to(means[0].dtype)
    sums = torch.zeros(1 + 3 * len(n), dtype=torch.float64, device=device)
    normalise = Normalise(parameter_type(spec.precision), device, spec.data.input)
    was_training = model.training
    model.train()
    try:
        # With a momentum of 1 the running statistics after a pass are those of its batch alone.
        with torch.no_grad(), norm_momentum(list(norms.values()), 1.0), mixed_precision(spec.precision, device):
            for batch in batches:
                model.reseed(rng.seed_of(spec.seed, "dropout", batch.step, batch.virtual_gpu))
                model(normalise(batch.clips))
                mean, variance = torch.cat(means).double(), torch.cat(variances).double()
                sums += torch.cat([sums.new_ones(1), mean, variance * biased, mean.square()])
    finally:
        model.train(was_training)
    sums = world.sum(sums, "precise_bn")
    mean, within, square = torch.chunk(sums[1:] / sums[0], 3)
    # As torch does, the population's variance is kept: K n / (K n - 1) times that of the K n elements.
    total = n * sums[0]
    variance = (within + square - mean.square()) * total / (total - 1)
    sizes = [len(buffer) for buffer in means]
    for buffers, values in ((means, mean), (variances, variance)):
        for buffer, value in zip(buffers, torch.split(values, sizes), strict=True):
            buffer.copy_(value)


def _elements_per_clip(spec: Spec, device: str = "meta") -> dict[str, int]:
    """Return each normalisation's elements of a channel that one training clip has, by the normalisation's name."""
    found: dict[str, int] = {}

    def note(name: str, norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found[name] = inputs[0].numel() // inputs[0].shape[1]

    with torch.device(device), torch.no_grad():
        network = build_network(spec)
        for name, norm in network.named_modules():
            if isinstance(norm, _BatchNorm):
                norm.register_forward_pre_hook(partial(note, name))
        num_frames, height, width, channels = spec.data.clip_shape
        try:
            network.eval()(torch.zeros(1, num_frames, channels, height, width))
        except (RuntimeError, TypeError):
            if network.replaceable or device != "meta":
                raise
            return _elements_per_clip(spec, "cpu")  # some foreign networks read numbers, which meta tensors lack
    return found
