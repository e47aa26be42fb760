"""Allreduces under the backward pass: when each gradient is ready, which are fused, and what remains after the pass.

Horovod (docs/tensor-fusion.rst, operations.cc): every cycle the gradients that are ready are packed into fusion buffers
in their order, and the buffers are reduced one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from summit_train.models.count import Count

# A convolution's backward pass is two convolutions of its size: for the input and for the weights.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Gradient:
    """One layer's gradient: ready so many seconds after the start of the backward pass, and its bytes."""

    ready_s: float
    num_bytes: int


@dataclass(frozen=True)
class Overlap:
    """Communication of one step: its seconds in all, and the seconds after the backward pass."""

    communication_s: float
    exposed_s: float
    num_buffers: int


def layer_gradients(network: Count, backward_s: float, bytes_per_element: int) -> list[Gradient]:
    """Return the network's gradients from the last layer to the first; a layer takes time by its multiply-adds."""
    done, gradients = 0, []
    for layer in reversed(network.layers):
        done += layer.multiply_adds
        gradients.append(Gradient(backward_s * done / network.multiply_adds, bytes_per_element * layer.parameters))
    return gradients


def overlap(
    gradients: Sequence[Gradient],
    backward_s: float,
    seconds_of: Callable[[int], float],
    *,
    fusion_bytes: int,
    cycle_s: float,
    blocking: bool,
    core_share: float = 0.0,
) -> Overlap:
    """Simulate one step's cycles. seconds_of(bytes): one allreduce. gradients: in the order in which they get ready.

    blocking: no cycle begins while a buffer is reduced, so gradients that get ready meanwhile are fused. core_share:
    the part of the backward pass's core that an allreduce takes; the time that the pass loses is exposed too.
    """
    tick = free = total = lost = 0.0
    num_buffers, rest = 0, list(gradients)
    while rest:
        tick = max(tick, cycle_s * math.ceil((rest[0].ready_s + lost) / cycle_s - 1e-9))
        count = sum(1 for gradient in rest if gradient.ready_s + lost <= tick + 1e-12) or 1
        for num_bytes in fused([gradient.num_bytes for gradient in rest[:count]], fusion_bytes):
            seconds, start = seconds_of(num_bytes), max(free, tick)
            left_s = max(0.0, backward_s + lost - start)  # of the backward pass
            lost += core_share * min(seconds, left_s / (1 - core_share))
            free = start + seconds
            total += seconds
            num_buffers += 1
        rest = rest[count:]
        tick = max(tick + cycle_s, free if blocking else 0.0)
    return Overlap(total, max(0.0, free - backward_s - lost) + lost, num_buffers)


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
