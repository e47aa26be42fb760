"""What the commands that use a trained network share: arguments, checks, and what they say of networks and videos."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.inference.trained import Trained, named, open_trained
from summit_train.inference.videos import Listing, list_named

_NAMED = 20  # unreadable videos on the screen; the files that are written name all


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the network and the names of its classes."""
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="run directory (its newest checkpoint), or a checkpoint")
    parser.add_argument("--classes", metavar="FILE", help="names of the classes, one a line, label 0 first")


def add_videos(parser: argparse.ArgumentParser) -> None:
    """Add the videos."""
    what = "video, folder (searched for videos), folder of pictures, manifest, or packed set"
    parser.add_argument("videos", nargs="+", metavar="VIDEO", help=what)


def open_named(path: str, overrides: Sequence[str], names_file: str | None) -> Trained:
    """Open a network, with the names of its classes; say which newer checkpoints cannot be read. Raises UserError."""
    trained = named(open_trained(path, overrides), names_file)
    for complaint in trained.passed_over:
        print(f"passed over: {complaint}", file=sys.stderr)
    return trained


def tell_numbers(trained: Trained) -> None:
    """Say on stderr where the classes have no names."""
    if not trained.has_names:
        text = "has no names of its classes: they are shown as numbers; --classes FILE gives them names"
        print(f"{trained.path}: {text}", file=sys.stderr)


def list_videos(words: Sequence[str], trained: Trained, *, use_labels: bool) -> tuple[Listing, ...]:
    """Return the videos that words name, and say on stderr what is left out. Raises UserError."""
    if not words:
        raise UserError("there is no VIDEO: files, folders, manifests or packed sets are wanted")
    classes = trained.classes if trained.has_names else None
    listings, notes = list_named(words, trained.spec, classes, use_labels=use_labels)
    for note in notes:
        print(note, file=sys.stderr)
    return listings


def tell_bad(bad: Sequence[tuple[Clip, str]], num_videos: int, elsewhere: str) -> None:
    """Say on stderr which of the videos could not be read and why. elsewhere: what names all of them."""
    for clip, reason in bad[:_NAMED]:
        print(f"{clip}: {reason}", file=sys.stderr)
    if len(bad) > _NAMED:
        print(f"... and {len(bad) - _NAMED:,} more; {elsewhere}", file=sys.stderr)
    if bad:
        print(f"summit-train: {len(bad):,} of {num_videos:,} videos could not be read", file=sys.stderr)
