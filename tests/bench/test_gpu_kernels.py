"""bench/gpu/kernels.py: names to groups, shares, busy time and copies of a trace worked out by hand; a rehearsal."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from tests.worlds import bench_script

outcome, _, subjects, kernels = (bench_script(f"gpu/{name}") for name in ("outcome", "rows", "subjects", "kernels"))

CONV = "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc"
SHIFT = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>"
CLIPS = "Memcpy HtoD (Pinned -> Device)"


def event(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    """One event of a trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": stream, "args": {"stream": stream}}


# Two steps of 100 us: a copy of 10 before each, of which the second is hidden under a convolution for 6.
TRACE = [
    event(CLIPS, 0, 10, cat="gpu_memcpy"),
    event(CONV, 10, 60),
    event(SHIFT, 80, 20),
    event(CLIPS, 114, 10, stream=9, cat="gpu_memcpy"),
    event(CONV, 100, 20),
    event("Optimizer.step#SGD.step", 0, 200, cat="gpu_user_annotation"),
    event("aten::conv2d", 0, 200, cat="cpu_op"),
    {"ph": "M", "name": "process_name"},
]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (CONV, "convolution"),
        (SHIFT, "shift, copies and fills"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_nhwc_align8>", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "convolution"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix product"),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel<...>", "normalisation"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "normalisation"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<BFloat16>>", "shift, copies and fills"),
        ("void at::native::unrolled_elementwise_kernel<bfloat16_copy_kernel_cuda(at::TensorIterator)>", "casts"),
        ("void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar>", "elementwise and sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer and gradient norm"),
        ("void at::native::max_pool_forward_nhwc<BFloat16>", "pooling"),
        ("void (anonymous)::nll_loss_forward_reduce_cuda_kernel_2d<float>", "loss"),
        ("somebody_elses_kernel", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert kernels.group_of(name) == group


def test_shares_busy_time_and_copies_are_those_of_the_trace() -> None:
    found = kernels.kernels_of(TRACE, "cuda")
    assert len(found) == 5  # neither annotations nor the host's operators
    values = kernels.summary(found, step_s=100e-6, steps=2)
    shares = {group["group"]: group["share"] for group in values["groups"]}
    assert shares == pytest.approx({"convolution": 80 / 120, "shift, copies and fills": 40 / 120})
    assert values["top"][0]["name"] == CONV and values["top"][0]["calls"] == 1
    assert values["top"][0]["seconds"] == pytest.approx(40e-6)
    assert values["busy"] == pytest.approx(114 / 200) and values["busy_when_profiled"] == pytest.approx(114 / 124)
    copies = values["copies"]
    assert copies["share"] == pytest.approx(0.1) and copies["exposed_share"] == pytest.approx(0.07)
    assert copies["overlapped"] == pytest.approx(0.3) and copies["streams"] == [7, 9]


def test_the_checks_can_fail() -> None:
    values = kernels.summary(kernels.kernels_of(TRACE, "cuda"), step_s=100e-6, steps=2) | {"skipped": {}}
    other, pinned, busy, exposed = kernels.checks_of(values)
    assert other.passes and pinned.passes and not busy.passes and not exposed.passes
    assert not pinned.wanted and other.wanted and busy.wanted and exposed.wanted
    pageable = [e | {"name": str(e["name"]).replace("Pinned", "Pageable")} for e in TRACE]
    pageable += [event("unknown", 300, 30)]
    values = kernels.summary(kernels.kernels_of(pageable, "cuda"), step_s=100e-6, steps=2) | {"skipped": {}}
    other, pinned, *_ = kernels.checks_of(values)
    assert not other.passes and not pinned.passes


def test_an_operator_has_its_own_time() -> None:
    nested = [event("aten::conv2d", 0, 10, 1, "cpu_op"), event("aten::empty", 2, 3, 1, "cpu_op")]
    nested += [event("aten::copy_", 6, 2, 1, "cpu_op"), event("aten::add", 10, 5, 1, "cpu_op")]
    nested += [event("aten::mul", 1, 7, 2, "cpu_op")]
    own = {k.name: k.end - k.begin for k in kernels.kernels_of(nested, "cpu")}
    assert own == {"aten::conv2d": 5, "aten::empty": 3, "aten::copy_": 2, "aten::add": 5, "aten::mul": 7}


def test_the_part_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "WARM_UP", 1)
    monkeypatch.setattr(kernels, "STEPS", 1)
    found = outcome.Outcome()
    kernels.part(argparse.Namespace(small=True), torch.device("cpu"), found)
    assert found.passes and "kernels" in found.values["skipped"]
    assert sum(group["share"] for group in found.values["groups"]) == pytest.approx(1)
    shares = {group["group"]: group["share"] for group in found.values["groups"]}
    assert {"convolution", "optimizer and gradient norm", "pooling"} <= set(shares)
