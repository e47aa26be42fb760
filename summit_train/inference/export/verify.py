"""An exported graph against the network that it was made of: logits on the same pictures, and accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.data.batches.loader import TestBatch
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise
from summit_train.spec.modality import RGB, Modality

CPU = torch.device("cpu")
Logits = NDArray[np.float64]
# Normalised clips (M, T, C, H, W) to logits (M, F, classes): of a clip network F is 1, of a stream T.
Score = Callable[[torch.Tensor], Logits]


class Tensor(Protocol):
    """An input or an output of a graph."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Return its shape, batch first."""

    def zeros(self, batch: int) -> NDArray[Any]:
        """Return zeros of its shape and type; a first length that is not fixed becomes `batch`."""


class Runs(Protocol):
    """A graph in a runtime: arrays by name in, arrays by name out."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Return the inputs; the first is the clip or the frame, the others are caches."""

    def __call__(self, values: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Run the graph once."""


class Offline:
    """The clip network in torch, plain and in fp32, as a `Score`. Of a stream it gives each frame's logits."""

    def __init__(self, trained: Trained, *, stream: bool) -> None:
        self._trained, self._stream = trained, stream
        self._networks = dict[int, VideoNetwork]()

    def __call__(self, clips_MTCHW: torch.Tensor) -> Logits:
        network = self.network(clips_MTCHW.shape[1])
        with torch.inference_mode():
            # One by one: a stream's clip is long, and a batch of them would not fit into memory.
            return np.concatenate([self._score(network, clip[None]) for clip in clips_MTCHW])

    def network(self, num_frames: int) -> VideoNetwork:
        """Return the network for clips of `num_frames` frames."""
        if num_frames not in self._networks:
            spec = self._trained.spec
            data = spec.data.model_copy(update={"num_frames": num_frames})
            longer = dataclasses.replace(self._trained, spec=spec.model_copy(update={"data": data}))
            self._networks[num_frames] = longer.network(CPU, ready=False).float()
        return self._networks[num_frames]

    def _score(self, network: VideoNetwork, clip: torch.Tensor) -> Logits:
        logits = network.classify(network.extract(network.to_input(clip))) if self._stream else network(clip)
        return logits[None].double().numpy()


class Exported:
    """A graph in a runtime as a `Score`. Each clip is a stream of its own, which begins with caches of zeros."""

    def __init__(self, runtime: Runs, *, stream: bool) -> None:
        self._runtime, self._run = runtime, self._streamed if stream else self._at_once

    def __call__(self, clips_MTCHW: torch.Tensor) -> Logits:
        batch, clips = self._runtime.inputs[0].shape[0], clips_MTCHW.numpy()
        if isinstance(batch, int):
            # The last batch is padded with copies of its last clip; the copies' logits are dropped.
            padded = np.pad(clips, [(0, -len(clips) % batch), *[(0, 0)] * 4], mode="edge")
            groups = [*padded.reshape(-1, batch, *clips.shape[1:])]
        else:
            # Any batch is allowed: check one clip alone, and all others together.
            groups = [group for group in (clips[:1], clips[1:]) if len(group)]
        return np.concatenate([self._run(group) for group in groups])[: len(clips)].astype(np.float64)

    def _at_once(self, clips: NDArray[Any]) -> NDArray[Any]:
        return self._runtime({"clip": clips})["logits"][:, None]

    def _streamed(self, clips: NDArray[Any]) -> NDArray[Any]:
        caches: dict[str, NDArray[Any]] = {cache.name: cache.zeros(len(clips)) for cache in self._runtime.inputs[1:]}
        names, logits = state_names(caches), []
        for frame in clips.swapaxes(0, 1):
            out = self._runtime({"frame": frame, **caches})
            caches = {name: out[names[name]] for name in caches}
            logits.append(out["logits"])
        return np.stack(logits, axis=1)


def state_names(inputs: Iterable[str]) -> dict[str, str]:
    """Return, for each cache among a graph's inputs, the output that is its value for the next frame."""
    return {name: name.replace("_in_", "_out_") for name in inputs if name.startswith("cache_in_")}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of two runs' logits, and the largest logit; infinite where one is not finite."""

    largest: float
    largest_logit: float


def difference(reference: Logits, exported: Logits) -> Difference:
    """Compare logits of one shape."""
    assert reference.shape == exported.shape
    if not (np.isfinite(reference).all() and np.isfinite(exported).all()):
        return Difference(np.inf, np.inf)
    return Difference(float(np.abs(reference - exported).max()), float(np.abs(reference).max()))


def normalised(clips_MTHWC: torch.Tensor, modality: Modality = RGB) -> torch.Tensor:
    """Return uint8 clips as the network takes them: float (M, T, C, H, W)."""
    return Normalise(torch.float32, CPU, modality)(clips_MTHWC)


def random_clips(num_clips: int, num_frames: int, height: int, width: int, modality: Modality = RGB) -> torch.Tensor:
    """Return normalised clips of random pixels, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_clips, num_frames, height, width, modality.channels)
    return normalised(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), modality)


def compare_accuracy(
    reference: Score,
    exported: Score,
    batches: Iterable[TestBatch],
    tell: Callable[[str], None],
    modality: Modality = RGB,
) -> dict[str, Any]:
    """Classify videos by both, each by the mean of its logits; return accuracies in percent and what differs.

    A video that cannot be read is told, counted, and part of no accuracy. top1 and top1_fp32 are None without a video.
    agreement: the percentage of the videos that both give the same class.
    """
    rows, largest, unreadable = list[tuple[int, int, int]](), 0.0, 0
    for batch in batches:
        if batch.bad is not None:
            unreadable += 1
            tell(f"left out: {batch.bad.path}: {batch.bad.reason}")
            continue
        clips = normalised(batch.views, modality)
        ours, theirs = reference(clips), exported(clips)
        largest = max(largest, difference(ours, theirs).largest)
        rows.append((batch.label, int(ours.mean((0, 1)).argmax()), int(theirs.mean((0, 1)).argmax())))
    labels, right, converted = np.array(rows, np.int64).reshape(-1, 3).T
    return {
        "videos": len(rows),
        "unreadable": unreadable,
        "top1_fp32": _share(right == labels),
        "top1": _share(converted == labels),
        "agreement": _share(right == converted),
        "largest_difference": largest,
    }


def _share(hits: NDArray[np.bool_]) -> float | None:
    return 100.0 * float(np.mean(hits)) if len(hits) else None
