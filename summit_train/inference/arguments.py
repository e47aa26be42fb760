"""What the commands that use a trained network share: arguments, and notes on stderr about networks and videos."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.inference.trained import Trained, named, open_trained
from summit_train.inference.videos import Listing, list_named

_MOST_BAD = 20  # unreadable videos on the screen; the files that are written name all
Value = TypeVar("Value")


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the network and the names of its classes."""
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="run directory (its newest checkpoint), or a checkpoint")
    parser.add_argument("--classes", metavar="FILE", help="names of the classes, one a line, label 0 first")


def add_videos(parser: argparse.ArgumentParser) -> None:
    """Add the videos."""
    what = "video, folder (searched for videos), folder of pictures, manifest, or packed set"
    parser.add_argument("videos", nargs="+", metavar="VIDEO", help=what)


def checked(parse: Callable[[str], Value], is_right: Callable[[Value], bool], expected: str) -> Callable[[str], Value]:
    """Return an argument's `type`: what `parse` makes of its text. argparse reports that it must be `expected`."""

    def convert(text: str) -> Value:
        with suppress(ValueError, ZeroDivisionError):
            value = parse(text)
            if is_right(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")

    return convert


def open_named(path: str, overrides: Sequence[str], names_file: str | None) -> Trained:
    """Open a network with the names of its classes, and note newer checkpoints that cannot be read, missing names."""
    trained = named(open_trained(path, overrides), names_file)
    for complaint in trained.passed_over:
        print(f"passed over: {complaint}", file=sys.stderr)
    if not trained.has_names:
        text = "has no names of its classes: they are shown as numbers; --classes FILE gives them names"
        print(f"{trained.path}: {text}", file=sys.stderr)
    return trained


def list_videos(words: Sequence[str], trained: Trained, *, use_labels: bool) -> tuple[Listing, ...]:
    """Return the videos that words name, and note what is left out. Raises UserError."""
    if not words:
        raise UserError("there is no VIDEO: name files, folders, manifests or packed sets")
    classes = trained.classes if trained.has_names else None
    listings, notes = list_named(words, trained.spec, classes, use_labels=use_labels)
    for note in notes:
        print(note, file=sys.stderr)
    return listings


def report_bad(bad: Sequence[tuple[Clip, str]], num_videos: int, elsewhere: str) -> None:
    """Print to stderr which videos could not be read and why. elsewhere: what names all of them."""
    for clip, reason in bad[:_MOST_BAD]:
        print(f"{clip}: {reason}", file=sys.stderr)
    if len(bad) > _MOST_BAD:
        print(f"... and {len(bad) - _MOST_BAD:,} more; {elsewhere}", file=sys.stderr)
    if bad:
        print(f"summit-train: {len(bad):,} of {num_videos:,} videos could not be read", file=sys.stderr)
