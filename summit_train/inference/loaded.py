"""A trained network and its input in Python: what `summit_train.load` returns."""

from __future__ import annotations

import difflib
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import test_batches
from summit_train.data.batches.stores import ArrayStore
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.reading import check_same_classes
from summit_train.inference.predict import most_probable
from summit_train.inference.trained import open_trained
from summit_train.inference.videos import VideoList, list_videos
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.plan import views_at_once

Video = str | Path | NDArray[np.uint8]  # an array is uint8 RGB (frames, height, width, 3)


class Sample(NamedTuple):
    """A video: its test clips as the network takes them, float (K, T, C, height, width), its label and its path.

    The label is a class number, with `loss.kind` binary a bool for each class, and None where it is not known.
    """

    clips: torch.Tensor
    label: int | NDArray[np.bool_] | None
    path: str


class Loaded:
    """A trained network and its input; call `summit_train.load`.

    `network`: the torch.nn.Module that `eval` runs, on `device` and in evaluation mode, from float clips (N, T, C,
    height, width) to logits (N, classes). `classes`: their names, label 0 first. `spec`: the experiment, with the
    overrides. `path`, `step`: of the checkpoint.
    """

    def __init__(
        self, run: str | Path, overrides: Sequence[str], checkpoint: str, device: str | torch.device | None
    ) -> None:
        if not all(isinstance(word, str) for word in overrides):
            raise UserError(f'overrides must be text, as in load(run, "evaluate.clips=1"), got {overrides}')
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device must be cpu, or cuda where torch finds a GPU, got {device}") from error
        words = ("data.workers=0", *overrides)  # workers would start the user's script again
        self._trained = trained = open_trained(run, words, checkpoint)
        trained.check_labels("summit_train.load")
        if trained.spec.evaluate.mode == "stream":
            raise UserError("evaluate.mode must be clips, got stream; load with evaluate.mode=clips")
        for complaint in trained.passed_over:
            warnings.warn(f"passed over: {complaint}", stacklevel=3)
        if trained.spec.evaluate.precise_bn:
            warnings.warn("evaluate.precise_bn is ignored: BN keeps the statistics of the checkpoint", stacklevel=3)
        self.spec = trained.spec
        self.classes = trained.classes
        self.path = trained.path
        self.step = trained.step
        self.network = trained.network(self.device)
        self._type = parameter_type(self.spec.precision)
        self._normalise = Normalise(self._type, self.device, self.spec.data.input)

    @cached_property
    def plain(self) -> VideoNetwork:
        """The network of plain torch layers, for hooks; built at first use."""
        return self._trained.network(self.device, ready=False)

    def samples(self, source: Video = "val") -> Iterator[Sample]:
        """Return the videos of a data set in order, each in the test views of `spec.evaluate`, as `eval` sees them.

        `source`: `"val"` or `"train"` of the run, what `predict` takes (a list, packed set, folder or video), or an
        array, uint8 RGB (frames, height, width, 3). A video that cannot be read raises UserError, or is left out
        with a warning, as `data.on_bad_clip` says.
        """
        return self._read(self._dataset(source))

    def preprocess(self, video: Video) -> torch.Tensor:
        """Return the clips of one video, as in `samples`."""
        found = list(islice(self.samples(video), 2))
        if len(found) != 1:
            raise UserError(f"{video}: must be one video, got {'several; try samples' if found else 'none'}")
        return found[0].clips

    def logits(self, clips: torch.Tensor) -> torch.Tensor:
        """Return the logits of one video, float64 (classes,): the mean over its clips, computed as `eval` does."""
        with torch.no_grad(), mixed_precision(self.spec.precision, self.device):
            return torch.cat([self.network(part) for part in self._parts(clips)]).double().mean(0)

    def predict(self, clips: torch.Tensor, top: int = 5) -> list[dict[str, Any]]:
        """Return label, name and score (the probability) of the most probable classes of one video."""
        if top < 1:
            raise UserError(f"top must be at least 1, got {top}")
        return most_probable(self.logits(clips).cpu().numpy(), self.classes, top, self.spec.loss.base)

    def features(self, clips: torch.Tensor, layer: str) -> torch.Tensor:
        """Return the output of a layer of `plain`, by its name in `named_modules`, in the type of the weights.

        2D networks have a row a frame. Several threads may call it.
        """
        plain = self.plain  # threads that build it at once have one each
        thread = threading.get_ident()
        modules = {name: module for name, module in plain.named_modules() if name}
        if layer not in modules:
            near = difflib.get_close_matches(layer, modules, 1) or [name for name in modules if "." not in name]
            raise UserError(f"layer must be a module of the network, got {layer!r}; try {', '.join(near)}")
        outputs = list[list[torch.Tensor]]()  # of each part

        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and threading.get_ident() == thread:  # a hook hears every thread
                # The last one, if it runs again. A copy: the next layer may work in place.
                outputs[-1] = [output.to(self._type, copy=True)]

        hook = modules[layer].register_forward_hook(keep)
        with hook, torch.no_grad(), mixed_precision(self.spec.precision, self.device):
            for part in self._parts(clips):
                outputs.append([])
                plain(part)
        if not outputs[0]:
            raise UserError(f"layer {layer!r} does not run in a forward pass, or gives no tensor")
        return torch.cat([output for (output,) in outputs])

    def _parts(self, clips: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(clips, views_at_once(self.spec, clips.shape[-2] * clips.shape[-1]))

    def _dataset(self, source: Video) -> Dataset:
        if isinstance(source, np.ndarray):
            self._trained.check_pictures(None)
            if source.dtype != np.uint8 or source.ndim != 4 or source.shape[-1] != 3 or not source.size:
                got = f"{source.dtype} {source.shape}"
                raise UserError(f"an array must be uint8 (frames, height, width, 3), got {got}")
            manifest = plain_manifest(["array"])
            return VideoList(self.spec.data, manifest, ArrayStore(manifest, source))
        if not isinstance(source, str | Path):
            raise UserError(f"a video must be a path or a uint8 array, got {type(source).__name__}")
        if source not in ("train", "val"):
            return list_videos([str(source)], self._trained, lambda line: warnings.warn(line, stacklevel=6))[0]
        dataset = Dataset.open(self.spec, str(source))
        if self._trained.has_names:
            check_same_classes(self.path, self.classes, dataset.manifest.source, dataset.manifest.classes)
        return dataset

    def _read(self, dataset: Dataset) -> Iterator[Sample]:
        spec = self.spec
        manifest = dataset.manifest
        clips = np.arange(len(dataset))
        labels = manifest.class_labels(clips, spec.multi_label_classes)
        is_known = not isinstance(dataset, VideoList) or dataset.has_labels
        with test_batches(spec.data, spec.evaluate, dataset.store, clips.tolist()) as batches:
            for batch, label in zip(batches, labels, strict=True):
                if batch.bad is not None:
                    warnings.warn(f"left out: {batch.bad.path}: {batch.bad.reason}", stacklevel=2)
                    continue
                known = label if label.ndim else int(label)
                yield Sample(self._normalise(batch.views), known if is_known else None, manifest.path(batch.video))
