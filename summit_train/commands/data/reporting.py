"""What `data index` and `data import` print and write of the clips that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from summit_train.data.manifest.quarantine import write_quarantine
from summit_train.data.video.source import DecodeError

SHOWN = 20  # lines of each list on the screen; the file has them all


def write_left_out(manifest: Path, left_out: Sequence[DecodeError]) -> None:
    """Write MANIFEST.left_out.csv, or delete an old one where nothing is left out."""
    path = manifest.with_name(f"{manifest.stem}.left_out.csv")
    path.unlink(missing_ok=True)
    if left_out:
        write_quarantine(path, left_out)
        print(f"wrote {path}: all {len(left_out):,} that are left out")


def show(what: str, lines: Sequence[object]) -> None:
    """Print a heading with the number of lines, and the first of them; nothing where there is none."""
    if lines:
        print(f"{what}: {len(lines):,}")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  ... and {len(lines) - SHOWN:,} more")
