"""What the commands that use a trained network share: arguments, and notes on stderr about networks and videos."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from summit_train.core.errors import UserError
from summit_train.core.result import tell
from summit_train.data.manifest import read_classes
from summit_train.data.manifest.clip import Clip
from summit_train.inference.trained import Trained, open_trained

_MOST_BAD = 20  # unreadable videos on the screen; the files that are written name all
Value = TypeVar("Value")


def add_network(parser: argparse.ArgumentParser, *, videos: bool = False) -> None:
    """Add the network, the names of its classes and, for commands that take any number of them, the videos."""
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="run folder, or a checkpoint")
    which = "which checkpoint of a run folder: the newest, that of checkpoint.keep_best, or a file [last]"
    parser.add_argument("--checkpoint", default="last", metavar="last|best|PATH", help=which)
    parser.add_argument("--classes", metavar="FILE", help="names of the classes, one a line, label 0 first")
    if videos:
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


def open_named(args: argparse.Namespace, overrides: Sequence[str]) -> Trained:
    """Open the network of `add_network`'s arguments, with the names in a file, if given, for its classes.

    Notes on stderr: newer checkpoints that cannot be read, and missing names. Raises UserError.
    """
    trained = open_trained(args.run, overrides, args.checkpoint)
    names_file = args.classes
    for complaint in trained.passed_over:
        tell(f"passed over: {complaint}")
    if names_file is not None:
        names = read_classes(names_file)
        num_classes = trained.spec.model.num_classes
        if names is None or len(names) != num_classes:
            found = f"has {len(names or ())} names" if os.path.exists(names_file) else "no such file"
            what = f"it must name the {num_classes} classes of {trained.path}, one a line"
            raise UserError(f"{names_file}: {found}; {what}")
        return replace(trained, classes=names, has_names=True)
    if not trained.has_names:
        tell(f"{trained.path}: lacks the names of its classes: numbers are shown; --classes FILE gives them names")
    return trained


def report_bad(bad: Sequence[tuple[Clip, str]], num_videos: int, elsewhere: str) -> None:
    """Print to stderr which videos could not be read and why. elsewhere: what names all of them."""
    for clip, reason in bad[:_MOST_BAD]:
        tell(f"{clip}: {reason}")
    if len(bad) > _MOST_BAD:
        tell(f"... and {len(bad) - _MOST_BAD:,} more; {elsewhere}")
    if bad:
        tell(f"summit-train: {len(bad):,} of {num_videos:,} videos could not be read")
