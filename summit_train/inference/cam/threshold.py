"""One threshold for class activation maps: it keeps a fifth of the pixels of the validation set (TSM, section 8)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import file_sha256, write_json
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.inference.cam.activation import Heatmap, Mapper
from summit_train.inference.videos import Follow

FILE = "cam.json"
FRACTION = 0.2  # of the pixels are foreground, in the paper and here
# A bin is a float32 without its last bits: of its sign, exponent and 11 bits of its significand.
_DROPPED_BITS = 12
_NUM_BINS = 1 << (32 - _DROPPED_BITS)


class MapHistogram:
    """Counts of any number of float32 values, in 8 MB: bins of 2**-11 of the value, whatever its size and sign."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Count finite values of any shape."""
        # -0.0 + 0.0 is 0.0: the two zeros are one value.
        bits = (values.astype(np.float32).ravel() + np.float32(0)).view(np.int32).astype(np.int64)
        bins, counts = np.unique(_in_order(bits) + (1 << 31) >> _DROPPED_BITS, return_counts=True)
        self._counts[bins] += counts

    @property
    def total(self) -> int:
        """Return the number of values."""
        return int(self._counts.sum())

    def threshold(self, fraction: float) -> tuple[float, float]:
        """Return the least value of the bin that holds the quantile, and the share of all values at or above it.

        The quantile is the k-th largest of n values with k = ceil(fraction * n), so that share is `fraction` or more.
        """
        at_or_above = np.cumsum(self._counts[::-1])[::-1]
        wanted = max(1, math.ceil(fraction * self.total - 1e-6))
        number = int(np.flatnonzero(at_or_above >= wanted)[-1])
        bits = _in_order(np.array((number << _DROPPED_BITS) - (1 << 31)))
        return float(bits.astype(np.int32).view(np.float32)), float(at_or_above[number] / self.total)


def _in_order(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bits of float32 values as integers of the values' order; the same function leads back."""
    ordered: NDArray[np.int64] = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return ordered


@dataclass(frozen=True)
class Threshold:
    """A threshold and what it was worked out from, as cam.json has it.

    threshold: of a map without bias; a place at or above it is foreground. fraction: of the validation set's pixels
    that were to be kept. kept: those that are, as the histogram has bins. videos, pixels: of the validation set that
    were counted. bad_videos: path and reason of those that could not be read. checkpoint, sha256, step: of the network.
    views: what the network sees of a video. val, manifest: the validation set and its fingerprint, with its quarantine.
    """

    threshold: float
    fraction: float
    kept: float
    videos: int
    pixels: int
    bad_videos: tuple[tuple[str, str], ...]
    checkpoint: str
    sha256: str
    step: int
    views: dict[str, Any]
    val: str
    manifest: str

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_json(path, asdict(self))

    def fits(self, mapper: Mapper, manifest: Manifest | None) -> bool:
        """Return whether it is of this network, these views and this validation set, as far as that is at hand."""
        if manifest is None:
            same_set = self.val == mapper.trained.spec.data.val
        else:
            same_set = self.manifest == _fingerprint(mapper, manifest)
        same_views = self.views == mapper.views() and self.fraction == FRACTION
        return same_set and same_views and self.sha256 == file_sha256(mapper.trained.path)


def threshold_for(mapper: Mapper, beside: Path, follow: Follow) -> tuple[Threshold, Path, bool]:
    """Return a network's threshold, the file that has it, and whether it was there before.

    The file is cam.json in the run's folder; `beside` for a lone checkpoint, and where the run may not be written to.
    It counts where it is of the same checkpoint, views and validation set; else the threshold is worked out and saved.
    Raises UserError where the validation set is then not there, and as `measure_threshold` does.
    """
    trained, data = mapper.trained, mapper.trained.spec.data
    manifest = read_manifest(data.val) if Path(data.val).exists() else None
    places = [beside] if trained.run_path is None else [trained.run_path / FILE, beside]
    for place in places:
        saved = load_threshold(place)
        if saved is not None and saved.fits(mapper, manifest):
            return saved, place, True
    if manifest is None:
        raise UserError(
            f"{trained.path}: its threshold is worked out from the validation set, and there is no {data.val} "
            f"(relative paths start at {Path.cwd()}); add data.val=MANIFEST data.root=DIR, or --threshold VALUE"
        )
    place = next(place for place in places if place == beside or os.access(place.parent, os.W_OK))
    measured = measure_threshold(mapper, manifest, follow)
    measured.save(place)
    return measured, place, False


def load_threshold(path: Path) -> Threshold | None:
    """Return what a file holds; None without it, and where it is not of this kind, so that it is written anew."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["bad_videos"] = tuple(tuple(bad) for bad in values["bad_videos"])
        return Threshold(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measure_threshold(mapper: Mapper, manifest: Manifest, follow: Follow) -> Threshold:
    """Work the threshold out from the predicted classes' maps of all validation videos, at their own low resolution.

    A bad video raises DecodeError or, with data.on_bad_clip "skip", is left out and named; more than
    data.max_bad_fraction of them raise RunFailed.
    """
    trained, data = mapper.trained, mapper.trained.spec.data
    kept = kept_clips(data, manifest)
    videos = kept.ids(np.arange(len(kept))).tolist()
    histogram, bad = MapHistogram(), list[BadClip]()
    heatmaps = mapper.heatmaps(open_store(data, manifest), videos, data.on_bad_clip)
    for found in follow(heatmaps, len(videos), "validation videos"):
        if isinstance(found, Heatmap):
            histogram.add(found.map)
        else:
            bad.append(found)
    if len(bad) > data.max_bad_fraction * len(videos) or len(bad) == len(videos):
        raise RunFailed(
            f"{data.val}: {len(bad)} of {len(videos)} videos could not be read, more than data.max_bad_fraction "
            f"({data.max_bad_fraction:g}): {bad[0].path}: {bad[0].reason}, ..."
        )
    value, share = histogram.threshold(FRACTION)
    return Threshold(
        threshold=value,
        fraction=FRACTION,
        kept=share,
        videos=len(videos) - len(bad),
        pixels=histogram.total,
        bad_videos=tuple((one.path, one.reason) for one in bad),
        checkpoint=str(trained.path),
        sha256=file_sha256(trained.path),
        step=trained.step,
        views=mapper.views(),
        val=data.val,
        manifest=_fingerprint(mapper, manifest),
    )


def _fingerprint(mapper: Mapper, manifest: Manifest) -> str:
    without = kept_clips(mapper.trained.spec.data, manifest).fingerprint()
    return manifest.fingerprint() + (f" without {without}" if without else "")
