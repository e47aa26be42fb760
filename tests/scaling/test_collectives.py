"""Alpha-beta models of an allreduce, against hops and bytes counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.scaling.collectives import (
    Gradient,
    NoFit,
    allreduce_seconds,
    bus_bandwidth,
    fit_alpha_beta,
    fused,
    hierarchical_seconds,
    layer_gradients,
    link_of,
    overlap,
    ring_seconds,
    tree_seconds,
)
from summit_train.scaling.machines import Link, Network
from tests.networks import counted

INTRA = Link(latency_s=1e-6, bytes_per_second=100e9, source="test")
INTER = Link(latency_s=10e-6, bytes_per_second=10e9, source="test")
NETWORK = Network(intra=INTRA, inter=INTER)

Time = Callable[[Network, int, int, float], float]


@pytest.mark.parametrize(
    ("time", "nodes", "per_node", "num_bytes", "expected"),
    [
        # 2 nodes of 3: 10 hops, 2 of them between the nodes; each link carries 10/6 of 6 MB, the slowest at 10 GB/s.
        (ring_seconds, 2, 3, 6e6, 8 * 1e-6 + 2 * 10e-6 + 10e6 / 10e9),
        # One node: 4 hops, 4/3 of the bytes over NVLink.
        (ring_seconds, 1, 3, 6e6, 4 * 1e-6 + 8e6 / 100e9),
        # 5 nodes: 3 levels up and 3 down; 2 hops in the nodes each way; twice the bytes at 0.92 of 10 GB/s.
        (tree_seconds, 5, 3, 4.6e6, 4 * 1e-6 + 6 * 10e-6 + 9.2e6 / 9.2e9),
        # In the nodes 4 hops and 4/3 S; between 4 nodes 6 hops and 6/4 S over the node's link.
        (hierarchical_seconds, 4, 3, 6e6, 4e-6 + 4 / 3 * 6e6 / 100e9 + 6 * 10e-6 + 9e6 / 10e9),
    ],
)
def test_hops_and_bytes_by_hand(time: Time, nodes: int, per_node: int, num_bytes: float, expected: float) -> None:
    assert time(NETWORK, nodes, per_node, num_bytes) == pytest.approx(expected)


def test_the_bus_bandwidth_of_six_ranks() -> None:
    assert bus_bandwidth(6, 6e6, 2.0) == 5e6


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical", "fastest"])
def test_one_rank_talks_to_nobody(algorithm: str) -> None:
    network = Network.model_validate({**NETWORK.model_dump(), "algorithm": algorithm, "overhead_s": 1e-3})
    assert allreduce_seconds(network, 1, 1, 1e9) == 0
    assert allreduce_seconds(network, 1, 2, 4) > 1e-3


@given(st.integers(1, 4096), st.integers(1, 16), st.integers(4, 2**30))
def test_fastest_is_neither_slower_than_ring_nor_tree(n: int, g: int, size: int) -> None:
    fastest = allreduce_seconds(NETWORK, n, g, size)
    if n * g > 1:
        assert fastest == min(ring_seconds(NETWORK, n, g, size), tree_seconds(NETWORK, n, g, size))


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_the_fit_finds_what_made_the_points(latency: float, bandwidth: float) -> None:
    num_bytes = [4**i for i in range(2, 14)]
    fit = fit_alpha_beta(num_bytes, [latency + size / bandwidth for size in num_bytes])
    assert fit.worst_error < 1e-6
    assert fit.latency_s == pytest.approx(latency, rel=1e-4)


def test_the_fit_tells_how_far_off_a_point_is_and_has_no_negative_latency() -> None:
    fit = fit_alpha_beta([1, 2, 4], [1.0, 2.2, 4.0])
    assert 0.02 < fit.worst_error < 0.1
    assert fit_alpha_beta([10, 20, 40], [1.0, 2.5, 6.0]).latency_s == 0


def test_a_large_message_that_is_quick_by_chance_does_not_set_the_latency() -> None:
    """10 ms and 1 GB/s; the message of 1 MB takes 9.9 ms in place of 11."""
    fit = fit_alpha_beta([4, 10**6, 10**9], [10e-3, 9.9e-3, 1.01])
    assert fit.latency_s == pytest.approx(10e-3, rel=1e-6)  # 9.9 ms less 1 MB's 1 ms would be 8.9 ms
    assert fit.bytes_per_second == pytest.approx(1e9, rel=1e-6)
    # A small message that a cycle has held up for 2 ms is none of the quickest: 11 ms less 1 MB's 1 ms.
    held_up = fit_alpha_beta([4, 10**6, 10**9], [12e-3, 11e-3, 1.01])
    assert held_up.latency_s == pytest.approx(10e-3, rel=1e-6)


@pytest.mark.parametrize(("num_bytes", "seconds"), [([4, 4], [1.0, 1.0]), ([4, 8], [2.0, 1.0])])
def test_points_without_a_line_are_refused(num_bytes: list[int], seconds: list[float]) -> None:
    with pytest.raises(NoFit, match=r"larger messages|two or more message sizes"):
        fit_alpha_beta(num_bytes, seconds)


@given(st.integers(2, 64))
def test_the_hop_of_a_fit_gives_the_fit_back(ranks: int) -> None:
    fit = fit_alpha_beta([4, 1 << 20, 1 << 24], [1e-4 + size / 1e9 for size in (4, 1 << 20, 1 << 24)])
    network = Network(intra=link_of(fit, ranks, "test"))
    for size in (4, 1 << 22):
        assert ring_seconds(network, 1, ranks, size) == pytest.approx(1e-4 + size / 1e9, rel=1e-6)


MS = 1e-3
gradient_lists = st.lists(st.tuples(st.floats(0, 0.2), st.integers(4, 10**8)), min_size=1, max_size=40).map(
    lambda pairs: [Gradient(ready, size) for ready, size in sorted(pairs)]
)


def test_gradients_by_layer_sum_up_to_the_network() -> None:
    network = counted("tsm")
    gradients = layer_gradients(network, 3.0, 4)
    assert sum(gradient.num_bytes for gradient in gradients) == network.gradient_bytes
    assert [g.ready_s for g in gradients] == sorted(g.ready_s for g in gradients)
    assert gradients[-1].ready_s == pytest.approx(3)
    # The classifier is the last layer: first, and quick. conv1 and its norm come last.
    assert gradients[0].num_bytes == 4 * 2049 * 400 and gradients[0].ready_s < 0.01
    assert gradients[-1].num_bytes == 4 * (3 * 64 * 49 + 2 * 64)


def _cycles(*, fusion_bytes: int = 1000, cycle_s: float = MS, **more: Any) -> Network:
    return Network(intra=INTRA, fusion_bytes=fusion_bytes, cycle_s=cycle_s, **more)


@pytest.mark.parametrize(
    ("ready_ms", "backward_ms", "allreduce_ms", "network", "exposed_ms"),
    [
        # Checked after 1 ms and after 5 ms; 2 ms each: over at 3 ms and 7 ms.
        ([0.5, 4.5], 4.5, 2, _cycles(blocking=False), 2.5),
        # Queued: five times 4 ms from 1 ms on. Blocked: one from 1 to 5 ms, the other four together from 5 to 9 ms.
        ([1, 2, 3, 4, 5], 5, 4, _cycles(blocking=False), 16),
        ([1, 2, 3, 4, 5], 5, 4, _cycles(blocking=True), 4),
        # From 1 to 3 ms at half speed: the pass ends at 6 ms instead of 5, the second allreduce at 8.
        ([1, 5], 5, 2, _cycles(blocking=True, core_share=0.5), 3),
        # One that outlasts the pass takes half of the core only until that is done: 4 ms left at half speed take 8.
        ([1], 5, 20, _cycles(blocking=True, core_share=0.5), 16),  # over at 21 ms
    ],
)
def test_what_is_left_of_the_allreduces_by_hand(
    ready_ms: list[float], backward_ms: float, allreduce_ms: float, network: Network, exposed_ms: float
) -> None:
    gradients = [Gradient(ready * MS, 100) for ready in ready_ms]
    exposed_s = overlap(gradients, backward_ms * MS, lambda size: allreduce_ms * MS, network)
    assert exposed_s == pytest.approx(exposed_ms * MS, abs=1e-9)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 200))
def test_buffers_keep_all_bytes_and_overflow_only_for_one_gradient(sizes: list[int], limit: int) -> None:
    assert list(fused([3, 3, 3, 20, 1], 7)) == [6, 3, 20, 1]
    buffers = list(fused(sizes, limit))
    assert sum(buffers) == sum(sizes)
    assert all(buffer <= limit or buffer in sizes for buffer in buffers)


@given(gradient_lists, st.booleans(), st.floats(1e-4, 1e-2), st.integers(1, 10**8))
def test_exposed_is_never_negative_and_never_more_than_all(
    gradients: list[Gradient], blocking: bool, cycle_s: float, fusion: int
) -> None:
    backward_s = gradients[-1].ready_s
    network = _cycles(fusion_bytes=fusion, cycle_s=cycle_s, blocking=blocking)
    exposed_s = overlap(gradients, backward_s, lambda size: 1e-4 + size / 1e9, network)
    # At the latest all of it starts one cycle after the backward pass, so no more than that is exposed.
    assert 0 <= exposed_s <= sum(1e-4 + size / 1e9 for _, size in gradients) + cycle_s + 1e-9
    # Nothing can be over before the last gradient is ready and its own buffer reduced.
    assert exposed_s >= 1e-4 + gradients[-1].num_bytes / 1e9 - 1e-9
