"""The data commands where clips are spans of their files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.data import check
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.quarantine import read_quarantine
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import Span


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Five clips of a file of 20 frames, of which two lie outside it, and one of a file that is no video."""
    write_video(tmp_path / "a.mp4", np.zeros((20, 16, 16, 3), np.uint8))
    (tmp_path / "torn.mp4").write_text("x")
    rows = "a.mp4,0,0,8\na.mp4,1,8,\na.mp4,0,15,21\na.mp4,1,,\na.mp4,0,20,\ntorn.mp4,1,2,3\n"
    (tmp_path / "list.csv").write_text(f"path,label,start_frame,end_frame\n{rows}")
    return tmp_path / "list.csv"


def test_index_decodes_and_hashes_a_file_once(
    listed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined = list[str]()

    def examine(root: str, path: str) -> check.Found:
        examined.append(path)
        return known(root, path)

    known = check.examine
    monkeypatch.setattr(check, "examine", examine)
    out = listed.parent / "indexed.csv"
    assert main(["data", "index", str(listed), "--out", str(out), "--workers", "0", "--min-frames", "9"]) == 0
    assert examined == ["a.mp4", "torn.mp4"]
    manifest, digest = read_manifest(out), hashlib.sha256((listed.parent / "a.mp4").read_bytes()).digest()
    assert [manifest.span(clip) for clip in range(len(manifest))] == [Span(8), Span()]
    assert [manifest.num_frames(clip) for clip in range(2)] == [20, 20]
    assert [manifest.sha256(clip) for clip in range(2)] == [digest, digest]
    printed = capsys.readouterr().out
    assert "2 clips, 32 frames, 2 classes" in printed
    assert "left out, too short: 1\n  a.mp4: has 8 frames, fewer than 9" in printed
    assert "a.mp4: has 20 frames, and the span 15:21 does not lie among them" in printed
    left_out = read_quarantine(listed.parent / "indexed.left_out.csv")
    spans = [("a.mp4", Span(15, 21)), ("a.mp4", Span(20)), ("torn.mp4", Span()), ("a.mp4", Span(0, 8))]
    assert [(error.path, error.span) for error in left_out] == spans


def test_scan_names_spans_outside_their_file(listed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = listed.parent / "bad.csv"
    assert main(["data", "scan", str(listed), "--out", str(bad), "--workers", "0"]) == 0
    found = [(error.path, error.span) for error in read_quarantine(bad)]
    assert found == [("a.mp4", Span(15, 21)), ("a.mp4", Span(20)), ("torn.mp4", Span())]
    assert "2 videos decoded for 6 clips, 3 bad" in capsys.readouterr().out
