"""Horovod's cycles under the backward pass, played by hand and within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from summit_train.scaling.overlap import Gradient, fused, layer_gradients, overlap
from tests.networks import counted

MS = 1e-3


def rounded(seconds: float) -> float:
    return round(seconds, 9)


gradient_lists = st.lists(st.tuples(st.floats(0, 0.2), st.integers(4, 10**8)), min_size=1, max_size=40).map(
    lambda pairs: [Gradient(ready, size) for ready, size in sorted(pairs)]
)


def test_gradients_by_layer_sum_up_to_the_network() -> None:
    network = counted("tsm")
    gradients = layer_gradients(network, 3.0, 4)
    assert sum(gradient.num_bytes for gradient in gradients) == network.gradient_bytes
    assert [g.ready_s for g in gradients] == sorted(g.ready_s for g in gradients)
    assert rounded(gradients[-1].ready_s) == 3.0
    # The classifier is the last layer: first, and quick. conv1 and its norm come last.
    assert gradients[0].num_bytes == 4 * 2049 * 400 and gradients[0].ready_s < 0.01
    assert gradients[-1].num_bytes == 4 * (3 * 64 * 49 + 2 * 64)


def test_half_of_the_bytes_are_ready_after_a_quarter_of_the_backward_pass() -> None:
    # Why communication hides: ResNet's last stage has most parameters and is the first to be done.
    gradients = layer_gradients(counted("tsm"), 1.0, 4)
    early = sum(g.num_bytes for g in gradients if g.ready_s <= 0.25)
    assert early > 0.5 * sum(g.num_bytes for g in gradients)


def test_two_buffers_by_hand() -> None:
    gradients = [Gradient(0.5 * MS, 100), Gradient(4.5 * MS, 100)]
    found = overlap(gradients, 4.5 * MS, lambda size: 2 * MS, fusion_bytes=1000, cycle_s=MS, blocking=False)
    # Looked at after 1 ms and after 5 ms; 2 ms each: over at 3 ms and 7 ms.
    assert (rounded(found.communication_s), rounded(found.exposed_s), found.num_buffers) == (4 * MS, 2.5 * MS, 2)


def test_a_blocking_cycle_gathers_what_gets_ready_meanwhile() -> None:
    gradients = [Gradient(i * MS, 100) for i in range(1, 6)]
    queued = overlap(gradients, 5 * MS, lambda size: 4 * MS, fusion_bytes=1000, cycle_s=MS, blocking=False)
    blocked = overlap(gradients, 5 * MS, lambda size: 4 * MS, fusion_bytes=1000, cycle_s=MS, blocking=True)
    # Queued: five times 4 ms from 1 ms on. Blocked: one from 1 to 5 ms, the other four together from 5 to 9 ms.
    assert (queued.num_buffers, rounded(queued.exposed_s)) == (5, 16 * MS)
    assert (blocked.num_buffers, rounded(blocked.exposed_s)) == (2, 4 * MS)


def test_an_allreduce_that_shares_the_core_holds_the_backward_pass_up() -> None:
    gradients = [Gradient(1 * MS, 100), Gradient(5 * MS, 100)]
    found = overlap(
        gradients, 5 * MS, lambda size: 2 * MS, fusion_bytes=1000, cycle_s=MS, blocking=True, core_share=0.5
    )
    # From 1 to 3 ms at half speed: the pass ends at 6 ms instead of 5, the second allreduce at 8.
    assert (rounded(found.communication_s), rounded(found.exposed_s)) == (4 * MS, 3 * MS)
    # One that outlasts the pass takes half of the core only until that is done: 4 ms left at half speed take 8.
    found = overlap(
        gradients[:1], 5 * MS, lambda size: 20 * MS, fusion_bytes=1000, cycle_s=MS, blocking=True, core_share=0.5
    )
    assert rounded(found.exposed_s) == 16 * MS  # over at 21 ms


def test_buffers() -> None:
    assert list(fused([3, 3, 3, 20, 1], 7)) == [6, 3, 20, 1]
    assert list(fused([], 7)) == []


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 200))
def test_buffers_keep_all_bytes_and_overflow_only_for_one_gradient(sizes: list[int], limit: int) -> None:
    buffers = list(fused(sizes, limit))
    assert sum(buffers) == sum(sizes)
    assert all(buffer <= limit or buffer in sizes for buffer in buffers)


@given(gradient_lists, st.booleans(), st.floats(1e-4, 1e-2), st.integers(1, 10**8))
def test_exposed_is_never_negative_and_never_more_than_all(
    gradients: list[Gradient], blocking: bool, cycle_s: float, fusion: int
) -> None:
    backward_s = gradients[-1].ready_s
    found = overlap(
        gradients,
        backward_s,
        lambda size: 1e-4 + size / 1e9,
        fusion_bytes=fusion,
        cycle_s=cycle_s,
        blocking=blocking,
    )
    # At the latest all of it starts one cycle after the backward pass, so no more than that is exposed.
    assert 0 <= found.exposed_s <= found.communication_s + cycle_s + 1e-9
    assert 1 <= found.num_buffers <= len(gradients)
    # Nothing can be over before the last gradient is ready and its own buffer reduced.
    assert found.exposed_s >= 1e-4 + gradients[-1].num_bytes / 1e9 - 1e-9
