"""Whole training steps without a GPU: every shipped network and solver at its full size on torch's meta device.

The step is the GPU's: its modules, its fused optimizer, its foreach operations, its autocast. Tensors have shapes and
no numbers, so what makes the host wait for one (item(), nonzero()) raises, and so does a shape that depends on numbers.
Every operation is seen: nothing but the clips and their labels may come from the host.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from summit_train.core.comm import World
from summit_train.models.build import build_network
from summit_train.models.network import make_ready
from summit_train.plan import Plan, make_plan
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training import step as step_module
from summit_train.training.build import build_step
from tests.gpu.autocast import IDLE, as_on_cuda, dispatched_as
from tests.gpu.devices import batches_of
from tests.gpu.operations import META, Operation, Operations, as_on_a_gpu
from tests.gpu.test_shipped import OTHER_SOLVER, SYNCHRONOUS, TOLERANCE
from tests.worlds import ROOT, take_step

# Without erasing, whose generator is the device's own.
SIZE = "scale.gpus=2 scale.clips_per_gpu=4 model.num_classes=400 precision=fp16 data.erase=0"
# Of the shipped specs, those whose network, training or solver is like no other's: the table of papers/gpu_step.md.
TABLE = re.findall(r"^\|(\w+)\|([\d,.|]+)\|$", (ROOT / "papers/gpu_step.md").read_text(encoding="utf-8"), re.M)
# One of each kind: the others take minutes, and have theirs at night.
BY_DAY = ("tsm_mobilenet_v2_8f", "tsm_nl_r50_8f", "i3d_3x3x3_r50_16f", "vit_b_16f")
RECOMPUTED = ("vit_b_16f", "tsm_nl_r50_8f")
NIGHTLY = pytest.mark.nightly
SOLVERS = {
    **{name: f"{OTHER_SOLVER}={name}" for name in ("rmsprop", "adagrad", "adam", "adamw", "lamb")},
    **{kind: f"optimizer.trust_ratio.kind={kind}" for kind in ("lars", "bounded")},
}
# What moves a batch to the device: the clips and the labels of each virtual GPU.
COPIES = {"aten::_to_copy": 2 * 2}


def by_day(rows: list[tuple[str, str]]) -> list[Any]:
    """Mark the rows that are left for the night."""
    return [pytest.param(*row, marks=() if row[0] in BY_DAY else NIGHTLY) for row in rows]


class Lap(NamedTuple):
    """What was seen of a step: its operations, those by name that have a tensor of the host, the types of the
    convolutions' and matrix products' tensors, and the most bytes at a time."""

    operations: Counter[Operation]
    of_host: Counter[str]
    products: Counter[torch.dtype]
    peak: int

    @property
    def launches(self) -> int:
        return sum(number * one.launches for one, number in self.operations.items())

    @property
    def moved(self) -> int:
        return sum(number * one.moved for one, number in self.operations.items())

    @property
    def flops(self) -> int:
        return sum(number * one.flops for one, number in self.operations.items())


class Seen(Operations):
    """Sees operations on tensors of the meta device, and gives them CUDA's autocast."""

    def __init__(self) -> None:
        super().__init__()
        self._now, self._alive = 0, dict[int, int]()
        self._begin()

    def lap(self) -> Lap:
        """Return what was seen since the lap before."""
        found = Lap(self.counted, self.of_host, self.products, self.peak)
        self._begin()
        return found

    def _begin(self) -> None:
        self.counted, self.of_host, self.products = Counter(), Counter[str](), Counter[torch.dtype]()
        self.peak = self._now

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = dict[int, torch.Tensor]()  # what the meta device's kernels get -> the step's tensor

        def lowered(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device != META:
                return leaf
            lower = dispatched_as(leaf, "meta")
            there[id(lower)] = leaf
            return lower

        def raised(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device != META:
                return leaf
            return there[id(leaf)] if id(leaf) in there else dispatched_as(leaf, IDLE)

        args, kwargs = tree_map(lowered, (args, kwargs or {}))
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.of_host[operation._schema.name] += any(tensor.device != META for tensor in tensors)
        if operation._overloadpacket in flop_registry:
            self.products.update(tensor.dtype for tensor in tensors)
        for tensor in tensors:
            if tensor.device == META:
                self._hold(tensor.untyped_storage())
        return tree_map(raised, result)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._alive:
            self._alive[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._now -= self._alive.pop(key)


@pytest.fixture(scope="module", autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with as_on_a_gpu(), as_on_cuda():
        yield


@cache
def _laps(name: str, words: str) -> tuple[Plan, Lap, Lap]:
    """The plan, and what is seen of the first step, in single precision, and of the next one under autocast.

    The first has the network's and the solver's tensors too.
    """
    spec = load_spec(shipped("configs/kinetics") / f"{name}.yaml", [*SIZE.split(), *words.split()])
    plan = make_plan(spec, 1, spec.scale.clips_per_gpu * 4)
    first, last = (batches_of(spec, number, range(2)) for number in range(2))
    with Seen() as seen:
        with META:
            network = build_network(spec)
        make_ready(network, spec)
        step = build_step(spec, plan, World(), network, META)
        seen.lap()
        with patch.object(step_module, "mixed_precision", lambda *_: nullcontext()):
            take_step(step, first, 0.001)
        wide = seen.lap()
        take_step(step, last, 0.001)
    return plan, wide, seen.lap()


def _memory(plan: Plan, wide: Lap, narrow: Lap) -> tuple[int, int, int, int]:
    """The planned and the tracked bytes in fp32, and those in 16 bits."""
    in_fp32 = replace(plan, spec=plan.spec.model_copy(update={"precision": "fp32"}))
    return in_fp32.memory_bytes_per_rank, wide.peak, plan.memory_bytes_per_rank, narrow.peak


def test_a_wait_for_a_number_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones((), device=META).item()
    with pytest.raises(NotImplementedError):
        torch.ones(3, device=META).nonzero()
    with Seen() as seen:
        torch.ones(2).to(META).add(1)
    assert +seen.of_host == Counter(["aten::ones", "aten::_to_copy"])


def test_the_table_has_the_networks() -> None:
    assert len(TABLE) == len(dict(TABLE)) == 15


@pytest.mark.parametrize(("name", "row"), by_day(TABLE), ids=dict(TABLE))
def test_a_networks_step_on_a_gpu_and_its_row(name: str, row: str) -> None:
    """It waits for nothing, multiplies in 16 bits, and has the planned memory; with torch 2.13, the row's numbers."""
    plan, wide, narrow = _laps(name, SYNCHRONOUS)
    assert +wide.of_host == +narrow.of_host == COPIES
    assert set(narrow.products) == {torch.float16} and set(wide.products) == {torch.float32}
    memory = _memory(plan, wide, narrow)
    assert memory[1::2] == pytest.approx(memory[::2], rel=TOLERANCE)
    assert narrow.moved >= wide.moved / 2  # of the tensors in fp32 some have half of the bytes, none fewer
    # Twice the multiply-adds, forward and for two gradients, but for the clips'; recomputed blocks run forward twice.
    network = plan.network
    passes = wide.flops / (2 * network.multiply_adds * 2 * plan.clips_per_gpu)
    expected = 3 + plan.spec.execution.recompute - network.layers[0].multiply_adds / network.multiply_adds
    assert passes == pytest.approx(expected, rel=0.01)
    if torch.__version__.startswith("2.13."):  # others may split operations otherwise
        work = [number for lap in (wide, narrow) for number in (lap.launches, lap.moved / 1e9)]
        found = [*work, *(size / 1e9 for size in memory)]
        assert found == pytest.approx([float(cell.replace(",", "")) for cell in row.split("|")], rel=0.01)


@pytest.mark.parametrize("name", ["i3d_3x3x3_r50_16f", *(pytest.param(one, marks=NIGHTLY) for one in RECOMPUTED)])
def test_recomputed_blocks_have_the_planned_memory(name: str) -> None:
    plan, _, narrow = _laps(name, f"{SYNCHRONOUS} execution.recompute=true")
    assert narrow.peak == pytest.approx(plan.memory_bytes_per_rank, rel=TOLERANCE)


@pytest.mark.parametrize("name", SOLVERS)
def test_no_step_of_a_solver_waits_for_a_gpu(name: str) -> None:
    _, wide, narrow = _laps("tsm_r50_8f", f"model.backbone=resnet18 {SYNCHRONOUS} {SOLVERS[name]} precision=bf16")
    assert +wide.of_host == +narrow.of_host == COPIES
    assert set(narrow.products) == {torch.bfloat16}


def test_casts_are_those_of_cudas_autocast() -> None:
    with Seen() as seen, torch.autocast("meta", torch.float16):
        x, weight = torch.ones(2, 4, device=META), torch.ones(4, 4, device=META, requires_grad=True)
        product = functional.linear(x, weight)
        kept = functional.layer_norm(product, (4,))
        weights = torch.softmax(product, -1)
        assert set(seen.lap().products) == {torch.float16}
        with torch.autocast("meta", enabled=False):
            functional.linear(x, weight)
        assert set(seen.lap().products) == {torch.float32}
        (gradient,) = torch.autograd.grad(weights.sum(), weight)
    types = (product.dtype, kept.dtype, weights.dtype, gradient.dtype)
    assert types == (torch.float16, torch.float32, torch.float32, torch.float32)
