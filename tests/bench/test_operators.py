"""bench/operators.py: names to groups; shares, busy time and copies of a trace worked out by hand; one real profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summit_train.spec.source import shipped
from tests.worlds import bench_script

operators = bench_script("operators")

CONV = "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc"
SHIFT = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>"
CLIPS = "Memcpy HtoD (Pinned -> Device)"


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


# Two steps of 100 us: a copy of 10 before each, of which the second is hidden under a convolution for 6.
TRACE = [
    event(CLIPS, 0, 10, cat="gpu_memcpy"),
    event(CONV, 10, 60),
    event(SHIFT, 80, 20),
    event(CLIPS, 114, 10, cat="gpu_memcpy"),
    event(CONV, 100, 20),
    event("Optimizer.step#SGD.step", 0, 200, cat="gpu_user_annotation"),
    event("aten::conv2d", 0, 200, cat="cpu_op"),
    {"ph": "M", "name": "process_name"},
]


NORMALISATION, CONVOLUTIONS = "normalisation, with sum and relu", operators.CONVOLUTIONS


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (CONV, CONVOLUTIONS),
        (SHIFT, "copies, fills and the shift"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_nhwc_align8>", CONVOLUTIONS),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", CONVOLUTIONS),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel<...>", NORMALISATION),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", NORMALISATION),
        ("void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar>", NORMALISATION),
        ("void at::native::unrolled_elementwise_kernel<bfloat16_copy_kernel_cuda(at::TensorIterator)>", "casts"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise and sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer and gradient norm"),
        ("void at::native::max_pool_forward_nhwc<BFloat16>", "pooling"),
        ("void (anonymous)::nll_loss_forward_reduce_cuda_kernel_2d<float>", "loss"),
        ("mkldnn_convolution_backward", CONVOLUTIONS),
        ("somebody_elses_kernel", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert operators.group_of(name) == group


def test_shares_busy_time_and_copies_are_those_of_the_trace() -> None:
    spans = operators.spans_of(TRACE)
    assert len(spans) == 5  # neither annotations nor the host's operators
    values = operators.of_kernels(spans, steps=2)
    assert values["groups"] == pytest.approx({CONVOLUTIONS: 40e-6, "copies, fills and the shift": 20e-6})
    assert next(iter(values["top"])) == CONV and set(values["top"]) == {CONV, SHIFT, CLIPS} and values["pinned"]
    assert values["busy_s"] == pytest.approx(57e-6)
    assert values["copies_s"] == pytest.approx(10e-6) and values["bare_copies_s"] == pytest.approx(7e-6)
    slow = [event("Memcpy HtoD (Pageable -> Device)", 0, 200, cat="gpu_memcpy")]
    assert not operators.of_kernels(operators.spans_of(slow), steps=1)["pinned"]


def test_a_step_on_a_cpu_is_profiled_and_drawn(tmp_path: Path) -> None:
    spec = str(shipped("configs/motion") / "tsm.yaml")
    values = operators.profiled([spec, "scale.gpus=1", "scale.clips_per_gpu=2", "model.width=0.125", "data.crop=32"], 1)
    assert {CONVOLUTIONS, "optimizer and gradient norm", "pooling"} <= set(values["groups"])
    seconds = sum(values["groups"].values())
    rate = {"median": 0.5, "min": 0.4, "max": 0.6}
    step = {"step_s": {"median": seconds}, "multiply_adds_per_step": 10**9, "mfu": rate, "name": "x", "frames": 8}
    step |= {"clips_per_gpu": 2, "crop": 32, "precision": "fp32"}
    machine = {"hosts": {"h": 1}, "ranks": 1, "processor": "p", "cores": 2, "device": "cpu", "threads_per_rank": 1}
    bench = {"environment": machine | {"torch": "2"}, "specs": [step], "peaks": [{"multiply_adds_per_second": 1e9}]}
    values = operators.with_utilisation(values, bench)
    assert values["utilisation_of_convolutions_alone"] == pytest.approx(1 / values["groups"][CONVOLUTIONS])
    assert "utilisation: 50.0 %; if all but" in operators.as_text(values)
    operators.draw(tmp_path / "x.png", values)
    assert (tmp_path / "x.png").stat().st_size > 10_000
