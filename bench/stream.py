"""Memory and latency of `stream` over a long video, piped in from an encoder.

    python bench/stream.py [--frames 100000] [--size 64] [--json] [key=value ...]

An encoder process sends H.264 in Matroska to `summit-train stream RUN - --json --stride 1`, which is another process.
The network is a past-only TSM on a ResNet-18 of an eighth of its width, with random weights; keys of the spec choose
another one. The resident memory is read a hundred times: first after 1 % of the frames, last at the end.
Exit status 1 where it grows by more than 2 % from the start to the end, or a frame is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.core.result import TextTable
from summit_train.models.network import build_network
from summit_train.spec import load_spec
from summit_train.training.checkpoint import save_checkpoint

MAX_GROWTH = 0.02
PATTERNS = 128  # different frames
SPEC = """\
name: stream
model: {{arch: tsm, backbone: resnet18, width: 0.125, num_classes: 4, shift_direction: past}}
data: {{train: none, val: none, frame_stride: 1, short_side: [{size}, {size}], crop: {size}}}
evaluate: {{short_side: {size}}}
"""
ENCODER = {"preset": "ultrafast", "tune": "zerolatency", "crf": "28"}


def main() -> int:
    """Stream and print; or, with --encode, be the encoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=64, help="side of a frame, pixels [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--encode", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    if args.encode:
        encode(args.frames, args.size)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        values = measure(args.frames, args.size, write_network(Path(folder), args.size, args.overrides))
    print(json.dumps(values) if args.json else as_text(values))
    return 0 if values["lines"] == args.frames and values["growth"] <= MAX_GROWTH else 1


def encode(num_frames: int, size: int) -> None:
    """Write a video of moving patches to standard output, as an encoder of a camera would."""
    coarse = np.random.default_rng(0).integers(0, 256, (size // 8, size // 8, 3), np.uint8)
    scene = coarse.repeat(8, 0).repeat(8, 1)
    frames = [VideoFrame.from_ndarray(np.roll(scene, (n, 2 * n), (0, 1)), "rgb24") for n in range(PATTERNS)]
    with av.open(sys.stdout.buffer, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=25, options=ENCODER)
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = size
        stream.codec_context.thread_count = 1
        for number in range(num_frames):
            frame = frames[number % PATTERNS]
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_network(folder: Path, size: int, overrides: Sequence[str]) -> Path:
    """Write a checkpoint of a network with random weights."""
    path = folder / "stream.yaml"
    path.write_text(SPEC.format(size=size))
    spec = load_spec(path, overrides)
    weights = build_network(spec, torch.Generator().manual_seed(0)).state_dict()
    path = folder / "random.pt"
    save_checkpoint(path, {"model": weights, "optimizer": {}, "step": 0, "spec": spec.model_dump(mode="json")})
    return path


def measure(num_frames: int, size: int, checkpoint: Path) -> dict[str, Any]:
    """Stream the encoder's video; return memory, latencies and rate as JSON values."""
    words = [sys.executable, __file__, "--encode", "--frames", str(num_frames), "--size", str(size)]
    encoder = subprocess.Popen(words, stdout=subprocess.PIPE)
    words = [sys.executable, "-m", "summit_train", "stream", str(checkpoint), "-", "--json", "--stride", "1"]
    program = subprocess.Popen(words, stdin=encoder.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert encoder.stdout is not None and program.stdout is not None and program.stderr is not None
    encoder.stdout.close()
    memory, latencies, began = list[int](), list[float](), 0.0
    for line in program.stdout:
        began = began or time.monotonic()
        latencies.append(json.loads(line)["latency_ms"])
        if len(latencies) % max(1, num_frames // 100) == 0:
            memory += resident_bytes(program.pid)
    seconds = time.monotonic() - began
    said = program.stderr.read().splitlines()
    if program.wait() or encoder.wait():
        sys.exit("\n".join(said))
    return {
        "frames": num_frames,
        "lines": len(latencies),
        "size": size,
        "resident_bytes": {
            "start": memory[0],
            "middle": memory[len(memory) // 2],
            "end": memory[-1],
            "max": max(memory),
        },
        "growth": memory[-1] / memory[0] - 1,
        "latency_ms": dict(zip(("median", "p99", "max"), np.percentile(latencies, (50, 99, 100)), strict=True)),
        "frames_per_second": (len(latencies) - 1) / seconds,
        "summary": said[-1],
    }


def resident_bytes(process: int) -> list[int]:
    """Return the resident memory of a process; nothing of one that has just ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]


def as_text(values: dict[str, Any]) -> str:
    """Return the figures for people."""
    memory = {f"memory, {when}": f"{size / 2**20:.1f} MiB" for when, size in values["resident_bytes"].items()}
    latency = {f"latency, {name}": f"{ms:.2f} ms" for name, ms in values["latency_ms"].items()}
    frames = f"{values['lines']:,} of {values['frames']:,}, {values['size']} x {values['size']} pixels"
    rows = {"frames": frames, **memory, "growth": f"{100 * values['growth']:+.2f} %", **latency}
    rows |= {"rate": f"{values['frames_per_second']:.0f} frames/s", "the command's summary": values["summary"]}
    return str(TextTable(list(rows.items()), left=2, indent="  "))


if __name__ == "__main__":
    sys.exit(main())
