"""bench/operators.py, decoders.py and shift.py: what is measured on this CPU, worked out by hand, and the figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from summit_train.bench.measure import Context
from summit_train.bench.steps import experiment_of
from summit_train.core.comm import World
from summit_train.data.video.encode import write_video
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from tests.worlds import bench_script

operators = bench_script("operators")
NORMALISATION, CONVOLUTIONS = "normalisation, with sum and relu", operators.CONVOLUTIONS
COPY = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", CONVOLUTIONS),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_nhwc_align8>", CONVOLUTIONS),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", CONVOLUTIONS),
        ("mkldnn_convolution_backward", CONVOLUTIONS),
        (COPY, "copies, fills and the shift"),
        ("Memcpy HtoD (Pinned -> Device)", "copies, fills and the shift"),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel<...>", NORMALISATION),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", NORMALISATION),
        ("void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar>", NORMALISATION),
        ("void at::native::unrolled_elementwise_kernel<bfloat16_copy_kernel_cuda(at::TensorIterator)>", "casts"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise and sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer and gradient norm"),
        ("void at::native::max_pool_forward_nhwc<BFloat16>", "pooling"),
        ("void (anonymous)::nll_loss_forward_reduce_cuda_kernel_2d<float>", "loss"),
        ("somebody_elses_kernel", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert operators.group_of(name) == group


def test_a_gpu_is_busy_in_the_union_of_what_ran() -> None:
    spans = [("conv", 0, 40), ("Memcpy HtoD", 30, 50), ("copy", 35, 38), ("conv", 70, 80)]  # streams overlap
    events = [FunctionEvent(i, name, 0, *span, device_type=DeviceType.CUDA) for i, (name, *span) in enumerate(spans)]
    events += [FunctionEvent(8, "aten::conv2d", 0, 0, 300)]
    events += [FunctionEvent(9, "Optimizer.step", 0, 0, 300, device_type=DeviceType.CUDA, is_user_annotation=True)]
    seconds, busy = operators.of_kernels(reversed(events), 2)
    assert seconds == pytest.approx({"conv": 25e-6, "Memcpy HtoD": 10e-6, "copy": 1.5e-6})
    assert busy == pytest.approx(30e-6)


def test_a_step_on_a_cpu_is_profiled() -> None:
    keys = ["scale.gpus=1", "scale.clips_per_gpu=2", "model.width=0.125", "data.crop=32"]
    experiment = experiment_of(load_spec(shipped("configs/motion") / "tsm.yaml", keys), 1, synthetic=True)
    seconds, busy = operators.profiled(experiment, 1, Context(World(), torch.device("cpu"), print))
    assert {CONVOLUTIONS, "optimizer and gradient norm", "pooling"} <= set(map(operators.group_of, seconds))
    assert 0 < sum(seconds.values()) < 10 and busy is None


def test_shares_and_the_limit_by_convolutions_are_worked_out_and_drawn(tmp_path: Path) -> None:
    mfu = {"median": 0.5}
    step = {"step_s": {"median": 2.0}, "multiply_adds_per_step": 10**9, "mfu": mfu, "name": "x", "frames": 8}
    step |= {"clips_per_gpu": 2, "height": 32, "width": 32, "precision": "fp32"}
    machine = {"hosts": {"h": 1}, "ranks": 1, "processor": "p", "cores": 2, "device": "cpu", "threads_per_rank": 1}
    measured = {"environment": machine | {"torch": "2"}, "specs": [step], "peaks": [{"multiply_adds_per_second": 1e9}]}
    values = operators.with_utilisation(measured, {"conv2d": 1.0, "wgrad": 0.25, "aten::relu": 0.75}, 1.8)
    assert values["groups"] == {CONVOLUTIONS: 1.25, NORMALISATION: 0.75} and values["profiled_s"] == 2
    assert list(values["top"]) == ["conv2d", "aten::relu", "wgrad"]
    text = operators.as_text(values)
    assert "utilisation: 50.0 %; if all but convolutions and products took no time: 80.0 %" in text
    assert "1.2500 s   62.5 %" in text and "the GPU is busy in 90.0 % of a step" in text
    assert "busy" not in operators.as_text(values | {"busy_s": None})
    operators.draw(tmp_path / "x.png", values)
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_decoders_give_the_same_frames_and_stand_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "grey.mp4")
    frames = np.broadcast_to(np.arange(60, dtype=np.uint8)[:, None, None, None] * 3 + 30, (60, 48, 64, 3))
    write_video(path, np.ascontiguousarray(frames))
    bench = bench_script("decoders")
    wanted = range(2, 59, 8)
    for read in (bench.with_summit_train, bench.with_pyav):
        found = read((path, 60, (341, 256)), wanted)
        assert found.shape == (8, 224, 224, 3)
        assert np.abs(found.mean((1, 2, 3)) - frames[list(wanted), 0, 0, 0]).max() < 1.5
    monkeypatch.setattr("sys.argv", ["decoders.py", "--repeats", "1", path])
    bench.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[0] == "summit_train" and rows[1].split()[-1] == "1.00" and rows[-1].startswith("PyAV")


def test_the_shift_bench_measures_networks_that_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "shift.py --backbone resnet18 --width 0.25 --batch 1 --frames 4 --size 32 --repeats 1 --json"
    monkeypatch.setattr("sys.argv", words.split())
    assert bench_script("shift").main() == 0
    for result in json.loads(capsys.readouterr().out)["results"].values():
        assert result["logits_differ"] < 1e-5
        for part in ("forward", "step"):
            seconds = {name: times["median"] for name, times in result[part]["seconds"].items()}
            assert set(seconds) == {"2d", "2d plain", "tsm", "tsm +norms", "tsm +shift", "tsm plain", "official"}
            for pair, ratio in result[part]["ratios"].items():
                above, below = pair.split(" / ")
                assert ratio["median"] == pytest.approx(seconds[above] / seconds[below])
