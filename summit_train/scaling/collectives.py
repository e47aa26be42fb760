"""Seconds of one allreduce: alpha-beta models of the ring, the tree and the two-level ring, and their fit.

The ring and the tree are those of NCCL's own tuning model (NCCL source, src/graph/tuning.cc, ncclTopoTuneModel): a
number of hops times their latency, plus bytes over bandwidth. S bytes, p = N * g ranks on N nodes of g each.

`overlap` puts allreduces under the backward pass: in the buckets of `training.buckets`, one after the other, each at
the next of Horovod's cycles. The published runs' machine packs as Horovod does by default (docs/tensor-fusion.rst,
operations.cc): every cycle the gradients that are ready go into fusion buffers, in their order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from summit_train.core.count import Count
from summit_train.core.errors import RunFailed, UserError
from summit_train.scaling.machines import Link, Network
from summit_train.training.buckets import bucket_counts

# NCCL takes a tree's bandwidth as 0.92 of the ring's (tuning.cc, "Various model refinements").
TREE_EFFICIENCY = 0.92
# A convolution's backward pass is two convolutions of its size: for the input and for the weights.
BACKWARD_SHARE = 2 / 3

_NO_GROWTH = "the times do not grow with the message size; try larger messages, or a quiet machine"
# The bandwidth is fitted to messages that take 16 latencies or more; it and the latency settle in a few rounds.
_LARGE = 16
_ROUNDS = 6
# Times within 5 % differ by chance: the smallest message among the quickest gives the latency.
_QUICK = 1.05


class NoFit(RunFailed):
    """No latency and bandwidth describe the measured points."""


@dataclass(frozen=True)
class AlphaBeta:
    """A fit of one whole allreduce: seconds = latency_s + bytes / bytes_per_second."""

    latency_s: float
    bytes_per_second: float
    worst_error: float  # largest |fitted / measured - 1|


def allreduce_seconds(network: Network, nodes: int, per_node: int, num_bytes: float) -> float:
    """Return the seconds of an allreduce over `nodes` x `per_node` ranks. Raises UserError without a link for it."""
    if nodes * per_node == 1:
        return 0.0
    by = {"ring": ring_seconds, "tree": tree_seconds, "hierarchical": hierarchical_seconds}
    kinds = ("ring", "tree") if network.algorithm == "fastest" else (network.algorithm,)
    return network.overhead_s + min(by[kind](network, nodes, per_node, num_bytes) for kind in kinds)


def ring_seconds(network: Network, nodes: int, per_node: int, num_bytes: float) -> float:
    """Time one ring through all ranks: 2(p-1) hops, 2(N-1) of them between nodes, 2(p-1)/p S bytes on each link."""
    ranks = nodes * per_node
    latency_s, slowest = _path(network, 2 * (ranks - nodes), 2 * (nodes - 1))
    return latency_s + 2 * (ranks - 1) / ranks * num_bytes / slowest


def tree_seconds(network: Network, nodes: int, per_node: int, num_bytes: float) -> float:
    """Time NCCL's double tree: chains in the nodes, log2(N) hops between them, up and down, 2 S bytes on each link."""
    latency_s, slowest = _path(network, 2 * (per_node - 1), 2 * math.ceil(math.log2(nodes)))
    return latency_s + 2 * num_bytes / (TREE_EFFICIENCY * slowest)


def hierarchical_seconds(network: Network, nodes: int, per_node: int, num_bytes: float) -> float:
    """Time HOROVOD_HIERARCHICAL_ALLREDUCE: reduce-scatter in the nodes, rings between them, all-gather in the nodes.

    The g rings between the nodes each carry S/g bytes and share the node's link.
    """
    latency_s, slowest = _path(network, 0, 2 * (nodes - 1))
    between_s = latency_s + 2 * (nodes - 1) / nodes * num_bytes / slowest
    return ring_seconds(network, 1, per_node, num_bytes) + between_s


def bus_bandwidth(ranks: int, num_bytes: float, seconds: float) -> float:
    """Return the bytes/s of each link of a ring, 2(p-1)/p S / t, for any ranks (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * num_bytes / seconds


def fit_alpha_beta(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit the latency to a small message, and the bandwidth to those that take 16 times as long, by relative squares.

    The latency is at least 0. Raises NoFit for fewer than two sizes, or times that do not grow with the size.
    """
    if len(set(num_bytes)) < 2:
        raise NoFit(f"a fit needs two or more message sizes, got {len(set(num_bytes))}")
    # At the largest messages, which gradients are, the line must be right: that is where the bandwidth is read off,
    # and the latency at the smallest of the quickest. Between, a multiple of Horovod's cycle lies on no line.
    largest = max(range(len(seconds)), key=lambda i: num_bytes[i])
    quick = (i for i in range(len(seconds)) if seconds[i] <= _QUICK * min(seconds))
    first = min(quick, key=lambda i: num_bytes[i])
    if num_bytes[first] >= num_bytes[largest]:
        raise NoFit(_NO_GROWTH)
    alpha = beta = 0.0
    for _ in range(_ROUNDS):
        large = [i for i in range(len(seconds)) if seconds[i] >= _LARGE * alpha and i != first] or [largest]
        slopes = [num_bytes[i] / seconds[i] for i in large]
        beta = sum(x * (1 - alpha / seconds[i]) for x, i in zip(slopes, large, strict=True))
        beta /= sum(x * x for x in slopes)
        alpha = max(0.0, seconds[first] - beta * num_bytes[first])
    if beta <= 0:
        raise NoFit(_NO_GROWTH)
    errors = [abs((alpha + beta * s) / t - 1) for s, t in zip(num_bytes, seconds, strict=True)]
    return AlphaBeta(alpha, 1 / beta, max(errors))


def link_of(fit: AlphaBeta, ranks: int, source: str) -> Link:
    """Return the hop of a ring of `ranks` equal links that gives this fit: `ring_seconds` inverted."""
    hops = 2 * (ranks - 1)
    return Link(latency_s=fit.latency_s / hops, bytes_per_second=hops / ranks * fit.bytes_per_second, source=source)


class Gradient(NamedTuple):
    """One layer's gradient: when it is ready, in seconds after the start of the backward pass, and its bytes."""

    ready_s: float
    num_bytes: int


def layer_gradients(network: Count, backward_s: float, bytes_per_element: int) -> list[Gradient]:
    """Return the network's gradients from the last layer to the first; a layer takes time by its multiply-adds."""
    done = 0
    gradients = []
    for layer in reversed(network.layers):
        done += layer.multiply_adds
        gradients.append(Gradient(backward_s * done / network.multiply_adds, bytes_per_element * layer.parameters))
    return gradients


def overlap(
    gradients: Sequence[Gradient], backward_s: float, seconds_of: Callable[[int], float], network: Network
) -> float:
    """Simulate one step; return the seconds of its communication after the backward pass (exposed).

    gradients: in the order in which they get ready. seconds_of(bytes): one allreduce. With network.blocking no cycle
    begins during an allreduce, so gradients that get ready meanwhile are packed together. Exposed includes what the
    backward pass loses by network.core_share.
    """
    cycle_s = network.cycle_s
    core_share = network.core_share
    rest = list(gradients)
    if network.fusion_bytes is None:  # a bucket is ready when the last of its gradients is
        members = iter(gradients)
        buckets = [list(itertools.islice(members, n)) for n in bucket_counts([size for _, size in gradients])]
        rest = [Gradient(bucket[-1].ready_s, sum(size for _, size in bucket)) for bucket in buckets]
    tick = free = lost = 0.0
    while rest:
        tick = max(tick, cycle_s * math.ceil((rest[0].ready_s + lost) / cycle_s - 1e-9))
        count = sum(1 for gradient in rest if gradient.ready_s + lost <= tick + 1e-12) or 1
        for num_bytes in fused([size for _, size in rest[:count]], network.fusion_bytes or 0):
            seconds = seconds_of(num_bytes)
            start = max(free, tick)
            left_s = max(0.0, backward_s + lost - start)  # of the backward pass
            lost += core_share * min(seconds, left_s / (1 - core_share))
            free = start + seconds
        rest = rest[count:]
        tick = max(tick + cycle_s, free if network.blocking else 0.0)
    return max(0.0, free - backward_s - lost) + lost


def fused(sizes: Sequence[int], fusion_bytes: int) -> Iterator[int]:
    """Yield the bytes of the buffers that hold gradients of these sizes; one larger than a buffer has its own."""
    buffer = 0
    for size in sizes:
        if buffer and buffer + size > fusion_bytes:
            yield buffer
            buffer = 0
        buffer += size
    if buffer:
        yield buffer


def _path(network: Network, inside: int, between: int) -> tuple[float, float]:
    """Return the latency of those hops inside and between nodes, and the bytes a second of the slowest link."""
    if between and network.inter is None:
        raise UserError("several nodes, but the machine has no network.inter, a link between nodes")
    hops = [(count, link) for count, link in ((inside, network.intra), (between, network.inter)) if count and link]
    slowest = min((link.bytes_per_second for _, link in hops), default=math.inf)
    return sum(count * link.latency_s for count, link in hops), slowest
