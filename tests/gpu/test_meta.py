"""Whole training steps without a GPU: every shipped network and solver at its full size on torch's meta device.

The step is the GPU's: its modules, its fused optimizer, its foreach operations. Tensors have shapes and no numbers, so
what makes the host wait for one (item(), nonzero()) raises, and so does a shape that depends on numbers. Every
operation is seen: nothing but the clips and their labels may come from the host.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from summit_train.core.comm import World
from summit_train.models.network import initial_network
from summit_train.models.video import KeyedModule
from summit_train.plan import Plan, make_plan
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training.run import build_step
from tests.gpu.devices import batches_of
from tests.gpu.test_memory import TOLERANCE
from tests.gpu.test_syncs import OTHER_SOLVER, SYNCHRONOUS

META = torch.device("meta")
# Without erasing, whose generator is the device's own.
SIZE = "scale.gpus=2 scale.clips_per_gpu=4 model.num_classes=400 precision=fp32 data.erase=0"
# Of the shipped specs, those whose network, training or solver is like no other's.
NETWORKS = (
    "eco_lite_16f", "i3d_3x1x1_nl_r50_32f", "i3d_3x3x3_r50_16f", "ir_csn_152_32f", "slowfast_r50_4x16",
    "tsm_mobilenet_v2_8f", "tsm_nl_r50_8f", "tsm_online_r50_8f", "tsm_r50_16f_recipe", "tsm_r50_8f_1536gpu_date",
    "tsm_r50_8f_1536gpu_lars", "tsm_resnext101_8f", "tsn_r50_8f", "vit_b_16f", "x3d_m",
)  # fmt: skip
SOLVERS = {
    **{name: f"{OTHER_SOLVER}={name}" for name in ("rmsprop", "adagrad", "adam", "adamw", "lamb")},
    **{kind: f"optimizer.trust_ratio.kind={kind}" for kind in ("lars", "bounded")},
}
FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
# What moves a batch to the device: the clips and the labels of each virtual GPU.
COPIES = {"aten::_to_copy": 2 * 2}


class Seen(TorchDispatchMode):
    """Counts operations by name, those that take or return a tensor of the host, and the bytes on the device.

    peak: the most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.of_host = Counter[str](), Counter[str]()
        self.peak, self._now, self._alive = 0, 0, dict[int, int]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        self.operations[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.of_host[name] += any(tensor.device != META for tensor in tensors)
        for tensor in tensors:
            if tensor.device == META:
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._alive:
            self._alive[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._now -= self._alive.pop(key)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch take its foreach and fused kernels for the meta device, which has shapes for all of them but these."""
    for module in (sys.modules["torch.utils._foreach_utils"], sys.modules["torch.optim.optimizer"]):
        for kind in ("foreach", "fused"):
            name = f"_get_{kind}_kernels_supported_devices"
            monkeypatch.setattr(module, name, lambda: ["meta"], raising=False)
    monkeypatch.setattr(KeyedModule, "generator_on", lambda module, device: torch.Generator())
    library = torch.library.Library("aten", "IMPL")
    for name in FUSED:
        library.impl(name, lambda *args, **kwargs: None, "Meta")
    yield
    library._destroy()


def _steps(name: str, words: str) -> tuple[Plan, Seen, Seen]:
    """The plan of two steps, what was seen from the network's first weight on, and in the second step alone."""
    spec = load_spec(shipped("configs/kinetics") / f"{name}.yaml", [*SIZE.split(), *words.split()])
    plan = make_plan(spec, 1, spec.scale.clips_per_gpu * 4)
    first, last = (batches_of(spec, number, range(2)) for number in range(2))
    with Seen() as both:
        step = build_step(spec, plan, World(), initial_network(spec, META), META)
        step(first, 0.001)
        with Seen() as second:
            step(last, 0.001)
    return plan, both, second


def test_a_wait_for_a_number_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones((), device=META).item()
    with pytest.raises(NotImplementedError):
        torch.ones(3, device=META).nonzero()
    with Seen() as seen:
        torch.ones(2).to(META).add(1)
    assert +seen.of_host == Counter(["aten::ones", "aten::_to_copy"])


@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_of_a_network_waits_for_a_gpu_and_its_memory_is_estimated(name: str) -> None:
    plan, both, second = _steps(name, SYNCHRONOUS)
    assert +second.of_host == COPIES
    assert any(second.operations[f"aten::{fused}"] for fused in FUSED)
    assert both.peak == pytest.approx(plan.memory_bytes_per_rank, rel=TOLERANCE)


@pytest.mark.parametrize("name", SOLVERS)
def test_no_step_of_a_solver_waits_for_a_gpu(name: str) -> None:
    assert +_steps("tsm_r50_8f", f"{SYNCHRONOUS} {SOLVERS[name]}")[2].of_host == COPIES
