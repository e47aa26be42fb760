"""Where a trained network looks: class activation maps of videos (Lin et al., "TSM", journal version, section 8)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.text import listed
from summit_train.data.batches.loader import BadClip, TestBatch, test_batches
from summit_train.data.batches.stores import Store
from summit_train.inference.cam.network import ClassMaps, class_maps
from summit_train.inference.trained import Trained, flow_problem
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.spec.catalog import maps_problem

Bools = NDArray[np.bool_]
Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Heatmap:
    """The class activation map of one clip of a video.

    label, name: of the class that the map is of. score: its softmax probability. logit: the mean of the map plus the
    classifier's bias. map: (T', h, w), without the bias. frames: the clip's frame numbers in the video, int64 (T,).
    slices: the slice of the map that each frame belongs to, int64 (T,). pictures: the frames as the network saw them,
    uint8 RGB (T, H, W, 3).
    """

    path: str
    label: int
    name: str
    score: float
    logit: float
    map: NDArray[Any]
    frames: NDArray[np.int64]
    slices: NDArray[np.int64]
    pictures: Frames

    @property
    def mean(self) -> float:
        """Return the mean of the map: the logit without the bias."""
        return float(self.map.mean())

    @property
    def peak_frame(self) -> int:
        """Return the number of the frame at the map's greatest value; of the frames of one slice, the middle one."""
        peak = int(np.unravel_index(self.map.argmax(), self.map.shape)[0])
        its_frames = self.frames[self.slices == peak]
        return int(its_frames[len(its_frames) // 2])

    def foreground(self, places: Sequence[int], threshold: float) -> Bools:
        """Return which pixels of the clip's frames at these places are at or above a threshold, (n, H, W).

        The map is resized bilinearly in space, and not in time (section 8).
        """
        slices = torch.from_numpy(np.ascontiguousarray(self.map[self.slices[list(places)]]))
        size = self.pictures.shape[1:3]
        resized = functional.interpolate(slices[:, None], size, mode="bilinear", align_corners=False)[:, 0]
        above: Bools = resized.numpy() >= threshold
        return above

    def record(self, threshold: float) -> dict[str, Any]:
        """Return what tables say of it. foreground: the share of the map at or above the threshold."""
        return {
            "label": self.label, "class": self.name, "score": self.score, "logit": self.logit, "mean": self.mean,
            "peak_frame": self.peak_frame, "foreground": float((self.map >= threshold).mean()), "threshold": threshold,
        }  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Return what npz files hold of it; `label` is the number of the class, and a class of strings its name."""
        return {
            "map": self.map, "frames": self.frames, "slices": self.slices, "path": self.path,
            "label": self.label, "class": self.name, "score": self.score, "logit": self.logit,
        }  # fmt: skip


class Mapper:
    """Makes class activation maps of videos, with a trained network on a device.

    It sees one clip of a video, by the sampling of a test with one clip: the whole frame where evaluate.crops is full,
    else the centre square. label: the class to map; None for the predicted one of each clip.
    Raises UserError for a network that has no such maps, and where there is no such class.
    """

    def __init__(self, trained: Trained, device: torch.device, wanted: str | None = None) -> None:
        problem = maps_problem(trained.spec.model.arch) or flow_problem(trained.spec, "maps are drawn on pictures")
        if problem is not None:
            raise UserError(f"{trained.path}: {problem}")
        self.trained = trained
        self.label = None if wanted is None else label_of(trained, wanted)
        self._network = trained.network(device)
        self._device = device
        self._normalise = Normalise(parameter_type(trained.spec.precision), device, trained.spec.data.input)

    @property
    def crops(self) -> Literal[1, "full"]:
        """Return "full" for whole frames, 1 for the centre square."""
        return "full" if self.trained.spec.evaluate.crops == "full" else 1

    def views(self) -> dict[str, Any]:
        """Return what the network sees of a video, as plain values."""
        data = self.trained.spec.data
        return {
            "num_frames": data.num_frames,
            "sampling": data.sampling,
            "frame_stride": data.frame_stride if data.sampling == "dense" else None,
            "short_side": self.trained.spec.evaluate.short_side,
            "crop": "whole frame" if self.crops == "full" else "centre square",
            "precision": self.trained.spec.precision,
        }

    def heatmaps(
        self, store: Store, videos: Sequence[int], on_bad_clip: Literal["fail", "skip"], *, predicted: bool = True
    ) -> Iterator[Heatmap | BadClip]:
        """Yield the map of each of these videos of a store, or why there is none.

        predicted: of the predicted class, as the threshold wants it; else of `label`, where one was given. With
        on_bad_clip "fail" a bad video raises DecodeError. Raises RunFailed where the network gives NaN or infinity.
        """
        data = self.trained.spec.data.model_copy(update={"on_bad_clip": on_bad_clip})
        evaluate = self.trained.spec.evaluate.model_copy(update={"clips": 1, "crops": self.crops})
        label = None if predicted else self.label
        for batch in test_batches(data, evaluate, store, videos):
            yield batch.bad or self._heatmap(batch, store.manifest.path(batch.video), label)

    def _heatmap(self, batch: TestBatch, path: str, label: int | None) -> Heatmap:
        maps, logits = (tensor[0].cpu() for tensor in self.class_maps(batch.views))
        if not bool(torch.isfinite(maps).all()):
            raise RunFailed(f"{path}: the network of {self.trained.path} gives NaN or infinity")
        label = int(logits.argmax()) if label is None else label
        num_frames, num_slices = batch.frames.shape[1], maps.shape[1]
        return Heatmap(
            path=path,
            label=label,
            name=self.trained.classes[label],
            score=float(logits.double().softmax(0)[label]),
            logit=float(logits[label]),
            map=maps[label].numpy().copy(),  # not a view, which would keep the maps of all classes
            frames=batch.frames[0],
            slices=np.arange(num_frames) * num_slices // num_frames,
            pictures=batch.views[0].numpy(),
        )

    @torch.inference_mode()
    def class_maps(self, views_NTHWC: torch.Tensor) -> ClassMaps:
        """Return the maps of all classes, (N, num_classes, T', h, w), and the logits of uint8 clips."""
        with mixed_precision(self.trained.spec.precision, self._device):
            clips = self._normalise(views_NTHWC)
            features = self._network.feature_maps(self._network.to_input(clips))
        return class_maps(self._network, features, len(clips))


def label_of(trained: Trained, wanted: str) -> int:
    """Return the label of a class, given its label or its name. Raises UserError where there is none."""
    classes = trained.classes
    if wanted.isdecimal():
        if int(wanted) < len(classes):
            return int(wanted)
        raise UserError(f"{trained.path}: there is no class {wanted}; its labels go from 0 to {len(classes) - 1}")
    if wanted in classes:
        return classes.index(wanted)
    near = difflib.get_close_matches(wanted, classes, n=1)
    known = f"did you mean {near[0]!r}?" if near else f"it has {listed(classes)}"
    if not trained.has_names:
        known = f"it holds no names of classes; give a label from 0 to {len(classes) - 1}"
    raise UserError(f"{trained.path}: there is no class {wanted!r}; {known}")
