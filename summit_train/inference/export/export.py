"""Export a trained network, or its stream, as an ONNX file that was checked against the network."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import summit_train
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import replacing, write_json
from summit_train.inference.export.data import Clips, Picture, Validation, clips_of, open_validation
from summit_train.inference.export.graph import clip_graph, stream_graph
from summit_train.inference.export.onnx_file import Runtime, exported, facts, to_half, to_int8, with_metadata
from summit_train.inference.export.verify import (
    Exported,
    Offline,
    compare_accuracy,
    difference,
    normalised,
    random_clips,
    state_names,
)
from summit_train.inference.trained import Trained
from summit_train.inference.videos import Follow
from summit_train.spec.catalog import stream_problem
from summit_train.spec.modality import RGB

Precision = Literal["fp32", "fp16", "int8"]

# Of the largest logit. Deep networks in fp32 differ by 1e-6 to 1e-5 between two runtimes, a wrong graph by far more.
TOLERANCE = 1e-4
SIDES = range(32, 4097)  # of a picture, in pixels
# How a program gets the evaluation's pixels and frames, in words; docs/export.md has it in Python.
SCALING = "bilinear (swscale), sides rounded down, to planar RGB; yuv420p and yuvj420p stay so where no side shrinks"
_N = "of a video of N frames (of flow: N fields that a frame can start at)"
RULES = {
    "dense": f"frame i of clip c is (start + i * frame_stride) mod N {_N}; start is c * L // (clips - 1), or L // 2 of "
    "one clip, where L = max(0, N - frames * frame_stride)",
    "uniform": f"frame i of clip c is N * (2 * clips * i + 2 * c + 1) // (2 * clips * frames) {_N}, or i * N // frames "
    "where N < frames",
}
_CONVERT = {"fp16": to_half, "int8": to_int8}
_STREAM_FRAMES = 32
_CLIPS = 4


@dataclass(frozen=True)
class Request:
    """What is to be exported.

    out: the file, *.onnx; its description is the file of that name with .json. size: height and width in pixels, None
    for the square that `eval` scores. batch: clips or streams in a call, None for any. video: a file to check on, None
    for the first of the validation set. max_videos: how many of them measure the accuracy of fp16 and int8, None for
    all.
    """

    out: Path
    stream: bool = False
    size: tuple[int, int] | None = None
    batch: int | None = 1
    precision: Precision = "fp32"
    video: str | None = None
    max_videos: int | None = None

    @property
    def description(self) -> Path:
        """Return the path of the description."""
        return self.out.with_suffix(".json")


def export(trained: Trained, request: Request, tell: Callable[[str], None], follow: Follow) -> dict[str, Any]:
    """Export a trained network, check the file, then put it in place; return the content of its description.

    Nothing is written before the graph has passed its check in onnxruntime: random pictures and a video, against the
    network in torch. tell: takes one line about each stage, and about each video that cannot be read. Raises UserError
    for a wrong request, and RunFailed where logits differ by more than is allowed or, of fp16 and int8, are not finite.
    """
    _check_request(request)
    return _Export(trained, request, open_validation(trained.spec), tell, follow).run()


def allowed(largest_logit: float) -> float:
    """Return the largest difference of logits at which an fp32 file is accepted, 0 if they are not finite."""
    return TOLERANCE * largest_logit if math.isfinite(largest_logit) else 0.0


def _check_request(request: Request) -> None:
    out = request.out
    if out.suffix != ".onnx":
        raise UserError(f"--out {out}: a file name that ends in .onnx is wanted; the description is put beside it")
    for file in (out, request.description):
        if file.is_dir():
            raise UserError(f"--out: {file} is a folder; a file is wanted")
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {there} is no folder that can be written to; choose another place")
    sides = request.size or (SIDES[0], SIDES[0])
    if not all(side in SIDES for side in sides):
        raise UserError(f"--size {sides[0]}x{sides[1]}: sides of {SIDES[0]} to {SIDES[-1]:,} pixels are wanted")
    for option, number in (("--batch", request.batch), ("--videos", request.max_videos)):
        if number is not None and number < 1:
            raise UserError(f"{option} {number}: at least 1 is wanted")


class _Export:
    """One export: its settings, and the parts of its work in their order."""

    def __init__(
        self,
        trained: Trained,
        request: Request,
        validation: Validation,
        tell: Callable[[str], None],
        follow: Follow,
    ) -> None:
        self.trained, self.request, self.validation = trained, request, validation
        self.tell, self.follow = tell, follow
        self.model, self.data, evaluate = trained.spec.model, trained.spec.data, trained.spec.evaluate
        height, width = request.size or (evaluate.short_side, evaluate.short_side)
        self.picture = Picture(max(evaluate.short_side, min(height, width)), height, width)
        self.num_clips = evaluate.clips
        self.offline = Offline(trained, stream=request.stream)
        problem = stream_problem(self.model.arch, self.model.shift_direction, self.model.non_local)
        if request.stream and problem is not None:
            raise UserError(f"{trained.path}: {problem}; leave --stream out to export the clip network")

    def run(self) -> dict[str, Any]:
        """Do the work; see `export`."""
        # Before the export, which takes longer than to find that the file is bad.
        video, reason = self._video()
        self.tell("exporting the graph")
        content = self._graph()
        self.tell("checking it against the network")
        checked, conversion = self._verify(content, video, reason), None
        if self.request.precision != "fp32":
            self.tell(f"converting it to {self.request.precision} and measuring what that costs")
            content = _CONVERT[self.request.precision](content)
            conversion = self._compare(content, video)
        usage = self._usage()
        content = with_metadata(content, usage)
        runtime = Runtime(content)
        description = {
            "model": self.request.out.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "kind": "stream" if self.request.stream else "clip",
            "precision": self.request.precision,
            "network": self.model.title,
            "checkpoint": str(self.trained.path),
            "step": self.trained.step,
            "inputs": [info.values() for info in runtime.inputs],
            "outputs": [info.values() for info in runtime.outputs],
            "state": state_names([info.name for info in runtime.inputs]),
            **usage,
            **facts(content),
            "verification": checked,
            "conversion": conversion,
            "speed": self._speed(runtime),
        }
        description["versions"]["summit_train"] = summit_train.__version__
        with replacing(self.request.out) as file:
            file.write(content)
        write_json(self.request.description, description)
        return description

    def _video(self) -> tuple[Clips | None, str]:
        """Return the video to check on, or None and why there is none. Raises DecodeError for a bad --video."""
        data, num_clips = self.data, self.num_clips
        if self.request.stream:
            data, num_clips = data.model_copy(update={"num_frames": _STREAM_FRAMES}), 1
        if self.request.video is not None:
            return clips_of(self.request.video, data, num_clips, self.picture), ""
        return self.validation.first_clips(data, num_clips, self.picture, self.tell)

    def _graph(self) -> bytes:
        make = stream_graph if self.request.stream else clip_graph
        network = self.offline.network(self.data.num_frames)
        return exported(make(network, self.request.batch, self.picture.height, self.picture.width))

    def _verify(self, content: bytes, video: Clips | None, reason: str) -> dict[str, Any]:
        """Check the fp32 graph; raise RunFailed where it does not give the network's logits."""
        scores = self._differences(content, video)
        for what, found in scores.items():
            if found is not None and not found["largest_difference"] <= allowed(found["largest_logit"]):
                raise RunFailed(
                    f"{self.request.out}: not written: the exported graph is wrong: its logits differ from the "
                    f"network's by up to {found['largest_difference']:.2g} ({what}); "
                    f"{allowed(found['largest_logit']):.2g} is allowed, {TOLERANCE} of the largest"
                )
        return {"tolerance": TOLERANCE, **scores, "note": reason or None}

    def _differences(self, content: bytes, video: Clips | None) -> dict[str, Any]:
        """Compare the graph's logits with the network's: on random pictures and on a video."""
        batch = self.request.batch or _CLIPS
        num_clips = batch if self.request.stream else max(_CLIPS, batch)
        num_frames = _STREAM_FRAMES if self.request.stream else self.data.num_frames
        pixels = random_clips(num_clips, num_frames, self.picture.height, self.picture.width, self.data.input)
        graph = Exported(Runtime(content), stream=self.request.stream)

        def compare(clips: Any) -> dict[str, Any]:
            found = difference(self.offline(clips), graph(clips))
            size = {"clips": len(clips), "frames": clips.shape[1]}
            return {**size, "largest_difference": found.largest, "largest_logit": found.largest_logit}

        on_video = None if video is None else {"path": video.path, **compare(normalised(video.clips, self.data.input))}
        return {"random": compare(pixels), "video": on_video}

    def _compare(self, content: bytes, video: Clips | None) -> dict[str, Any]:
        """Measure what a conversion costs; raise RunFailed where it gives no numbers."""
        differences = self._differences(content, video)
        accuracy = self._accuracy(content)
        found = [part for part in (*differences.values(), accuracy) if part is not None]
        if not all(math.isfinite(part["largest_difference"]) for part in found):
            raise RunFailed(
                f"{self.request.out}: not written: in {self.request.precision} the network gives NaN or infinity"
            )
        return {**differences, "accuracy": accuracy, "note": self.validation.reason or None}

    def _accuracy(self, content: bytes) -> dict[str, Any] | None:
        """Classify the validation set in fp32 and as converted; None where there is none here."""
        if self.validation.store is None:
            return None
        videos = self.validation.spread(self.request.max_videos)
        batches = self.validation.batches(videos, self.data, self.num_clips, self.picture)
        graph = Exported(Runtime(content), stream=self.request.stream)
        followed = self.follow(batches, len(videos), "videos")
        return compare_accuracy(self.offline, graph, followed, self.tell, self.data.input)

    def _usage(self) -> dict[str, Any]:
        """Return what a program needs to know to feed the graph and to read its logits."""
        dense, modality = self.data.sampling == "dense", self.data.input
        return {
            "preprocessing": {
                **(
                    {"colours": "RGB", "scaling": SCALING}
                    if modality is RGB
                    else {"flow_length": self.data.flow_length}
                ),
                "value_range": [0, 255],
                "mean": list(modality.mean),
                "std": list(modality.std),
                "short_side": self.picture.short_side,
                "crop": [self.picture.height, self.picture.width],
            },
            "sampling": {
                "kind": self.data.sampling,
                "frames": self.data.num_frames,
                "frame_stride": self.data.frame_stride if dense else None,
                "clips": self.num_clips,
                "rule": RULES[self.data.sampling],
            },
            "classes": list(self.trained.classes),
            "classes_are_named": self.trained.has_names,
        }

    def _speed(self, runtime: Runtime) -> dict[str, Any]:
        seconds = runtime.seconds_a_call()
        frames = (self.request.batch or 1) * (1 if self.request.stream else self.data.num_frames)
        return {"frames_per_second": frames / seconds, "ms_a_call": 1e3 * seconds, "threads": runtime.threads}
