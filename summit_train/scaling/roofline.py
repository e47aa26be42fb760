"""The least time of a training step on one GPU by its data sheet, and how close published steps came to theirs.

An operation takes the longer of FLOPs / peak and bytes / bandwidth, and a launch `LAUNCH_S` on top. Bytes are those of
its inputs and outputs, as if no cache kept them. In 16 bits the passes move half of the bytes of fp32; what autocast
converts is not counted. The host is assumed to be faster than the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from summit_train.core.count import Operation
from summit_train.core.errors import UserError
from summit_train.counts import count_network, kept
from summit_train.spec import Spec, load_spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import shipped

LAUNCH_S = 1e-6  # assumed: from the end of a kernel to the start of the next one in its stream


@dataclass(frozen=True)
class Device:
    """A GPU's data sheet: dense FLOP/s by precision, and of convolutions in fp32; bytes per second of its memory."""

    title: str
    peaks: dict[str, float]
    convolutions: float  # TF32 where there is, torch's default; matrix products stay in fp32
    bytes_per_second: float


DEVICES = {
    "v100": Device("V100 (SXM2)", {"fp32": 15.7e12, "fp16": 125e12}, 15.7e12, 900e9),
    "a100": Device("A100 (80 GB)", {"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 156e12, 2039e9),
    "h100": Device("H100 (SXM5)", {"fp32": 67e12, "fp16": 989e12, "bf16": 989e12}, 494e12, 3350e9),
}
_MMACTION2, _NVIDIA = "mmaction2 0.24.1, docs/benchmark.md", "NVIDIA, DeepLearningExamples, resnet50v1.5"
_MLPERF = "MLPerf, Training 3.0, NVIDIA, dgxh100_ngc23.04_mxnet"
_IMAGES = (256, "tsn_r50_8f", ("data.num_frames=1", "model.num_classes=1000"))  # others published other batches
# GPU, precision, network, source; clips or images a second of one GPU; its step here: clips, spec, overrides.
# mmaction2's: of 8 GPUs, with loader and allreduce; it names no precision, its configs have fp32. MLPerf's: with MXNet.
PUBLISHED: tuple[tuple[str, str, str, str, float, int, str, tuple[str, ...]], ...] = (
    ("v100", "fp32", "TSM", _MMACTION2, 8 / 0.31, 8, "tsm_r50_8f", ()),
    ("v100", "fp32", "I3D, 32 frames", _MMACTION2, 8 / 0.43, 8, "i3d_3x1x1_r50_32f", ()),
    ("v100", "fp32", "SlowFast 4x16", _MMACTION2, 8 / 0.69, 8, "slowfast_r50_4x16", ()),
    ("v100", "fp32", "TSN, 3 frames", _MMACTION2, 32 / 0.32, 32, "tsn_r50_8f", ("data.num_frames=3",)),
    ("v100", "fp32", "ResNet-50", _NVIDIA, 367, *_IMAGES),
    ("v100", "fp16", "ResNet-50", _NVIDIA, 1200, *_IMAGES),
    ("a100", "fp32", "ResNet-50", _NVIDIA, 938, *_IMAGES),
    ("a100", "fp16", "ResNet-50", _NVIDIA, 2470, *_IMAGES),
    ("h100", "fp16", "ResNet-50", _MLPERF, 56050 / 8, *_IMAGES),
)


def roofline(spec: Spec, device: Device) -> dict[str, Any]:
    """Return the work of one virtual GPU's step, its least seconds, and flops_s, those by FLOPs. Raises UserError."""
    _check(spec, device)

    def count() -> list[tuple[Operation, int]]:
        from summit_train.training.operations import count_step

        return count_step(spec)

    keys = [spec.data.clip_shape, spec.scale.clips_per_gpu, spec.execution.recompute]
    own = spec.model_dump(mode="json", include={"optimizer", "ema"})
    operations = kept(spec.model, [*keys, own], count, list[tuple[Operation, int]])
    peak, in_fp32 = device.peaks[spec.precision], spec.precision == "fp32"
    launches = flops = moved = flops_s = seconds = 0.0
    for one, number in operations:
        num_bytes = one.moved / (2 if one.of_pass and not in_fp32 else 1)
        least_s = one.flops / (device.convolutions if in_fp32 and one.is_convolution else peak)
        launches += number * one.launches
        flops += number * one.flops
        moved += number * num_bytes
        flops_s += number * least_s
        seconds += number * (max(least_s, num_bytes / device.bytes_per_second) + LAUNCH_S * one.launches)
    work = {"launches": int(launches), "flops": int(flops), "moved": int(moved)}
    return {"clips": spec.scale.clips_per_gpu, **work, "roofline_s": seconds, "flops_s": flops_s}


def _check(spec: Spec, device: Device) -> None:
    arch = spec.model.arch
    for key, right, got in (
        ("task", "classification", spec.task),
        ("parallel.method", "synchronous", spec.parallel.method),
        ("model.arch", "a network that ships", arch if is_foreign(arch) else "a network that ships"),
        ("execution.compile", "false", str(spec.execution.compile).lower()),
    ):
        if got != right:
            raise UserError(f"{key} must be {right} with --device, got {got}; try --machine")
    right = "" if spec.precision in device.peaks else f"{' or '.join(device.peaks)} on {device.title}"
    if spec.precision != "fp32" and count_network(spec).wide_elements:
        right = f"fp32 for {arch}, as casts around what autocast keeps in fp32 are not counted"
    if right:
        raise UserError(f"precision must be {right}, got {spec.precision}; try precision=fp32")


def published_steps(name: str) -> list[dict[str, Any]]:
    """Return the published rates on a GPU, each with the roofline of a step. ratio: the roofline's rate to it."""
    rows = []
    for device, precision, label, source, rate, clips, spec, words in PUBLISHED:
        if device == name:
            words = (*words, f"scale.clips_per_gpu={clips}", f"precision={precision}")
            bound = roofline(load_spec(shipped("configs/kinetics") / f"{spec}.yaml", words), DEVICES[name])
            known = {"label": f"{label}, {source.partition(',')[0]}", "source": source, "precision": precision}
            rows.append(bound | known | {"published_rate": rate, "ratio": clips / rate / bound["roofline_s"]})
    return rows
