"""Class activation maps of listed videos by one network or two, each with its threshold, and the files of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.files import replacing
from summit_train.core.text import csv_text
from summit_train.data.batches.loader import BadClip
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.inference.cam.activation import Heatmap, Mapper
from summit_train.inference.cam.threshold import FILE, Threshold, threshold_for
from summit_train.inference.videos import Follow, Listing

_BESIDE_FILE = "cam_beside.json"
_COLUMNS = ("network", "label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold")
_MOST_BYTES = 180  # of a name; file systems take 255, and endings are to come


@dataclass(frozen=True)
class MapNetwork:
    """A network with its threshold. record, file, was_saved: as of `threshold_for`; None where it was given."""

    mapper: Mapper
    threshold: float
    record: Threshold | None = None
    file: Path | None = None
    was_saved: bool = False

    @property
    def title(self) -> str:
        """Return its name for people."""
        spec = self.mapper.trained.spec
        return f"{spec.model.title} ({spec.name})"

    def values(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        trained = self.mapper.trained
        values: dict[str, Any] = {"name": trained.spec.name, "network": trained.spec.model.title, "was_saved": False}
        values |= {"checkpoint": str(trained.path), "views": self.mapper.views(), "threshold": self.threshold}
        if self.record is not None:
            values |= {"file": str(self.file), "was_saved": self.was_saved, **asdict(self.record)}
        return values


def with_thresholds(mappers: Sequence[Mapper], given: Sequence[float], out: Path, follow: Follow) -> list[MapNetwork]:
    """Return one network or two with their thresholds: those given, in order, else as `threshold_for` has them.

    out: the folder of their files where a run's own has none. Raises UserError for more thresholds than networks.
    """
    if len(given) > len(mappers):
        raise UserError(f"--threshold stands there {len(given)} times, for {len(mappers)} networks")
    networks = [MapNetwork(mapper, threshold) for mapper, threshold in zip(mappers, given, strict=False)]
    for number, mapper in list(enumerate(mappers))[len(given) :]:
        found = threshold_for(mapper, out / (_BESIDE_FILE if number else FILE), follow)
        networks.append(MapNetwork(mapper, found[0].threshold, *found))
    return networks


@dataclass(frozen=True)
class MappedVideo:
    """The maps of one video, one of each network. stem: the path of its files, without ending."""

    clip: Clip
    stem: Path
    maps: tuple[tuple[MapNetwork, Heatmap], ...]

    @property
    def strip(self) -> Path:
        """Return the path of its strip."""
        return self.stem.with_name(f"{self.stem.name}.png")

    def save(self) -> dict[str, Any]:
        """Write its maps as npz, and return what JSON has of it."""
        file = self.stem.with_name(f"{self.stem.name}.npz")
        save_maps(file, *((heatmap, network.threshold) for network, heatmap in self.maps))
        records = [{"network": network.title, **heatmap.record(network.threshold)} for network, heatmap in self.maps]
        return self.clip.values() | {"strip": str(self.strip), "maps": str(file), "networks": records}


def map_videos(
    networks: Sequence[MapNetwork], listings: Sequence[Listing], out: Path
) -> Iterator[MappedVideo | tuple[Clip, str]]:
    """Yield the maps of all videos, in their order, whose files go to `out`; or a video and why it cannot be read."""
    clips = [listing.clip(number) for listing in listings for number in listing.numbers]
    videos = iter(zip(clips, output_names([clip.path for clip in clips]), strict=True))
    # Opened before the long work: a packed set that is damaged is refused here.
    walks = [[_walk(network.mapper, listing) for network in networks] for listing in listings]
    for listing, walk in zip(listings, walks, strict=True):
        for found in zip(*walk, strict=True):
            clip, name = next(videos)
            bad = [one for one in found if isinstance(one, BadClip)]
            heatmaps = [one for one in found if isinstance(one, Heatmap)]
            if bad:
                yield clip, listing.reason(bad[0])
            else:
                yield MappedVideo(clip, out / name, tuple(zip(networks, heatmaps, strict=True)))


def _walk(mapper: Mapper, listing: Listing) -> Iterator[Heatmap | BadClip]:
    return mapper.heatmaps(listing.store(mapper.trained.spec.data), listing.numbers, "skip", predicted=False)


def output_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each video's output files, without ending: its stem, numbered where another one has it."""
    taken: set[str] = set()
    names = []
    for path in paths:
        stem = PurePath(path).stem.encode("utf-8", "surrogateescape")[:_MOST_BYTES].decode("utf-8", "ignore") or "video"
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        names.append(name)
    return names


def save_maps(path: Path, first: tuple[Heatmap, float], *others: tuple[Heatmap, float]) -> None:
    """Write the maps of one video by one network or two, each with its threshold, as npz, whole or not at all.

    `np.load` reads it without pickle. The second network's names begin with beside_.
    """
    arrays = first[0].values() | {"threshold": first[1]}
    for heatmap, threshold in others:
        values = heatmap.values() | {"threshold": threshold}
        arrays |= {f"beside_{name}": value for name, value in values.items()}
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)


def maps_csv(videos: Sequence[tuple[Clip, Mapping[str, Any]]]) -> str:
    """Return the table of videos and what `MappedVideo.save` returned: a line for each video and network."""
    lines = [(clip, video, row) for clip, video in videos for row in video["networks"]]
    rows = [[*(row[name] for name in _COLUMNS), video["strip"], video["maps"]] for _, video, row in lines]
    places = clip_columns([clip for clip, _, _ in lines])
    return csv_text([*place, *row] for place, row in zip(places, [[*_COLUMNS, "strip", "maps"], *rows], strict=True))
