"""`summit-train predict`: the classes of new videos, by a trained network, on any number of ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, write_text
from summit_train.core.progress import watched
from summit_train.core.session import session
from summit_train.core.text import counted, share, table
from summit_train.core.watch import Watchdog
from summit_train.evaluation.evaluation import show_accuracy
from summit_train.inference.arguments import add_network, add_videos, list_videos, open_named, tell_bad
from summit_train.inference.predict import PredictedVideo, Predictions, predict_videos
from summit_train.inference.trained import Trained
from summit_train.inference.videos import Listing
from summit_train.training.start import choose_device, split_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_network(parser)
    add_videos(parser)
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes of each video [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--csv", metavar="FILE", help="also write a row for each video")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override: evaluate.clips=1")


def run(args: argparse.Namespace) -> int:
    """Predict; rank 0 prints. Return 1 where a video could not be read, else 0."""
    launch = this_launch()
    with session(launch) as world:
        trained, listings = world.from_first(lambda: _prepared(args))
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
    """Check all that can be checked before the work starts, and print warnings. Raises UserError."""
    words, overrides = split_overrides([*args.videos, *args.overrides])
    if args.top < 1:
        raise UserError(f"--top must be 1 or more, got {args.top}")
    if args.csv is not None:
        check_output("--csv", args.csv, args.csv)
    trained = open_named(args.run, overrides, args.classes)
    listings = list_videos(words, trained, use_labels=True)
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
    tell_bad(predictions.bad, len(predictions.videos), "--json and --csv name all")


def _table(videos: Sequence[PredictedVideo]) -> str:
    """Return a row for each class of each video. Only the first has the path."""
    rows = [
        (str(video.clip) if rank == 0 else "", prediction.name, share(prediction.score))
        for video in videos
        for rank, prediction in enumerate(video.predictions)
    ]
    return table([("video", "class", "score"), *rows], indent="", left=2)
