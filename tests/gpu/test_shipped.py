"""Steps of shipped specs: none waits for the GPU, and their memory is the plan's, within 15 % both ways.

Under torch.cuda.set_sync_debug_mode("error") PyTorch raises where the host would wait: item(), a copy that is not
asynchronous, nonzero(). Those specs are made small, with noise measurement, an average of the weights, a clipped
gradient and two virtual GPUs. Two steps come before what is measured, as the first ones allocate and choose algorithms.

The peak is that of the tensors; the caching allocator and the driver hold more. Autograd keeps what autograd holds
between the passes, which the plan estimates too; a CPU can check only this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from summit_train.core.comm import World
from summit_train.models.network import initial_network
from summit_train.models.precision import AUTOCAST
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training.build import build_step
from tests.gpu.devices import batches_of, on_devices
from tests.held import held_bytes
from tests.worlds import take_step

COMMON = "model.num_classes=16 data.short_side=[64,64] data.crop=64 scale.gpus=2 scale.clips_per_gpu=2 model.width=0.5"
SMALL = "model.width=0.125 data.crop=32 data.short_side=[32,32] precision=fp32"  # fp16 takes a CPU minutes
SYNCHRONOUS = "noise_scale.every_steps=1 ema.decay=0.9 optimizer.clip_norm=1.0"
AVERAGING = "parallel.method=averaging parallel.period=1"
OTHER_SOLVER = "optimizer.momentum=null optimizer.name"
FP16 = "precision=fp16"
# name -> spec below configs/kinetics, overrides
WITHOUT_WAITS = {
    **{f"tsm, sgd, {p}": ("tsm_r50_8f", f"{SYNCHRONOUS} precision={p}") for p in ("fp16", "bf16", "fp32")},
    **{
        f"tsm, {solver}, fp16": ("tsm_r50_8f", f"{SYNCHRONOUS} {OTHER_SOLVER}={solver} {FP16}")
        for solver in ("rmsprop", "adagrad", "adam", "lamb")
    },
    **{
        f"tsm, {kind}, fp16": ("tsm_r50_8f", f"{SYNCHRONOUS} optimizer.trust_ratio.kind={kind} {FP16}")
        for kind in ("lars", "bounded")
    },
    "tsm, recomputed": ("tsm_r50_8f", f"{SYNCHRONOUS} {FP16} model.dropout=0.5 execution.recompute=true"),
    "averaging, sgd, fp16": ("tsm_r50_8f", f"{AVERAGING} {FP16}"),
    "averaging, adam, bf16": ("tsm_r50_8f", f"{AVERAGING} {OTHER_SOLVER}=adam precision=bf16"),
    "averaging, lamb, fp16": ("tsm_r50_8f", f"{AVERAGING} {OTHER_SOLVER}=lamb {FP16}"),
    "tsn": ("tsn_r50_8f", f"{SYNCHRONOUS} {FP16}"),
    "tsm non-local": ("tsm_nl_r50_8f", f"{SYNCHRONOUS} precision=bf16"),
    "tsm mobilenet_v2": ("tsm_mobilenet_v2_8f", f"{SYNCHRONOUS} {FP16}"),
    "i3d_3x3x3": ("i3d_3x3x3_r50_16f", f"{SYNCHRONOUS} {FP16}"),
    "slowfast": ("slowfast_r50_4x16", f"{SYNCHRONOUS} precision=bf16"),
}

TOLERANCE = 0.15
# name -> spec below configs/kinetics, overrides
PLANNED = {
    "tsm, fp32": ("tsm_r50_8f", "precision=fp32"),
    "tsm, fp16": ("tsm_r50_8f", "precision=fp16"),
    "tsm, bf16": ("tsm_r50_8f", "precision=bf16"),
    "tsn, fp32": ("tsn_r50_8f", "precision=fp32"),
    "i3d_3x3x3, fp32": ("i3d_3x3x3_r50_16f", "precision=fp32"),
    "tsm mobilenet_v2, fp32": ("tsm_mobilenet_v2_8f", "precision=fp32"),
    "tsm, fp32, recomputed blocks": ("tsm_r50_8f", "precision=fp32 execution.recompute=true"),
    "tsm, bf16, recomputed blocks": ("tsm_r50_8f", "precision=bf16 execution.recompute=true"),
}
FULL_SIZE = "scale.gpus=1 scale.clips_per_gpu=8"
TINY = "scale.gpus=1 scale.clips_per_gpu=2 data.crop=64 data.short_side=[64,64] model.width=0.125"


@contextmanager
def waits_forbidden(device: torch.device) -> Iterator[None]:
    """Let PyTorch raise RuntimeError within the block where the host would wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_is_noticed() -> None:
    number = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), waits_forbidden(number.device):
        number.item()


@pytest.mark.parametrize(("name", "device"), on_devices(WITHOUT_WAITS, ["tsm, lars, fp16", "averaging, sgd, fp16"]))
def test_no_step_waits_for_the_gpu(name: str, device: torch.device) -> None:
    file, words = WITHOUT_WAITS[name]
    small = SMALL if device.type == "cpu" else ""
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", f"{COMMON} {words} {small}".split())
    plan = make_plan(spec, 1, 4 * spec.scale.clips_per_gpu)
    step = build_step(spec, plan, World(), initial_network(spec, device), device)
    batches = batches_of(spec, 0, range(2))
    results = [take_step(step, batches, 0.001) for _ in range(2)]
    with waits_forbidden(device):
        results += [take_step(step, batches, 0.001) for _ in range(2)]
    assert not any(result.read(plan.global_batch, plan.virtual_gpus, 1).broken for result in results)


def assert_estimated(what: str, found: float, estimated: float) -> None:
    message = f"{what}: {found / 1e6:,.0f} MB, estimated {estimated / 1e6:,.0f} MB"
    assert found == pytest.approx(estimated, rel=TOLERANCE), message


@pytest.mark.parametrize(("name", "device"), on_devices(PLANNED, ["tsm, fp32"]))
def test_a_steps_memory_is_estimated(name: str, device: torch.device) -> None:
    file, overrides = PLANNED[name]
    path = shipped("configs/kinetics") / f"{file}.yaml"
    words = [*(TINY if device.type == "cpu" else FULL_SIZE).split(), *overrides.split()]
    # Of a step alone: the plan's estimate is that of the final evaluation where its views need more.
    spec = load_spec(path, [*words, "evaluate.short_side=32"])
    plan = make_plan(spec, 1, spec.scale.clips_per_gpu)
    state = (2 + spec.optimizer.states) * plan.network.parameters * spec.weight_bytes
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = initial_network(spec, device)
    step, batches = build_step(spec, plan, World(), model, device), batches_of(spec, 0, [0])
    if device.type == "cuda":
        for number in range(4):
            if number == 2:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            take_step(step, batches, 0.0).read(plan.global_batch, 1, 1)
        peak = torch.cuda.max_memory_allocated(device) - before
        assert_estimated("peak of a step", peak, plan.memory_bytes_per_rank)
    if "recomputed" not in name:  # the hooks of recomputed blocks come before those that count
        with held_bytes(model.parameters()) as held:
            take_step(step, batches, 0.0).read(plan.global_batch, 1, 1)
        kept = max(held)
        # Autocast's copies of the weights, which autograd keeps too. At full size they are 2 % of a step's memory.
        kept -= 2 * plan.network.parameters if spec.precision in AUTOCAST else 0
        assert_estimated("what autograd keeps", kept, plan.memory_bytes_per_rank - state)
