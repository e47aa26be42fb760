"""`summit-train stream`: a trained past-only network on a video that goes on, frame by frame."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from io import FileIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.session import check_single
from summit_train.data.video.stream import PIPE, USUAL_FPS, Reading, StreamFrame, file_frames, pipe_frames, raw_frames
from summit_train.inference.arguments import add_network, open_named, tell_numbers
from summit_train.inference.stream.follow import Follower, Labelled
from summit_train.inference.stream.pace import Pace, Paced
from summit_train.inference.stream.show import Show
from summit_train.inference.stream.stream import CUT_THRESHOLD, Stream, open_stream, renderer, stride_of
from summit_train.inference.trained import Trained
from summit_train.training.start import choose_device

_INTERRUPTED = 130

Say = Callable[[Labelled], None]


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: WIDTHxHEIGHT in pixels is wanted, such as 640x480")
    return int(match[1]), int(match[2])


def _rate(text: str) -> Fraction:
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: frames a second are wanted, such as 25 or 30000/1001")
    return rate


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least} on is wanted")
        return int(text)

    return number


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 255:
        raise argparse.ArgumentTypeError(f"{text!r}: a difference of more than 0 and at most 255 levels is wanted")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_network(parser)
    parser.add_argument("video", metavar="VIDEO|-", help="video file, or - for a container on standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each frame that is seen")
    parser.add_argument("--raw", type=_size, metavar="WxH", help="standard input has raw RGB frames of this size")
    parser.add_argument("--fps", type=_rate, metavar="F", help=f"frames a second of --raw [{USUAL_FPS}]")
    parser.add_argument("--stride", type=_at_least(1), metavar="N", help="see every Nth frame [data.frame_stride]")
    parser.add_argument("--window", type=_at_least(0), metavar="N", help="average N frames; 0: all [data.num_frames]")
    parser.add_argument(
        "--reset-on-cut",
        type=_threshold,
        nargs="?",
        const=CUT_THRESHOLD,
        metavar="LEVELS",
        help=f"start anew where the picture changes by more than this [{CUT_THRESHOLD:g} of 255]",
    )
    parser.add_argument("--live", action="store_true", help="never wait: drop the oldest frames that come too fast")
    parser.add_argument("--show", metavar="OUT.mp4", help="write the video with the label drawn on it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> int:
    """Follow the video; return 0, or 130 after an interrupt. Raises RunFailed at the end of a damaged stream."""
    check_single("stream")
    reading, pace = Reading(), Pace()
    frames = _frames(args, reading)
    trained = open_named(args.run, args.overrides, args.classes)
    stream = open_stream(trained, choose_device(World()), args.window, args.reset_on_cut)
    stride = stride_of(trained.spec, args.stride)
    show = Show(args.show, args.video, reading) if args.show else None
    follower = Follower(stream, renderer(trained.spec.evaluate), trained.classes, reading, pace, show)
    frames = _announced(frames, args, trained, stride)
    paced = pace.strided(frames, stride, keep_skipped=show is not None and not args.live)
    with _signals(stream):
        is_interrupted = _follow(follower, pace.newest(paced) if args.live else paced, args.json)
    print(follower.summary(), file=sys.stderr)
    if reading.damage is not None and not is_interrupted:
        whole = reading.num_frames - reading.num_damaged
        raise RunFailed(f"{_name(args)}: {reading.damage}; {whole:,} whole frames were read")
    return _INTERRUPTED if is_interrupted else 0


def _frames(args: argparse.Namespace, reading: Reading) -> Iterator[StreamFrame]:
    """Return the source that is meant. Raises UserError where the arguments do not fit together."""
    if args.fps is not None and args.raw is None:
        raise UserError("--fps is for --raw: a video says itself when its frames are shown")
    if args.video != "-":
        if args.raw is not None:
            raise UserError(f"{args.video}: --raw is for frames on standard input, so - is wanted in its place")
        return file_frames(args.video, reading)
    if sys.stdin is not None and sys.stdin.isatty():
        raise UserError(f"{PIPE} is a terminal: send a video to it, as in ffmpeg ... -f matroska - | summit-train ...")
    # Unbuffered: what has come in is read at once.
    pipe = FileIO(0, closefd=False)
    if args.raw is None:
        return pipe_frames(pipe, reading)
    return raw_frames(pipe, args.raw, args.fps or USUAL_FPS, reading)


def _name(args: argparse.Namespace) -> str:
    return PIPE if args.video == "-" else str(args.video)


def _announced(
    frames: Iterable[StreamFrame], args: argparse.Namespace, trained: Trained, stride: int
) -> Iterator[StreamFrame]:
    """Yield the frames; before the first one say on stderr what streams and how, and what evaluation has otherwise."""
    is_said = False
    for frame in frames:
        if not is_said:
            is_said = True
            _announce(args, trained, stride)
        yield frame


def _announce(args: argparse.Namespace, trained: Trained, stride: int) -> None:
    window = trained.spec.data.num_frames if args.window is None else args.window
    spans = f"the average of the last {window}" if window else "the average of all since the start"
    which = "every frame" if stride == 1 else f"1 frame in {stride}"
    lines = [f"{trained.path}: {trained.spec.model.title}, {which}, {spans}; kill -USR1 {os.getpid()} starts anew"]
    if trained.spec.evaluate.crops == 3:
        lines.append("evaluate.crops is 3: a stream sees the centre crop alone")
    print("\n".join(lines), file=sys.stderr)
    tell_numbers(trained)


@contextmanager
def _signals(stream: Stream) -> Iterator[None]:
    """Reset the stream on SIGUSR1, and end it in order on SIGTERM as on SIGINT."""
    handlers = {signal.SIGUSR1: lambda *_: stream.reset(), signal.SIGTERM: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(follower: Follower, frames: Iterable[Paced], as_json: bool) -> bool:
    """Print the labels to the end; return whether a signal ended it. The show is finished in both cases."""
    say = _say_json if as_json else _Changes()
    with follower.show or nullcontext(), _status(follower, as_json) as show_status:
        try:
            for result in follower(frames):
                say(result)
                show_status(result)
        except KeyboardInterrupt:
            return True
    return False


def _say_json(result: Labelled) -> None:
    print(json.dumps(result.values()), flush=True)


class _Changes:
    """Prints a line for people where the label changes, or the stream starts anew."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._dropped = 0

    def __call__(self, result: Labelled) -> None:
        self._dropped += result.dropped
        if result.label != self._last or result.reset:
            notes = [f"{self._dropped:,} frames dropped before it"] if self._dropped else []
            notes += ["started anew"] if result.reset else []
            more = f"  ({', '.join(notes)})" if notes else ""
            print(f"{result.seconds:9.2f} s  {result.score:4.2f}  {result.name}{more}", flush=True)
            self._last, self._dropped = result.label, 0


@contextmanager
def _status(follower: Follower, as_json: bool) -> Iterator[Say]:
    """Keep a line on a terminal up to date: frames, their rate, the label; not among JSON lines there."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal or (as_json and sys.stdout.isatty()):
        yield lambda result: None
        return
    text = TextColumn("{task.description}", markup=False)
    # Rich would send what is printed to stderr, also where stdout is a file.
    with Progress(SpinnerColumn(), text, console=console, redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=None)

        def show(result: Labelled) -> None:
            frames = f"{follower.reading.num_frames:,} frames, {follower.frames_per_second:.1f}/s"
            dropped = f", {follower.pace.dropped:,} dropped" if follower.pace.dropped else ""
            label = f"{result.seconds:.1f} s  {result.score:.2f}  {result.name}"
            progress.update(task, description=f"{frames}{dropped}  {label}")

        yield show
