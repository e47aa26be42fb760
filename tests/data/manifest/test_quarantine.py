from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.data.manifest import Manifest, ManifestError, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.quarantine import Kept, kept_clips, read_quarantine, write_quarantine
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec

NAMES = ["a.mp4", "b, c.mp4", "ä 視.mp4", os.fsdecode(b"n\xff.mp4"), "e.mp4", "a.mp4"]


def _manifest(folder: Path) -> Manifest:
    write_manifest(folder / "list.csv", [ManifestRow(name, n, reversed=n == 5) for n, name in enumerate(NAMES)])
    return read_manifest(folder / "list.csv")


def _data(**changes: Any) -> DataSpec:
    return DataSpec(train="x", val="x", **changes)


def test_kept_places_are_the_clips_between_the_excluded_ones() -> None:
    for excluded in ([], [0], [9], [0, 1, 2], [3, 4, 9], [1, 3, 5, 7], list(range(9))):
        kept = Kept(10, np.array(excluded, np.int64))
        wanted = [clip for clip in range(10) if clip not in excluded]
        assert len(kept) == len(wanted)
        assert kept.ids(np.arange(len(kept))).tolist() == wanted


def test_what_is_written_is_found_in_the_manifest(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    bad = [DecodeError(NAMES[n], f"reason, {n}") for n in (0, 1, 3)]
    write_quarantine(tmp_path / "bad.csv", bad)
    assert read_quarantine(tmp_path / "bad.csv") == [(error.path, error.reason) for error in bad]
    kept = kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest)
    # The clip that stands there in both directions is out in both.
    assert kept.ids(np.arange(len(kept))).tolist() == [2, 4]
    assert kept.fingerprint() != Kept(6, np.array([0, 1, 5])).fingerprint()


def test_class_folders_are_found_too(tmp_path: Path) -> None:
    for name in ("run/a.mp4", "walk/b.mp4"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        (tmp_path / "set" / name).touch()
    manifest = read_manifest(tmp_path / "set")
    write_quarantine(tmp_path / "bad.csv", [DecodeError(manifest.path(1), "is empty")])
    assert kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest).excluded.tolist() == [1]


def test_no_list_keeps_all(tmp_path: Path) -> None:
    kept = kept_clips(_data(), _manifest(tmp_path))
    assert (len(kept), kept.fingerprint()) == (6, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("", "bad.csv:1: wanted the header path,reason"),
        ("path,label\na,0\n", "bad.csv:1: wanted the header"),
        ("path,reason\na,b,c\n", "bad.csv:2: wanted a path and a reason, got 3 fields"),
        ("path,reason\n" + "".join(f'"{name}",x\n' for name in NAMES), "names every clip"),
    ],
)
def test_a_list_that_cannot_be_used(tmp_path: Path, text: str | None, reason: str) -> None:
    manifest = _manifest(tmp_path)
    if text is not None:
        (tmp_path / "bad.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ManifestError, match=reason):
        kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest)
