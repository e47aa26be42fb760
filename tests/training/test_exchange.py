"""The exchange of gradients: its buckets, their order, and what the gradients are afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from summit_train.core.comm import BACKENDS, World, open_world
from summit_train.core.errors import RunFailed
from summit_train.training.buckets import BUCKET_BYTES, LAST_BUCKET_BYTES, bucket_counts
from summit_train.training.exchange import Exchange, average, split_buckets
from summit_train.training.timer import StepTimer
from tests.worlds import joined, needs_ranks

KB, MB = 2**10, 2**20


class _Recorded(World):
    """One of two ranks; the other always has the negative of half of its numbers: a total is half, a mean a quarter."""

    rank, size = 0, 2

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, list[float]]] = []

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        self.messages.append((name, tensor.tolist()))
        return lambda: tensor.div_(4)

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        self.messages.append((name, tensor.tolist()))
        return lambda: tensor.div_(2)


def test_the_last_bucket_is_small_and_none_is_above_its_bound() -> None:
    assert (LAST_BUCKET_BYTES, BUCKET_BYTES) == (MB, 25 * MB)
    assert bucket_counts([]) == []
    assert bucket_counts([1, MB]) == [1, 1]
    assert bucket_counts([4, 25 * MB, 424 * KB, 600 * KB]) == [1, 1, 2]
    assert bucket_counts([24 * MB, 1, 13 * MB, 12 * MB, 4]) == [2, 2, 1]
    assert bucket_counts([4, 30 * MB, 30 * MB]) == [1, 1, 1]  # one that is larger has its own


def test_buckets_hold_what_is_trained_in_reverse_order_and_one_type_each() -> None:
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,), (1, 2))]
    half = nn.Parameter(torch.ones(5, dtype=torch.float16))
    frozen = nn.Parameter(torch.ones(7), requires_grad=False)
    buckets = split_buckets([*weights, frozen, half])
    assert [[parameter.shape for parameter in bucket.parameters] for bucket in buckets] == [
        [half.shape],
        [(1, 2), (4,), (2, 3)],
    ]
    assert [(bucket.flat.dtype, len(bucket.flat)) for bucket in buckets] == [(torch.float16, 5), (torch.float32, 12)]


def test_a_gradient_has_the_layout_of_its_weight_and_a_place_of_its_own() -> None:
    weights = [nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)) for _ in range(2)]
    weights += [nn.Parameter(torch.ones(4, 3).T), nn.Parameter(torch.ones(6, 4)[:, ::2])]
    (bucket,) = split_buckets(weights)
    for number, (weight, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        assert view.shape == weight.shape and view.stride() == torch.empty_like(weight).stride()
        view.fill_(number)
    assert bucket.flat.tolist() == [0.0] * 12 + [1.0] * 12 + [2.0] * 24 + [3.0] * 24
    assert bucket.views[3].stride() == weights[0].stride() == (12, 1, 6, 3)


def _run(exchange: Exchange, loss: Callable[[], torch.Tensor]) -> None:
    """Make a step of one micro-batch."""
    exchange.begin_step(StepTimer(torch.device("cpu")))
    exchange.begin_last_pass()
    torch.autograd.backward(loss())
    exchange.finish()


class _TwoWays(nn.Module):
    """Its gradients get ready in the order c, a, b; d gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.full((1,), value)) for value in (2.0, 3.0, 5.0, 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.b) * self.a).sum() * self.c.sum()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter of one number a bucket."""
    monkeypatch.setattr("summit_train.training.buckets.LAST_BUCKET_BYTES", 4)
    monkeypatch.setattr("summit_train.training.buckets.BUCKET_BYTES", 4)


@pytest.mark.usefixtures("small_buckets")
def test_messages_begin_in_the_order_of_the_buckets_whatever_is_ready_first() -> None:
    """d gets no gradient, so all wait for `finish`; without d, c's goes first, then b's, but not in the first step."""
    model, world = _TwoWays(), _Recorded()
    exchange = Exchange(model.named_parameters(), world, 2)
    exchange.begin_step(StepTimer(torch.device("cpu")))
    exchange.begin_last_pass()
    torch.autograd.backward(model(torch.ones(1)))
    assert world.messages == []
    exchange.finish()
    wanted = [("gradients.0", [0.0]), ("gradients.1", [6.0]), ("gradients.2", [10.0]), ("gradients.3", [15.0])]
    assert world.messages == wanted
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[3.75], [2.5], [1.5], [0.0]]

    model.d.requires_grad_(False)
    early = _Recorded()
    exchange = Exchange(model.named_parameters(), early, 2)
    for sent in ([], ["gradients.0", "gradients.1", "gradients.2"]):
        early.messages.clear()
        exchange.begin_step(StepTimer(torch.device("cpu")))
        exchange.begin_last_pass()
        torch.autograd.backward(model(torch.ones(1)))
        assert [name for name, _ in early.messages] == sent
        exchange.finish()
        assert [message for _, message in early.messages] == [[6.0], [10.0], [15.0]]


class _Tied(nn.Module):
    """y <- a y several times, each recomputed, after y <- b x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.times = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), 3
        nn.init.constant_(self.a.weight, 2.0)
        nn.init.constant_(self.b.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(x).requires_grad_()  # where b is frozen, too
        for _ in range(self.times):
            y = checkpoint(self.a, y, use_reentrant=True)
        return y.sum()


@pytest.mark.usefixtures("small_buckets")
def test_a_gradient_that_comes_in_parts_is_sent_whole_or_the_run_ends() -> None:
    """y = b a^3 x with the gradients 3 a^2 b = 12 and a^3 = 8 of a and b."""
    model, world = _Tied(), _Recorded()
    exchange = Exchange(model.named_parameters(), world, 2)

    def step(times: int) -> None:
        world.messages.clear()
        model.times = times
        _run(exchange, lambda: model(torch.ones(1, 1)))

    for _ in range(3):
        step(3)
        assert world.messages == [("gradients.0", [8.0]), ("gradients.1", [12.0])]
    # In a process that has seen the block used once only, b is waited for, and so is what follows it.
    exchange = Exchange((model := _Tied()).named_parameters(), world, 2)
    step(1)
    step(2)
    assert world.messages == [("gradients.0", [4.0]), ("gradients.1", [4.0])]
    # Without b, the gradient of a is sent at once.
    model = _Tied()
    model.b.requires_grad_(False)
    exchange = Exchange(model.named_parameters(), world, 2)
    step(1)
    with pytest.raises(RunFailed, match=r"gradient of a\.weight arrived after .*use_reentrant=False"):
        step(2)


def test_passes_add_up_and_only_the_last_one_sends() -> None:
    model, world = nn.Linear(2, 1, bias=False), _Recorded()
    exchange = Exchange(model.named_parameters(), world, 2)
    for _ in range(2):  # nothing of the step before is left
        exchange.begin_step(StepTimer(torch.device("cpu")))
        torch.autograd.backward(model(torch.tensor([1.0, 2.0])).sum())
        assert world.messages == []
        exchange.begin_last_pass()
        torch.autograd.backward(model(torch.tensor([10.0, 20.0])).sum())
        exchange.finish()
        assert world.messages == [("gradients.0", [11.0, 22.0])]
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[2.75, 5.5]]
        world.messages.clear()


def test_halves_travel_and_floats_come_out() -> None:
    model = nn.Linear(1, 1, bias=False)
    exchange = Exchange(model.named_parameters(), _Recorded(), 2, "fp16")
    _run(exchange, lambda: model(torch.tensor([1 + 2.0**-12])).sum())
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == 0.25  # what a half cannot hold is gone


def _average_halves(virtual_gpus: int) -> int:
    world, weight = open_world(), nn.Parameter(torch.ones(2))
    exchange = Exchange([("weight", weight)], world, virtual_gpus, "fp16")
    _run(exchange, lambda: (weight * torch.tensor([40000.0, 3e-6])).sum())
    assert weight.grad is not None
    large, small = weight.grad.tolist()
    print(f"averaged {large} {small:.1e}", flush=True)
    world.close()
    return 0


@needs_ranks
@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_do_not_overflow_where_their_mean_does_not(backend: str) -> None:
    """The sum of three gradients of 40,000 is beyond a half; 3e-6 is near the smallest ones."""
    status, output = joined(3, partial(_average_halves, 3), backend)
    assert status == 0 and output.count("averaged 40000.0 3.0e-06") == 3, output


def test_halves_are_scaled_by_the_virtual_gpus_and_not_by_the_ranks() -> None:
    """Of 16 virtual GPUs, the sum of a rank is divided by 4 before it is sent, and by 4 after the ranks' sum."""
    model, world = nn.Linear(1, 1, bias=False), _Recorded()
    exchange = Exchange(model.named_parameters(), world, 16, "fp16")
    _run(exchange, lambda: model(torch.tensor([64.0])).sum())
    assert world.messages == [("gradients.0", [16.0])]
    assert model.weight.grad is not None and model.weight.grad.item() == 2  # 16 / 2 * 4 / 16


def test_one_rank_has_no_buckets_and_zeros_for_what_a_step_did_not_use() -> None:
    model, unused = nn.Linear(2, 1), nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    exchange = Exchange([*model.named_parameters(), ("unused", unused), ("frozen", frozen)], World(), 1)
    torch.autograd.backward(model(torch.ones(2)).sum())
    exchange.begin_step(StepTimer(torch.device("cpu")))
    assert exchange.buckets == [] and model.weight.grad is None
    exchange.begin_last_pass()
    torch.autograd.backward(model(torch.ones(2)).sum())
    exchange.finish()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.0, 1.0]]
    assert unused.grad is not None and unused.grad.tolist() == [0.0, 0.0, 0.0] and frozen.grad is None


def test_a_long_average_goes_in_messages_of_a_buckets_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("summit_train.training.exchange.BUCKET_BYTES", 16)
    world, flat = _Recorded(), torch.arange(5.0, dtype=torch.float64)
    average(flat, world, "weights")
    assert world.messages == [("weights.0", [0.0, 1.0]), ("weights.1", [2.0, 3.0]), ("weights.2", [4.0])]
    assert flat.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
