"""No step waits for the GPU: steps of training under torch.cuda.set_sync_debug_mode("error").

In that mode PyTorch raises where the host would wait: item(), a copy that is not asynchronous, nonzero(). Every case is
a shipped spec made small, with noise measurement, an average of the weights, a clipped gradient and two virtual GPUs.
Two steps come before, as the first ones allocate and choose algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from summit_train.core.comm import World
from summit_train.models.network import initial_network
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training.build import build_step
from tests.gpu.devices import batches_of, on_devices
from tests.worlds import take_step

COMMON = "model.num_classes=16 data.short_side=[64,64] data.crop=64 scale.gpus=2 scale.clips_per_gpu=2 model.width=0.5"
SMALL = "model.width=0.125 data.crop=32 data.short_side=[32,32] precision=fp32"  # fp16 takes a CPU minutes
SYNCHRONOUS = "noise_scale.every_steps=1 ema.decay=0.9 optimizer.clip_norm=1.0"
AVERAGING = "parallel.method=averaging parallel.period=1"
OTHER_SOLVER = "optimizer.momentum=null optimizer.name"
FP16 = "precision=fp16"
# name -> spec below configs/kinetics, overrides
CASES = {
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


@pytest.mark.parametrize(("name", "device"), on_devices(CASES, ["tsm, lars, fp16", "averaging, sgd, fp16"]))
def test_no_step_waits_for_the_gpu(name: str, device: torch.device) -> None:
    file, words = CASES[name]
    small = SMALL if device.type == "cpu" else ""
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", f"{COMMON} {words} {small}".split())
    plan = make_plan(spec, 1, 4 * spec.scale.clips_per_gpu)
    step = build_step(spec, plan, World(), initial_network(spec, device), device)
    batches = batches_of(spec, 0, range(2))
    results = [take_step(step, batches, 0.001) for _ in range(2)]
    with waits_forbidden(device):
        results += [take_step(step, batches, 0.001) for _ in range(2)]
    assert not any(result.read(plan.global_batch, plan.virtual_gpus, 1).broken for result in results)
