"""Export a trained network, or its stream, as an ONNX file that was checked against the network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import summit_train
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, replacing, write_json
from summit_train.core.text import counted
from summit_train.data.batches.loader import test_batches
from summit_train.data.dataset import Dataset
from summit_train.data.video.augment import View, scaled_size
from summit_train.inference.export.onnx_file import Runtime, exported, facts, state_of
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise
from summit_train.spec.catalog import RGB
from summit_train.spec.checks import size_problems, stream_problem

# Of the largest logit. Deep networks in fp32 differ by 1e-6 to 1e-5 between two runtimes, a wrong graph by far more.
TOLERANCE = 1e-4
# How a program gets the evaluation's pixels and frames, in words; docs/export.md has the Python.
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
_MOST_TRIES = 16  # unreadable validation videos, after which the check uses none

Logits = NDArray[np.float64]


@dataclass
class Export:
    """One export: the options, and the parts of the work.

    out: the file, *.onnx; its description is the file of that name with .json. size: height and width in pixels, None
    for the square that `eval` scores. batch: clips or streams in a call, None for any. tell: takes one line about each
    stage, and about each video that cannot be read. Raises UserError for what cannot be exported.
    """

    trained: Trained
    out: Path
    stream: bool = False
    size: tuple[int, int] | None = None
    batch: int | None = 1
    tell: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.out.suffix != ".onnx":
            raise UserError(f"--out must be a file name that ends in .onnx, got {self.out}")
        for file in (self.out, self.out.with_suffix(".json")):
            check_output("--out", file, file)
        spec = self.trained.spec
        problem = stream_problem(spec.model)
        if self.stream and problem is not None:
            raise UserError(f"{self.trained.path}: {problem}; leave --stream out to export the clip network")
        model = spec.model
        if self.size is None and spec.task == "detection":
            raise UserError(f"{self.trained.path}: detectors see whole frames: give their scaled size, --size HxW")
        wrong = [why for side in self.size or () for _, why in size_problems(model, spec.data.crop, side)]
        if wrong:
            raise UserError(f"--size: each side {wrong[0]}")
        self.crop = self.size or (spec.evaluate.short_side, spec.evaluate.short_side)
        self.short_side = max(spec.evaluate.short_side, min(self.crop))
        self.num_frames = _STREAM_FRAMES if self.stream else spec.data.num_frames  # of a clip of the check

    def run(self) -> dict[str, Any]:
        """Export, check the file, then put it in place; return the content of its description.

        Nothing is written before the graph has passed its check in onnxruntime: random pictures and a video, against
        the network in torch. Raises RunFailed where logits differ by more than is allowed.
        """
        spec = self.trained.spec
        # Before the export, which takes longer than to find that the file is bad.
        path, views, note = self._video()
        self.tell("exporting the graph")
        data = spec.data.model_copy(update={"num_frames": self.num_frames})
        checked = replace(self.trained, spec=spec.model_copy(update={"data": data}))
        network = checked.network(_CPU, ready=False).float()
        content = exported(network, self.batch, *self.crop, self.usage(), stream=self.stream)
        runtime = Runtime(content)
        self.tell("checking it against the network")
        num_clips = (self.batch or _CLIPS) if self.stream else max(_CLIPS, self.batch or 0)
        shape = (num_clips, self.num_frames, *self.crop, spec.data.input.channels)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        checks = {"random": self._compared(network, runtime, pixels), "video": None}
        if views is not None:
            checks["video"] = {"path": path, **self._compared(network, runtime, views)}
        for what, found in checks.items():
            if found is not None and not found["largest_difference"] <= TOLERANCE * found["largest_logit"] < math.inf:
                allowed = f"{TOLERANCE * found['largest_logit']:.2g} is allowed, {TOLERANCE} of the largest"
                raise RunFailed(
                    f"{self.out}: not written: the exported graph is wrong: its logits differ from the "
                    f"network's by up to {found['largest_difference']:.2g} ({what}); {allowed}"
                )
        versions, operators = facts(content)
        description = {
            "model": self.out.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "kind": "stream" if self.stream else "clip",
            "network": spec.model.title,
            "checkpoint": str(self.trained.path),
            "step": self.trained.step,
            "inputs": runtime.inputs,
            "outputs": runtime.outputs,
            "state": state_of(one["name"] for one in runtime.inputs),
            **self.usage(),
            "versions": {**versions, "summit_train": summit_train.__version__},
            "operators": operators,
            "verification": {"tolerance": TOLERANCE, **checks, "note": note},
        }
        with replacing(self.out) as file:
            file.write(content)
        write_json(self.out.with_suffix(".json"), description)
        return description

    def _video(self) -> tuple[str, torch.Tensor | None, str | None]:
        """Return path and clips of the first readable validation video, or no clips and why there are none."""
        spec = self.trained.spec
        data = spec.data.model_copy(update={"workers": 0, "num_frames": self.num_frames, "on_bad_clip": "skip"})
        evaluate = spec.evaluate.model_copy(update={"clips": 1 if self.stream else spec.evaluate.clips})
        try:
            dataset = Dataset.open(spec, "val")
        except UserError as error:
            return "", None, str(error)
        videos = range(min(len(dataset), _MOST_TRIES))
        view = partial(centre_view, self.short_side, self.crop)
        for batch in test_batches(data, evaluate, dataset.store, videos, view):
            if batch.bad is None:
                return dataset.manifest.path(batch.video), batch.views, None
            self.tell(f"left out: {batch.bad.path}: {batch.bad.reason}")
        return "", None, f"none of the first {counted(len(videos), 'video')} of {data.val} can be read"

    def _compared(self, network: VideoNetwork, runtime: Runtime, pixels_MTHWC: torch.Tensor) -> dict[str, Any]:
        """Compare the graph's logits with those of the clip network in torch; of a stream, for each frame."""
        clips = Normalise(torch.float32, _CPU, self.trained.spec.data.input)(pixels_MTHWC)
        score = (lambda x: network.classify(network.extract(network.to_input(x)))) if self.stream else network
        with torch.inference_mode():
            # One by one: a stream's clip is long, and a batch of them would not fit into memory.
            expected = torch.stack([score(clip) for clip in clips[:, None]]).double().numpy()
        largest, largest_logit = difference(expected, runtime.logits(clips))
        size = {"clips": len(clips), "frames": clips.shape[1]}
        return {**size, "largest_difference": largest, "largest_logit": largest_logit}

    def usage(self) -> dict[str, Any]:
        """Describe the input of the graph and its logits, for programs that run it."""
        data = self.trained.spec.data
        modality = self.trained.spec.data.input
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
                "clips": self.trained.spec.evaluate.clips,
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


def difference(reference: Logits, converted: Logits) -> tuple[float, float]:
    """Return the largest difference, and the reference's largest logit; infinite where one is not finite."""
    assert reference.shape == converted.shape
    if not (np.isfinite(reference).all() and np.isfinite(converted).all()):
        return math.inf, math.inf
    return float(np.abs(reference - converted).max()), float(np.abs(reference).max())
