"""`summit-train predict`: the classes of new videos, by a trained network, on any number of ranks."""

from __future__ import annotations

import argparse
from typing import Any

from summit_train.core.comm.launch import this_launch
from summit_train.core.device import choose_device
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, write_text
from summit_train.core.progress import watched
from summit_train.core.result import Result, TextTable, show, tell
from summit_train.core.session import session
from summit_train.core.text import counted, share
from summit_train.core.watch import Watchdog
from summit_train.evaluation.measures import measures_of
from summit_train.inference.arguments import add_network, open_named, report_bad
from summit_train.inference.predict import Predictions, predict_videos
from summit_train.inference.trained import Trained
from summit_train.inference.videos import VideoList, list_videos
from summit_train.spec.source import split_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser, videos=True)
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes of each video [%(default)s]")
    parser.add_argument("--csv", metavar="FILE", help="also write a row for each video")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override: evaluate.clips=1")


def run(args: argparse.Namespace) -> Result:
    """Predict. The status is 1 where a video could not be read."""
    with session(this_launch()) as world:
        network, videos = world.from_first(lambda: _prepared(args))
        trained = Trained.of_message(network)
        listings = [VideoList.of_message(each, trained.spec.data) for each in videos]
        with (
            Watchdog(world, trained.spec.watch.stall_seconds) as watchdog,
            watched("videos", "predicting video", world, watchdog) as progress,
        ):
            predictions = predict_videos(trained, listings, world, choose_device(world), args.top, progress)
        if predictions is not None:
            # A full disk behind one of the two outputs does not take the other with it.
            try:
                show(_result(predictions, trained.spec.model.num_classes), as_json=args.json)
            finally:
                _write(args.csv, predictions)
            bad = [(video.clip, video.error) for video in predictions.videos if video.error is not None]
            report_bad(bad, len(predictions.videos), "--json and --csv name all")
        has_bad = world.broadcast(predictions is not None and any(video.error for video in predictions.videos))
    return Result(status=1 if has_bad else 0)


def _prepared(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return messages with the trained network and with each list of videos.

    Check all that can be checked before the work starts, and print warnings. Raises UserError.
    """
    words, overrides = split_overrides([*args.videos, *args.overrides])
    if args.top < 1:
        raise UserError(f"--top must be 1 or more, got {args.top}")
    if args.csv is not None:
        check_output("--csv", args.csv, args.csv, *words)
    trained = open_named(args, overrides)
    trained.check_labels("predict")
    return trained.message(), [listing.message() for listing in list_videos(words, trained, tell)]


def _write(path: str | None, predictions: Predictions) -> None:
    try:
        if path is not None:
            write_text(path, predictions.csv_text())
    except OSError as error:
        raise RunFailed(f"{path}: cannot be written: {error.strerror}") from error


def _result(predictions: Predictions, num_classes: int) -> Result:
    """Return a row for each class of each video, of which only the first has the path, and the accuracy."""
    values = predictions.values()
    rows = [
        (str(video.clip) if rank == 0 else "", prediction["name"], share(prediction["score"]))
        for video in predictions.videos
        for rank, prediction in enumerate(video.predictions)
    ]
    text: list[str | TextTable] = [TextTable([("video", "class", "score"), *rows], left=2)] if rows else []
    if predictions.labelled is not None:
        measured = measures_of(predictions.labelled.kind, num_classes).text(values)
        text.append(f"{measured}  ({counted(values['videos_labelled'], 'labelled video')})")
    return Result(text, values=values)
