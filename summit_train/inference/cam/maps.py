"""Class activation maps of videos, and the threshold of their foreground (TSM, journal version, section 8)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.progress import followed
from summit_train.core.text import listed
from summit_train.data.batches.loader import BadClip, TestBatch, test_batches
from summit_train.data.dataset import Dataset
from summit_train.evaluation.scores import probabilities
from summit_train.inference.trained import Trained
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.models.video import VideoNetwork
from summit_train.spec.catalog import maps_problem

_ROUNDING = 0.05  # of logits, in bf16 too
FRACTION = 0.2  # of the validation set's pixels are foreground, in the paper and here


def class_maps(network: VideoNetwork, features: torch.Tensor, num_clips: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps (N, num_classes, T', h, w) of clips' `feature_maps`, without the bias, and the logits.

    The classifier becomes a 1x1x1 convolution with the same weights. It comes after the global average in the network;
    both are linear, so their order does not matter. Dropout is left out. Frames of a 2D network become the maps' T'.
    """
    (linear,) = (module for module in network.get_submodule(network.head).modules() if isinstance(module, nn.Linear))
    wide = features.to(linear.weight.dtype)  # under autocast the features are narrower
    # A linear layer over the channels of each place is the 1x1x1 convolution, for images and for volumes.
    maps = functional.linear(wide.movedim(1, -1), linear.weight).movedim(-1, 1)
    if maps.dim() == 4:
        maps = maps.reshape(num_clips, -1, *maps.shape[1:]).transpose(1, 2)
    return maps, maps.mean((2, 3, 4)) + linear.bias


@dataclass(frozen=True)
class Heatmap:
    """The class activation map of one clip of a video.

    label, name: of the map's class. score: its probability. logit: the mean of the map plus the classifier's bias. map:
    (T', h, w), without the bias. frames: the clip's frame numbers in the video, int64 (T,). slices: the map's slice of
    each frame, int64 (T,). pictures: the frames as the network saw them, uint8 RGB (T, H, W, 3).
    """

    path: str
    label: int
    name: str
    score: float
    logit: float
    map: NDArray[Any]
    frames: NDArray[np.int64]
    slices: NDArray[np.int64]
    pictures: NDArray[np.uint8]

    def pixels(self, places: Sequence[int]) -> NDArray[np.float32]:
        """Return the map of the pixels (n, H, W) of these places' frames, resized in space alone."""
        slices = torch.from_numpy(np.ascontiguousarray(self.map[self.slices[list(places)]]))
        size = self.pictures.shape[1:3]
        resized = functional.interpolate(slices[:, None], size, mode="bilinear", align_corners=False)[:, 0]
        return np.asarray(resized.numpy())

    def record(self, threshold: float) -> dict[str, Any]:
        """Return the row of tables.

        foreground: the share of the map at or above the threshold. peak_frame: at the map's greatest value; the middle
        one of the frames of that slice.
        """
        at_peak = self.frames[self.slices == self.map.max((1, 2)).argmax()]
        return {
            "label": self.label, "class": self.name, "score": self.score, "logit": self.logit,
            "mean": float(self.map.mean()), "peak_frame": int(at_peak[len(at_peak) // 2]),
            "foreground": float((self.map >= threshold).mean()), "threshold": threshold,
        }  # fmt: skip


class Mapper:
    """Maps videos with a trained network on a device: one clip of each, whole frames or the centre square.

    wanted: name or number of the class to map (`label`); None for the predicted one of each clip. Raises UserError for
    a network without such maps, and for a class that it does not know.
    """

    def __init__(self, trained: Trained, device: torch.device, wanted: str | None = None) -> None:
        spec = trained.spec
        trained.check_pictures(maps_problem(spec.model.arch))
        self.trained = trained
        self.label = None if wanted is None else _label_of(trained, wanted)
        crops = "full" if spec.evaluate.crops == "full" else 1
        self._evaluate = spec.evaluate.model_copy(update={"clips": 1, "crops": crops})
        self._network = trained.network(device)
        self._device = device
        self._normalise = Normalise(parameter_type(spec.precision), device, spec.data.input)
        self._check_logits()

    def heatmaps(
        self, dataset: Dataset, on_bad_clip: Literal["fail", "skip"], label: int | None = None
    ) -> Iterator[Heatmap | BadClip]:
        """Yield the map of each video of a data set, or why it has none. label: None for the predicted one.

        With on_bad_clip "fail" a bad video raises DecodeError. Raises RunFailed for NaN or infinity.
        """
        data = self.trained.spec.data.model_copy(update={"on_bad_clip": on_bad_clip})
        for batch in test_batches(data, self._evaluate, dataset.store, range(len(dataset))):
            yield batch.bad or self._heatmap(batch, dataset.manifest.path(batch.video), label)

    def _maps(self, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with mixed_precision(self.trained.spec.precision, self._device):
            features = self._network.feature_maps(self._network.to_input(clips))
        return class_maps(self._network, features, len(clips))

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Raise UserError where a network's `feature_maps` are not what its classifier sees the average of."""
        clips = self._normalise(torch.zeros((1, *self.trained.spec.data.clip_shape), dtype=torch.uint8))
        with mixed_precision(self.trained.spec.precision, self._device):
            own = self._network(clips)
        if float((self._maps(clips)[1] - own).norm()) > _ROUNDING * float(own.norm()):
            wrong = "its logits are not its head applied to the average of its feature_maps"
            raise UserError(f"{self.trained.path}: no class activation maps: {wrong}")

    @torch.inference_mode()
    def _heatmap(self, batch: TestBatch, path: str, label: int | None) -> Heatmap:
        maps, logits = (tensor[0].cpu() for tensor in self._maps(self._normalise(batch.views)))
        if not bool(torch.isfinite(maps).all()):
            raise RunFailed(f"{path}: the network of {self.trained.path} gives NaN or infinity")
        label = int(logits.argmax()) if label is None else label
        num_frames = batch.frames.shape[1]
        num_slices = maps.shape[1]
        return Heatmap(
            path=path,
            label=label,
            name=self.trained.classes[label],
            score=float(probabilities(logits.numpy(), self.trained.spec.loss.base)[label]),
            logit=float(logits[label]),
            map=maps[label].numpy().copy(),  # not a view, which would keep the maps of all classes
            frames=batch.frames[0],
            slices=np.arange(num_frames) * num_slices // num_frames,
            pictures=batch.views[0].numpy(),
        )


def _label_of(trained: Trained, wanted: str) -> int:
    classes = trained.classes
    if wanted.isdecimal() and int(wanted) < len(classes):
        return int(wanted)
    if wanted in classes:
        return classes.index(wanted)
    near = difflib.get_close_matches(wanted, classes, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"its classes are {listed(classes)}"
    raise UserError(f"{trained.path}: class {wanted!r} not found; {hint}")


def measure_threshold(mapper: Mapper) -> dict[str, Any]:
    """Return the threshold that keeps 20 % of the pixels of the validation set, and what it was measured on.

    It is a quantile of the predicted classes' maps of all videos, at their own low resolution. Raises UserError without
    a validation set. A bad video raises DecodeError or, with data.on_bad_clip "skip", is left out and named; more than
    data.max_bad_fraction of them raise RunFailed.
    """
    spec = mapper.trained.spec
    data = mapper.trained.spec.data
    if not Path(data.val).exists():
        wrong = f"its threshold is measured on the validation set, and {data.val} does not exist"
        right = f"(relative paths start at {Path.cwd()}); add data.val=MANIFEST data.root=DIR, or --threshold VALUE"
        raise UserError(f"{mapper.trained.path}: {wrong} {right}")
    dataset = Dataset.open(spec, "val")
    maps = list[NDArray[Any]]()
    bad = list[BadClip]()
    for found in followed(mapper.heatmaps(dataset, data.on_bad_clip), len(dataset), "validation videos"):
        if isinstance(found, Heatmap):
            maps.append(found.map.ravel())
        else:
            bad.append(found)
    if len(bad) > data.max_bad_fraction * len(dataset) or not maps:
        many = f"{len(bad)} of {len(dataset)} videos could not be read"
        most = f"more than data.max_bad_fraction ({data.max_bad_fraction:g})"
        raise RunFailed(f"{data.val}: {many}, {most}: {bad[0].path}: {bad[0].reason}, ...")
    pixels = np.concatenate(maps)
    threshold = float(np.quantile(pixels, 1 - FRACTION))
    return {
        "threshold": threshold,
        "kept": float((pixels >= threshold).mean()),
        "val": data.val,
        "videos": len(maps),
        "pixels": pixels.size,
        "bad_videos": [[one.path, one.reason] for one in bad],
    }
