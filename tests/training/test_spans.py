"""Training on clips that are spans of their files: the same losses from files, cut files and packed sets."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from av import open as open_video

from summit_train.__main__ import main
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.video.span import Span
from summit_train.spec import load_spec
from tests.conftest import WriteSpec
from tests.runs import records
from tests.worlds import train

SPANS = (Span(0, 5), Span(2))


def _train(spec: Path) -> tuple[list[float], float]:
    """The losses of an epoch's steps, and the result of the test."""
    train(0, spec, "schedule.epochs=1", "schedule.warmup_epochs=0")
    run = load_spec(spec).run_path
    tested = json.loads((run / "eval.json").read_text())
    return [step["loss"] for step in records(run, "step")], tested["top1_mean"]


def _packed(folder: Path, kind: str, name: str) -> str:
    out = folder / kind / name
    words = [str(folder / f"{name}.csv"), str(out), "--kind", kind, "--root", str(folder)]
    assert main(["data", "pack", *words, "--shard-size", "20K", "--workers", "0"]) == 0
    return str(out)


def _data(folder: Path, kind: str | None) -> dict[str, Any]:
    if kind is None:
        return {"train": str(folder / "train.csv"), "val": str(folder / "val.csv"), "root": str(folder)}
    return {side: _packed(folder, kind, side) for side in ("train", "val")}


@pytest.fixture(scope="session")
def videos(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each video of the embedded set as two spans, of which every third clip plays backwards."""
    folder = tmp_path_factory.mktemp("videos")
    for name in ("train", "val"):
        manifest = read_manifest(motion_set / f"{name}.csv")
        files = [manifest.row(clip) for clip in range(0, len(manifest), 2)]
        clips = [replace(row, path=str(motion_set / row.path)).with_span(span) for row in files for span in SPANS]
        write_manifest(folder / f"{name}.csv", [replace(row, reversed=n % 3 == 0) for n, row in enumerate(clips)])
    return folder


@pytest.fixture(scope="session")
def pictures(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same clips as spans of folders of JPEG pictures; cut/ has them as folders of their own."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("train", "val"):
        with open(videos / f"{name}.csv", encoding="utf-8") as file:
            paths = {row["path"]: None for row in csv.DictReader(file)}
        stems = {path: f"{name}/{Path(path).stem}" for path in paths}
        for path, stem in stems.items():
            (folder / stem).mkdir(parents=True)
            with open_video(path) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    frame.save(str(folder / stem / f"{number:05}.jpg"))
        manifest = read_manifest(videos / f"{name}.csv")
        rows = [manifest.row(clip) for clip in range(len(manifest))]
        clips = [replace(row, path=stems[row.path], num_frames=None) for row in rows]
        write_manifest(folder / f"{name}.csv", clips)
        write_manifest(folder / "cut" / f"{name}.csv", [_cut(folder, n, row) for n, row in enumerate(clips)])
    return folder


def _cut(folder: Path, number: int, row: ManifestRow) -> ManifestRow:
    files = sorted(os.listdir(folder / row.path))
    path = f"{row.path}_{number}"
    (folder / "cut" / path).mkdir(parents=True)
    for frame in row.span.frames(row.path, len(files)):
        os.link(folder / row.path / files[frame], folder / "cut" / path / files[frame])
    return ManifestRow(path, row.label, reversed=row.reversed)


def test_videos_and_their_packed_bytes_train_to_the_bit(write_spec: WriteSpec, videos: Path) -> None:
    losses = _train(write_spec("files", data=_data(videos, None)))
    assert _train(write_spec("bytes", data=_data(videos, "bytes"))) == losses
    assert len(losses[0]) >= 10


def test_pictures_train_to_the_bit_packed_both_ways_and_cut(write_spec: WriteSpec, pictures: Path) -> None:
    losses = _train(write_spec("files", data=_data(pictures, None)))
    assert _train(write_spec("cut", data=_data(pictures / "cut", None))) == losses
    for kind in ("bytes", "jpeg"):
        assert _train(write_spec(kind, data=_data(pictures, kind))) == losses
