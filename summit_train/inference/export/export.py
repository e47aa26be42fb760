"""Export a trained network, or its stream, as an ONNX file that was checked against the network."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import summit_train
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, replacing, write_json
from summit_train.core.progress import followed
from summit_train.data.batches.loader import TestBatch, test_batches
from summit_train.data.batches.stores import Store, file_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.video.augment import View, scaled_size
from summit_train.inference.export.onnx_file import Runtime, exported, facts, state_of, to_half, to_int8, with_metadata
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise
from summit_train.spec import DataSpec, Spec
from summit_train.spec.catalog import stream_problem
from summit_train.spec.modality import RGB

# Of the largest logit. Deep networks in fp32 differ by 1e-6 to 1e-5 between two runtimes, a wrong graph by far more.
TOLERANCE = 1e-4
# How a program gets the evaluation's pixels and frames, in words; docs/export.md has it in Python.
SCALING = "bilinear (swscale), sides rounded down, to planar RGB; yuv420p and yuvj420p stay so where no side shrinks"
_N = "of a video of N frames (of flow: N fields that a frame can start at)"
RULES = {
    "dense": f"frame i of clip c is (start + i * frame_stride) mod N {_N}; start is c * L // (clips - 1), or L // 2 of "
    "one clip, where L = max(0, N - frames * frame_stride)",
    "uniform": f"frame i of clip c is N * (2 * clips * i + 2 * c + 1) // (2 * clips * frames) {_N}, or i * N // frames "
    "where N < frames",
}
_CPU = torch.device("cpu")
_STREAM_FRAMES = 32
_CLIPS = 4
_MOST_TRIES = 16  # unreadable validation videos before the check does without one

Logits = NDArray[np.float64]


@dataclasses.dataclass
class Export:
    """One export: what is asked for, and the parts of the work.

    out: the file, *.onnx; its description is the file of that name with .json. size: height and width in pixels, None
    for the square that `eval` scores. batch: clips or streams in a call, None for any. video: a file to check on, None
    for the first of the validation set. max_videos: how many of them measure the accuracy of fp16 and int8, None for
    all. tell: takes one line about each stage, and about each video that cannot be read. Raises UserError for what
    cannot be exported.
    """

    trained: Trained
    out: Path
    stream: bool = False
    size: tuple[int, int] | None = None
    batch: int | None = 1
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    video: str | None = None
    max_videos: int | None = None
    tell: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.out.suffix != ".onnx":
            raise UserError(f"--out must be a file name that ends in .onnx, got {self.out}")
        for file in (self.out, self.out.with_suffix(".json")):
            check_output("--out", file, file)
        spec = self.trained.spec
        problem = stream_problem(spec.model.arch, spec.model.shift_direction, spec.model.non_local)
        if self.stream and problem is not None:
            raise UserError(f"{self.trained.path}: {problem}; leave --stream out to export the clip network")
        self.data, self.evaluate = spec.data.model_copy(update={"on_bad_clip": "skip"}), spec.evaluate
        self.crop = self.size or (spec.evaluate.short_side, spec.evaluate.short_side)
        self.short_side = max(spec.evaluate.short_side, min(self.crop))
        self.normalise = Normalise(torch.float32, _CPU, spec.data.input)
        self.store, self.videos, self.reason = _validation_set(spec)
        self.networks = dict[int, VideoNetwork]()

    def run(self) -> dict[str, Any]:
        """Export, check the file, then put it in place; return the content of its description.

        Nothing is written before the graph has passed its check in onnxruntime: random pictures and a video, against
        the network in torch. Raises RunFailed where logits differ by more than is allowed or, of fp16 and int8, are
        not finite.
        """
        # Before the export, which takes longer than to find that the file is bad.
        video, reason = self._video()
        self.tell("exporting the graph")
        network = self._network(self.data.num_frames)
        content = exported(network, self.batch, *self.crop, stream=self.stream)
        self.tell("checking it against the network")
        differences = self._differences(Runtime(content), video)
        self._check(differences)
        conversion = None
        if self.precision != "fp32":
            self.tell(f"converting it to {self.precision} and measuring what that costs")
            content = (to_half if self.precision == "fp16" else to_int8)(content)
            conversion = self._cost(Runtime(content), video)
        usage = self._usage()
        content = with_metadata(content, usage)
        runtime = Runtime(content)
        seconds = runtime.seconds_a_call()
        frames = (self.batch or 1) * (1 if self.stream else self.data.num_frames)
        description = {
            "model": self.out.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "kind": "stream" if self.stream else "clip",
            "precision": self.precision,
            "network": self.trained.spec.model.title,
            "checkpoint": str(self.trained.path),
            "step": self.trained.step,
            "inputs": runtime.inputs,
            "outputs": runtime.outputs,
            "state": state_of(one["name"] for one in runtime.inputs),
            **usage,
            **facts(content),
            "verification": {"tolerance": TOLERANCE, **differences, "note": reason or None},
            "conversion": conversion,
            "speed": {"frames_per_second": frames / seconds, "ms_a_call": 1e3 * seconds, "threads": runtime.threads},
        }
        description["versions"]["summit_train"] = summit_train.__version__
        with replacing(self.out) as file:
            file.write(content)
        write_json(self.out.with_suffix(".json"), description)
        return description

    def _network(self, num_frames: int) -> VideoNetwork:
        """Return the clip network in torch, plain and in fp32."""
        if num_frames not in self.networks:
            spec = self.trained.spec
            data = spec.data.model_copy(update={"num_frames": num_frames})
            longer = dataclasses.replace(self.trained, spec=spec.model_copy(update={"data": data}))
            self.networks[num_frames] = longer.network(_CPU, ready=False).float()
        return self.networks[num_frames]

    def _logits(self, clips_MTCHW: torch.Tensor) -> Logits:
        """Return what `Runtime.logits` must return: one row of logits a clip; of a stream, of each frame."""
        network = self._network(clips_MTCHW.shape[1])
        score = (lambda x: network.classify(network.extract(network.to_input(x)))) if self.stream else network
        with torch.inference_mode():
            # One by one: a stream's clip is long, and a batch of them would not fit into memory.
            found: Logits = torch.stack([score(clip) for clip in clips_MTCHW[:, None]]).double().numpy()
        return found

    def _video(self) -> tuple[tuple[str, torch.Tensor] | None, str]:
        """Return path and clips of the video to check on, or None and why there is none.

        Raises DecodeError for a bad --video.
        """
        data, num_clips = self.data.model_copy(update={"workers": 0}), self.evaluate.clips
        if self.stream:
            data, num_clips = data.model_copy(update={"num_frames": _STREAM_FRAMES}), 1
        if self.video is not None:
            store = file_store(data, plain_manifest([self.video]), "")
            (batch,) = self._batches(store, [0], data.model_copy(update={"on_bad_clip": "fail"}), num_clips)
            return (self.video, batch.views), ""
        if self.store is None:
            return None, self.reason
        tried = self.videos[:_MOST_TRIES]
        for batch in self._batches(self.store, tried, data, num_clips):
            if batch.bad is None:
                return (self.store.manifest.path(batch.video), batch.views), ""
            self.tell(f"left out: {batch.bad.path}: {batch.bad.reason}")
        return None, f"none of the first {len(tried)} videos of {self.data.val} can be read"

    def _batches(self, store: Store, videos: Sequence[int], data: DataSpec, num_clips: int) -> Iterable[TestBatch]:
        """Return the test clips of videos; one that cannot be read has `bad` and no clips."""
        evaluate = self.evaluate.model_copy(update={"clips": num_clips})
        return test_batches(data, evaluate, store, videos, partial(centre_view, self.short_side, self.crop))

    def _differences(self, runtime: Runtime, video: tuple[str, torch.Tensor] | None) -> dict[str, Any]:
        """Compare the graph's logits with the network's: on random pictures and on a video."""

        def compare(pixels_MTHWC: torch.Tensor) -> dict[str, Any]:
            clips = self.normalise(pixels_MTHWC)
            largest, largest_logit = difference(self._logits(clips), runtime.logits(clips))
            size = {"clips": len(clips), "frames": clips.shape[1]}
            return {**size, "largest_difference": largest, "largest_logit": largest_logit}

        batch = self.batch or _CLIPS
        num_clips, num_frames = max(_CLIPS, batch), self.data.num_frames
        if self.stream:
            num_clips, num_frames = batch, _STREAM_FRAMES
        shape = (num_clips, num_frames, *self.crop, self.data.input.channels)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return {"random": compare(pixels), "video": video and {"path": video[0], **compare(video[1])}}

    def _check(self, differences: dict[str, Any]) -> None:
        """Raise RunFailed where an fp32 graph does not give the network's logits."""
        for what, found in differences.items():
            if found is None:
                continue
            largest, allowed = found["largest_difference"], TOLERANCE * found["largest_logit"]
            if not (math.isfinite(largest) and largest <= allowed):
                raise RunFailed(
                    f"{self.out}: not written: the exported graph is wrong: its logits differ from the "
                    f"network's by up to {largest:.2g} ({what}); {allowed:.2g} is allowed, {TOLERANCE} of the largest"
                )

    def _cost(self, runtime: Runtime, video: tuple[str, torch.Tensor] | None) -> dict[str, Any]:
        """Measure what a conversion costs; raise RunFailed where it gives no numbers."""
        cost = {**self._differences(runtime, video), "accuracy": self._accuracy(runtime)}
        if not all(math.isfinite(part["largest_difference"]) for part in cost.values() if part is not None):
            raise RunFailed(f"{self.out}: not written: in {self.precision} the network gives NaN or infinity")
        return {**cost, "note": self.reason or None}

    def _accuracy(self, runtime: Runtime) -> dict[str, Any] | None:
        """Classify the validation set in fp32 and as converted, each by the mean of its logits; None without a set.

        Accuracies are in percent, None without a readable video. agreement: how many videos both give the same class.
        """
        if self.store is None:
            return None
        # In equal distances: a list is often sorted by class.
        num_videos = min(self.max_videos or len(self.videos), len(self.videos))
        videos = [self.videos[number * len(self.videos) // num_videos] for number in range(num_videos)]
        rows, largest, unreadable = list[tuple[int, int, int]](), 0.0, 0
        for batch in followed(self._batches(self.store, videos, self.data, self.evaluate.clips), num_videos, "videos"):
            if batch.bad is not None:
                unreadable += 1
                self.tell(f"left out: {batch.bad.path}: {batch.bad.reason}")
                continue
            clips = self.normalise(batch.views)
            ours, theirs = self._logits(clips), runtime.logits(clips)
            largest = max(largest, difference(ours, theirs)[0])
            rows.append((batch.label, int(ours.mean((0, 1)).argmax()), int(theirs.mean((0, 1)).argmax())))
        labels, right, converted = np.array(rows, np.int64).reshape(-1, 3).T
        hits = {"top1_fp32": right == labels, "top1": converted == labels, "agreement": right == converted}
        shares = {name: 100.0 * float(hit.mean()) if rows else None for name, hit in hits.items()}
        return {"videos": len(rows), "unreadable": unreadable, **shares, "largest_difference": largest}

    def _usage(self) -> dict[str, Any]:
        """Return what a program needs to know to feed the graph and to read its logits."""
        data, modality = self.data, self.data.input
        pictures: dict[str, Any] = (
            {"colours": "RGB", "scaling": SCALING} if modality is RGB else {"flow_length": data.flow_length}
        )
        return {
            "preprocessing": {
                **pictures,
                "value_range": [0, 255],
                "mean": list(modality.mean),
                "std": list(modality.std),
                "short_side": self.short_side,
                "crop": list(self.crop),
            },
            "sampling": {
                "kind": data.sampling,
                "frames": data.num_frames,
                "frame_stride": data.frame_stride if data.sampling == "dense" else None,
                "clips": self.evaluate.clips,
                "rule": RULES[data.sampling],
            },
            "classes": list(self.trained.classes),
            "classes_are_named": self.trained.has_names,
        }


def centre_view(short_side: int, crop: tuple[int, int], width: int, height: int) -> list[View]:
    """Return the view of an upright frame that the network sees: its centre, `crop` = (height, width).

    The frame is scaled so that its shorter side has `short_side` pixels, or more where it would not cover the centre.
    """
    shorter = min(width, height)
    least = max(-(-crop[1] * shorter // width), -(-crop[0] * shorter // height))
    scaled = scaled_size(width, height, max(short_side, least))
    return [View(*scaled, (scaled[0] - crop[1]) // 2, (scaled[1] - crop[0]) // 2, crop[1], crop[0])]


def _validation_set(spec: Spec) -> tuple[Store | None, list[int], str]:
    """Open the spec's validation set: the store and the videos that are used, or None and why there is none."""
    if not Path(spec.data.val).exists():
        return None, [], f"there is no validation set {spec.data.val} here"
    try:
        dataset = Dataset.open(spec, "val")
        return dataset.store, dataset.clips.tolist(), ""
    except UserError as error:
        return None, [], str(error)


def difference(reference: Logits, converted: Logits) -> tuple[float, float]:
    """Return the largest difference, and the reference's largest logit; infinite where one is not finite."""
    assert reference.shape == converted.shape
    if not (np.isfinite(reference).all() and np.isfinite(converted).all()):
        return math.inf, math.inf
    return float(np.abs(reference - converted).max()), float(np.abs(reference).max())
