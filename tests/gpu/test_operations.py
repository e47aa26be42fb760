"""What an operation launches and moves on a GPU, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.optim import optimizer

from tests.gpu.operations import META, Operation, Operations, as_on_a_gpu


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device=META)


def seen(work: Callable[[], object]) -> list[Operation]:
    with Operations() as operations:
        work()
    return list(operations.counted.elements())


MB = 2**18  # elements of fp32


@pytest.mark.parametrize(
    ("work", "megabytes"),
    [
        (lambda x: x + x, 2),  # the same tensor is read once
        (lambda x: x + 1, 2),
        (lambda x: x.add_(meta(MB)), 3),
        (lambda x: x.copy_(meta(MB)), 2),
        (lambda x: x.zero_(), 1),
        (lambda x: torch.zeros_like(x), 1),
        (lambda x: x.expand(9, MB) + meta(9, MB), 19),
        (lambda x: x.half(), 1.5),
        (lambda x: torch._foreach_add_([x], [meta(MB)]), 3),  # lists return nothing
        (lambda x: torch._foreach_mul_([x], 2.0), 2),
        (lambda x: torch._foreach_copy_([x], [meta(MB)]), 2),
        (lambda x: torch._foreach_zero_([x]), 1),
    ],
)  # fmt: skip
def test_an_operation_moves_what_it_takes_and_returns(work: Callable[[torch.Tensor], object], megabytes: float) -> None:
    x = meta(MB)
    [found] = seen(lambda: work(x))
    assert found == Operation(1, 0, int(megabytes * 2**20))


def test_views_and_memory_alone_launch_nothing_and_neither_does_the_host() -> None:
    x = meta(4, 6)
    assert (
        seen(lambda: (x.view(24), x.t(), x[1:], x.unbind(), torch.empty_like(x), x.detach(), torch.ones(3) + 1)) == []
    )


@pytest.mark.parametrize(
    ("lists", "tensors", "elements", "launches"),
    [(1, 110, 9, 1), (1, 111, 9, 2), (2, 64, 9, 1), (2, 65, 9, 2), (2, 1, 320 * 65536, 1), (2, 1, 320 * 65536 + 1, 2)],
)  # fmt: skip
def test_lists_are_packed_as_torch_packs_them(lists: int, tensors: int, elements: int, launches: int) -> None:
    """65,536 elements a block, 320 blocks a launch, and 110 or 64 tensors of one or two lists."""
    given = [[meta(elements) for _ in range(tensors)] for _ in range(lists)]
    work = torch._foreach_add_ if lists == 2 else torch._foreach_zero_
    assert [one.launches for one in seen(lambda: work(*given))] == [launches]


@pytest.mark.parametrize(
    ("name", "lists", "tensors", "launches"),
    [("norm", 1, 110, 1), ("norm", 1, 111, 2), ("sgd", 3, 48, 1), ("sgd", 3, 49, 2),
     ("adamw", 4, 107, 3), ("adamw", 4, 109, 4)],
)  # fmt: skip
def test_steps_and_norms_are_not_packed(name: str, lists: int, tensors: int, launches: int) -> None:
    given = [[meta(9) for _ in range(tensors)] for _ in range(lists)]
    options = {"weight_decay": 0.0, "lr": 0.1, "maximize": False}
    work = {
        "norm": lambda: torch._foreach_norm(given[0]),
        "sgd": lambda: torch._fused_sgd_(
            *given, momentum=0.9, dampening=0.0, nesterov=False, is_first_step=False, **options
        ),
        "adamw": lambda: torch._fused_adamw_(
            *given, [], [meta(1) for _ in range(tensors)], beta1=0.9, beta2=0.9, eps=1e-8, amsgrad=False, **options
        ),
    }[name]
    with as_on_a_gpu():
        [found] = seen(work)
    assert found.launches == launches
    if name == "sgd":  # of weights, gradients and momenta all but gradients are written
        assert found.moved == 5 * tensors * 9 * 4


def test_a_function_that_torch_renames_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(optimizer, "_get_fused_kernels_supported_devices")
    with pytest.raises(AttributeError, match="_get_fused_kernels"), as_on_a_gpu():
        pass


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolutions_flops_are_two_for_each_multiply_add_and_gradient(groups: int) -> None:
    x, weight = meta(2, 8, 10, 10).requires_grad_(), meta(16, 8 // groups, 3, 3).requires_grad_()
    multiply_adds = 2 * 16 * 10 * 10 * 9 * 8 // groups
    [forward] = seen(lambda: functional.conv2d(x, weight, padding=1, groups=groups))
    assert (forward.launches, forward.flops, forward.is_convolution) == (1, 2 * multiply_adds, True)
    [product] = seen(lambda: functional.linear(meta(5, 8), meta(3, 8)))
    assert (product.flops, product.is_convolution) == (2 * 5 * 8 * 3, False)
    y = functional.conv2d(x, weight, padding=1, groups=groups)
    [both] = seen(lambda: torch.autograd.grad(y, (x, weight), torch.empty_like(y), retain_graph=True))
    assert (both.launches, both.flops) == (2, 4 * multiply_adds)
    [one] = seen(lambda: torch.autograd.grad(y, weight, torch.empty_like(y)))
    assert (one.launches, one.flops) == (1, 2 * multiply_adds)
