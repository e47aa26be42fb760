"""The memory of a training step against the plan's memory_bytes_per_rank, within 15 % both ways.

The peak is that of the tensors over steps after the first two; the caching allocator and the driver hold more. Autograd
keeps what autograd holds between the passes, which the plan estimates too; a CPU can check only this.
"""

from __future__ import annotations

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

TOLERANCE = 0.15
# name -> spec below configs/kinetics, overrides
CASES = {
    "tsm, fp32": ("tsm_r50_8f", "precision=fp32"),
    "tsm, fp16": ("tsm_r50_8f", "precision=fp16"),
    "tsm, bf16": ("tsm_r50_8f", "precision=bf16"),
    "tsn, fp32": ("tsn_r50_8f", "precision=fp32"),
    "i3d_3x3x3, fp32": ("i3d_3x3x3_r50_16f", "precision=fp32"),
    "tsm mobilenet_v2, fp32": ("tsm_mobilenet_v2_8f", "precision=fp32"),
    "tsm, fp32, recomputed blocks": ("tsm_r50_8f", "precision=fp32 execution.recompute=true"),
    "tsm, bf16, recomputed blocks": ("tsm_r50_8f", "precision=bf16 execution.recompute=true"),
}
LARGE = "scale.gpus=1 scale.clips_per_gpu=8"
SMALL = "scale.gpus=1 scale.clips_per_gpu=2 data.crop=64 data.short_side=[64,64] model.width=0.125"


def assert_estimated(what: str, found: float, estimated: float) -> None:
    message = f"{what}: {found / 1e6:,.0f} MB, estimated {estimated / 1e6:,.0f} MB"
    assert found == pytest.approx(estimated, rel=TOLERANCE), message


@pytest.mark.parametrize(("name", "device"), on_devices(CASES, ["tsm, fp32"]))
def test_a_steps_memory_is_estimated(name: str, device: torch.device) -> None:
    file, overrides = CASES[name]
    path = shipped("configs/kinetics") / f"{file}.yaml"
    words = [*(SMALL if device.type == "cpu" else LARGE).split(), *overrides.split()]
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
