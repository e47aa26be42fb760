"""`summit-train predict`: the classes of new videos, by a trained network, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from summit_train.commands.progress import watched
from summit_train.commands.ranks import session, this_launch
from summit_train.commands.start import choose_device, tell_overrides
from summit_train.data.video.span import WHOLE
from summit_train.errors import RunFailed, UserError
from summit_train.files import check_writable, write_text
from summit_train.inference.predict import PredictedVideo, Predictions, named, predict_videos
from summit_train.inference.trained import Trained, open_trained
from summit_train.inference.videos import Listing, list_named
from summit_train.text import counted, share, table
from summit_train.training.evaluation import show_accuracy
from summit_train.training.watch import Watchdog

_NAMED = 20  # unreadable videos on the screen; --json and --csv name all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="run directory (its newest checkpoint), or a checkpoint")
    what = "video, folder (searched for videos), folder of pictures, manifest, or packed set"
    parser.add_argument("videos", nargs="+", metavar="VIDEO", help=what)
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes of each video [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--csv", metavar="FILE", help="also write a row for each video")
    parser.add_argument("--classes", metavar="FILE", help="names of the classes, one a line, label 0 first")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override: evaluate.clips=1")


def run(args: argparse.Namespace) -> int:
    """Predict; rank 0 prints. Return 1 where a video could not be read, else 0."""
    launch = this_launch()
    with session(launch) as world:
        prepared = world.broadcast(_prepared(args) if world.rank == 0 else None)
        assert prepared is not None
        trained, listings = prepared
        with (
            Watchdog(world, trained.spec.watch.stall_seconds) as watchdog,
            watched("videos", "predicting video", world, watchdog) as progress,
        ):
            predictions = predict_videos(trained, listings, world, choose_device(world), args.top, progress)
        if predictions is not None:
            _report(predictions, args, trained.spec.model.num_classes)
        num_bad = world.broadcast(0 if predictions is None else len(predictions.bad))
    return 1 if num_bad else 0


def _prepared(args: argparse.Namespace) -> tuple[Trained, tuple[Listing, ...]]:
    """Check everything that can be checked before the work, and say what is to be said. Raises UserError."""
    words, overrides = tell_overrides([*args.videos, *args.overrides])
    if args.top < 1:
        raise UserError(f"--top {args.top}: the number of classes to show is wanted, 1 or more")
    if not words:
        raise UserError("there is no VIDEO: files, folders, manifests or packed sets are wanted")
    if args.csv is not None:
        try:
            check_writable(args.csv)
        except OSError as error:
            raise UserError(f"--csv {args.csv}: cannot be written: {error.strerror}") from error
    trained = named(open_trained(args.run, overrides), args.classes)
    listings, notes = list_named(words, trained.spec, trained.classes if trained.has_names else None)
    for note in notes:
        print(note, file=sys.stderr)
    if not trained.has_names:
        text = "has no names of its classes: they are shown as numbers; --classes FILE gives them names"
        print(f"{trained.path}: {text}", file=sys.stderr)
    return trained, listings


def _report(predictions: Predictions, args: argparse.Namespace, num_classes: int) -> None:
    """Print the predictions and write the CSV."""
    values = predictions.values()
    if args.json:
        print(json.dumps(values))
    else:
        if good := [video for video in predictions.videos if video.error is None]:
            print(_table(good))
        if "top1" in values:
            accuracy = show_accuracy(f"{values['top1']:.2f}", values["top5"], num_classes)
            print(f"{accuracy}  ({counted(values['videos_labelled'], 'labelled video')})")
    if args.csv is not None:
        try:
            write_text(args.csv, predictions.csv_text())
        except OSError as error:
            raise RunFailed(f"{args.csv}: cannot be written: {error.strerror}") from error
    bad = predictions.bad
    for video in bad[:_NAMED]:
        print(f"{video.path}: {video.error}", file=sys.stderr)
    if len(bad) > _NAMED:
        print(f"... and {len(bad) - _NAMED:,} more; --json and --csv name all", file=sys.stderr)
    if bad:
        print(f"summit-train: {len(bad):,} of {len(predictions.videos):,} videos could not be read", file=sys.stderr)


def _table(videos: Sequence[PredictedVideo]) -> str:
    """Return a row for each class of each video. The path stands in the first one."""
    rows = [
        (_place(video) if rank == 0 else "", prediction.name, share(prediction.score))
        for video in videos
        for rank, prediction in enumerate(video.predictions)
    ]
    text = table([("video", "class", "score"), *rows], indent="", left=2)
    # A terminal need not take the bytes of a name that is no UTF-8.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _place(video: PredictedVideo) -> str:
    """Return the path, with the frames where the clip is a span of its file, and its direction."""
    span = "" if video.span == WHOLE else f" {video.span}"
    return f"{video.path}{span}{' backwards' if video.is_reversed else ''}"
