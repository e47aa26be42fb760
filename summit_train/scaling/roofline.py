"""The least time of a training step on one GPU by its data sheet, and how close published steps came to theirs.

An operation takes the longer of FLOPs / peak and bytes / bandwidth, and a launch `LAUNCH_S` on top. Bytes are those of
its inputs and outputs, as if no cache kept them. In 16 bits the passes move half of the bytes of fp32; what autocast
converts or keeps in fp32 is not counted. The host is assumed to be faster than the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from summit_train.core.count import Operation
from summit_train.core.errors import UserError
from summit_train.counts import kept
from summit_train.spec import Spec, load_spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import shipped

LAUNCH_S = 1e-6  # assumed: from the end of a kernel to the start of the next one in its stream


@dataclass(frozen=True)
class Device:
    """A GPU's data sheet: dense FLOP/s in fp32 and in 16 bits (half), and the bytes per second of its memory."""

    title: str
    fp32: float
    half: float
    bytes_per_second: float
    has_bf16: bool = True


# A100 and H100 compute fp32 convolutions in TF32, torch's default; their matrix products, in real fp32, are slower.
DEVICES = {
    "v100": Device("V100 (SXM2)", 15.7e12, 125e12, 900e9, has_bf16=False),
    "a100": Device("A100 (80 GB)", 156e12, 312e12, 2039e9),
    "h100": Device("H100 (SXM5)", 494e12, 989e12, 3350e9),
}
_RESNET = ("tsn_r50_8f", "ResNet-50", 256, "data.num_frames=1", "model.num_classes=1000")
# GPU and precision -> spec, network, clips a step, overrides; clips or images a second of one GPU; source.
# mmaction2's: of 8 GPUs, with loader and allreduce; it names no precision, its configs have fp32. MLPerf's: with MXNet.
PUBLISHED: tuple[tuple[str, str, tuple[Any, ...], float, str], ...] = (
    ("v100", "fp32", ("tsm_r50_8f", "TSM", 8), 8 / 0.31, "mmaction2"),
    ("v100", "fp32", ("i3d_3x1x1_r50_32f", "I3D, 32 frames", 8), 8 / 0.43, "mmaction2"),
    ("v100", "fp32", ("slowfast_r50_4x16", "SlowFast 4x16", 8), 8 / 0.69, "mmaction2"),
    ("v100", "fp32", ("tsn_r50_8f", "TSN, 3 frames", 32, "data.num_frames=3"), 32 / 0.32, "mmaction2"),
    ("v100", "fp32", _RESNET, 367, "NVIDIA"),
    ("v100", "fp16", _RESNET, 1200, "NVIDIA"),
    ("a100", "fp32", _RESNET, 938, "NVIDIA"),
    ("a100", "fp16", _RESNET, 2470, "NVIDIA"),
    ("h100", "fp16", _RESNET, 56050 / 8, "MLPerf"),
)
SOURCES = (
    "mmaction2 0.24.1, docs/benchmark.md; NVIDIA/DeepLearningExamples, resnet50v1.5;",
    "MLPerf Training 3.0, NVIDIA, dgxh100_ngc23.04_mxnet",
)


def roofline(spec: Spec, device: Device) -> dict[str, Any]:
    """Return the work and the least seconds of one virtual GPU's step. flops_s: the seconds of its FLOPs at the peak.

    Raises UserError where the GPU has no peak for the spec's precision, or the step cannot be counted.
    """
    if spec.precision == "fp64" or (spec.precision == "bf16" and not device.has_bf16):
        right = "fp32 or fp16" + ", or bf16" * device.has_bf16
        raise UserError(f"precision must be {right} on {device.title}, got {spec.precision}")
    if spec.task != "classification" or spec.parallel.method != "synchronous" or is_foreign(spec.model.arch):
        raise UserError("--device counts synchronous steps of the shipped classifiers alone; try --machine")

    def count() -> list[tuple[Operation, int]]:
        from summit_train.training.operations import count_step

        return count_step(spec)

    keys = [spec.data.clip_shape, spec.scale.clips_per_gpu, spec.execution.recompute]
    own = spec.model_dump(mode="json", include={"optimizer": True, "ema": True, "data": {"mix"}})
    operations = kept(spec.model, [*keys, own], count, list[tuple[Operation, int]])
    peak, divisor = (device.fp32, 1) if spec.precision == "fp32" else (device.half, 2)
    launches = flops = moved = seconds = 0.0
    for one, number in operations:
        num_bytes = one.moved / (divisor if one.of_pass else 1)
        launches, flops, moved = (
            launches + number * one.launches,
            flops + number * one.flops,
            moved + number * num_bytes,
        )
        seconds += number * (max(one.flops / peak, num_bytes / device.bytes_per_second) + LAUNCH_S * one.launches)
    work = {"launches": int(launches), "flops": int(flops), "moved": int(moved)}
    return {"clips": spec.scale.clips_per_gpu, **work, "roofline_s": seconds, "flops_s": flops / peak}


def published_steps(name: str) -> list[dict[str, Any]]:
    """Return the published steps on a GPU, each beside its roofline."""
    rows = []
    for device, precision, (spec, label, clips, *words), rate, source in PUBLISHED:
        if device == name:
            words = [*words, f"scale.clips_per_gpu={clips}", f"precision={precision}"]
            bound = roofline(load_spec(shipped("configs/kinetics") / f"{spec}.yaml", words), DEVICES[name])
            known = {"label": f"{label}, {source}", "precision": precision, "step_s": clips / rate}
            rows.append(bound | known | {"ratio": clips / rate / bound["roofline_s"]})
    return rows
