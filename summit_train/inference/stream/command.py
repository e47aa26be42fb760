"""`summit-train stream`: a trained past-only network on a live video, frame by frame."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from fractions import Fraction
from io import FileIO
from pathlib import Path

from summit_train.core.comm import World
from summit_train.core.device import choose_device
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output
from summit_train.core.result import Result, show, tell
from summit_train.core.session import check_single
from summit_train.data.video.augment import View
from summit_train.data.video.encode import Encoding, Write, open_writer
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.stream import PIPE, USUAL_FPS, Progress, StreamFrame, file_frames, pipe_frames, raw_frames
from summit_train.inference.arguments import add_network, checked, open_named
from summit_train.inference.stream.stream import Follower, Show, Stream, Values
from summit_train.inference.trained import Trained

_INTERRUPTED = 130
_ENDINGS = (".mp4", ".mkv", ".mov")
# The times of a stream's frames need not be multiples of anything.
_TICK = Fraction(1, 90_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = checked(
        lambda text: tuple(map(int, text.split("x"))),
        lambda size: len(size) == 2 and min(size) > 0,
        "WIDTHxHEIGHT in pixels, such as 640x480",
    )
    rate = checked(Fraction, lambda rate: rate > 0, "frames a second, such as 25 or 30000/1001")
    stride = checked(int, range(1, 10**9).__contains__, "1 or more")
    add_network(parser)
    parser.add_argument("video", metavar="VIDEO|-", help="video file, or - for a container on standard input")
    parser.add_argument("--raw", type=size, metavar="WxH", help="standard input has raw RGB frames of this size")
    parser.add_argument("--fps", type=rate, metavar="F", help=f"frames a second of --raw [{USUAL_FPS}]")
    parser.add_argument("--stride", type=stride, metavar="N", help="see every Nth frame [as in evaluation]")
    window = checked(int, range(10**9).__contains__, "0 or more")
    score = checked(float, lambda score: 0 <= score <= 1, "0 to 1")
    parser.add_argument("--window", type=window, metavar="N", help="average N frames; 0: all [data.num_frames]")
    parser.add_argument("--score", type=score, metavar="S", help="detectors: lowest score shown [0.5]")
    parser.add_argument("--live", action="store_true", help="never wait: drop the oldest frames that come too fast")
    parser.add_argument("--draw", metavar="OUT.mp4", help="write the video with what is found drawn on it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    """Follow the video. The status is 130 after an interrupt. Raises RunFailed at the end of a damaged stream."""
    check_single("stream")
    progress = Progress()
    frames = _frames(args, progress)
    trained = open_named(args, args.overrides)
    spec = trained.spec
    watcher = _watcher(args, trained)
    if args.stride is None and spec.data.sampling == "uniform":
        why = "the network was trained on frames spread over each video (data.sampling uniform)"
        raise UserError(f"{why}, without a fixed distance between frames: give one with --stride N")
    stride = args.stride or watcher.stride
    follower = Follower(watcher.see, progress, stride)
    is_interrupted = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stop ends the stream as Ctrl-C does
    try:
        with drawn_in(args.draw, args.video, progress, watcher.draw) if args.draw else nullcontext() as writer:
            try:
                _print(follower.follow(frames, live=args.live, show=writer), args, trained, watcher, stride)
            except KeyboardInterrupt:
                is_interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    tell(follower.summary())
    if progress.damage is not None and not is_interrupted:
        name = PIPE if args.video == "-" else args.video
        whole = progress.num_frames - progress.num_damaged
        raise RunFailed(f"{name}: {progress.damage}; {whole:,} whole frames were read")
    return Result(status=_INTERRUPTED if is_interrupted else 0)


def _frames(args: argparse.Namespace, progress: Progress) -> Iterator[StreamFrame]:
    """Return the frames of the source. Raises UserError for arguments that contradict each other."""
    if args.fps is not None and args.raw is None:
        raise UserError("--fps must be used with --raw; a video has its own frame times")
    if args.video != "-":
        if args.raw is not None:
            raise UserError(f"{args.video}: --raw is for frames on standard input; put - in its place")
        return file_frames(args.video, progress)
    if sys.stdin is not None and sys.stdin.isatty():
        raise UserError(f"{PIPE} is a terminal: send a video to it, as in ffmpeg ... -f matroska - | summit-train ...")
    # Unbuffered: what has come in is read at once.
    pipe = FileIO(0, closefd=False)
    if args.raw is None:
        return pipe_frames(pipe, progress)
    return raw_frames(pipe, args.raw, args.fps or USUAL_FPS, progress)


def _watcher(args: argparse.Namespace, trained: Trained) -> Stream:
    """Choose the stream of the network's task. Raises UserError for the other task's option."""
    if trained.spec.task == "detection":
        from summit_train.tasks.detection.stream import BoxFinder

        if args.window is not None:
            raise UserError("--window must be used with a classifier, and this network is a detector; leave it out")
        return BoxFinder(trained, choose_device(World()), args.score)
    from summit_train.tasks.classification.stream import Labeller

    if args.score is not None:
        raise UserError("--score must be used with a detector, and this network is a classifier; leave it out")
    return Labeller(trained, choose_device(World()), args.window)


def _print(results: Iterator[Values], args: argparse.Namespace, trained: Trained, watcher: Stream, stride: int) -> None:
    """Show what was seen in each frame, as text only where it changes; first, on stderr, what is followed."""
    last = None
    dropped = 0
    for result in results:
        if last is None:
            which = "every frame" if stride == 1 else f"1 frame in {stride}"
            tell(f"{trained.path}: {trained.spec.model.title}, {which}, {watcher.about}")
            if trained.spec.evaluate.crops == 3:
                tell("evaluate.crops is 3: a stream sees the centre crop alone")
        dropped += result.get("dropped", 0)
        text = []
        if watcher.key(result) != last:
            more = f"  ({dropped:,} frames dropped before it)" if dropped else ""
            text.append(f"{result['seconds']:9.2f} s  {watcher.text(result)}{more}")
            dropped = 0
        if not show(Result(text, values=result), as_json=args.json) and not args.draw:
            return  # it has no reader
        last = watcher.key(result)


@contextmanager
def drawn_in(path: str, source: str, progress: Progress, draw: Callable[[Frames, Values], Frames]) -> Iterator[Show]:
    """Yield a function that adds a frame with its values, if any, drawn to a copy of the video: upright, at its time.

    All frames get the size of the first. The file appears when the block ends; after an error nothing is left of it.
    Raises UserError at once if no video can be written to `path`, or it is the source.
    """
    if Path(path).suffix.lower() not in _ENDINGS:
        raise UserError(f"--draw must be a name that ends in {', '.join(_ENDINGS)}, got {path}")
    check_output("--draw", path, path, source)
    render: Renderer | None = None
    write: Write | None = None
    last = -1

    def add(frame: StreamFrame, values: Values | None) -> None:
        nonlocal render, write, last
        if render is None:
            width, height = upright_size(frame.decoded)
            render = Renderer([View(width, height, 0, 0, width, height)])
        (picture,) = render(frame.decoded)
        if write is None:
            size = (picture.shape[1], picture.shape[0])
            write = stack.enter_context(open_writer(path, size, progress.fps, Encoding(tick=_TICK)))
        last = max(round(frame.seconds / _TICK), last + 1)  # a container may give two frames one time
        write(picture if values is None else draw(picture, values), last)

    with ExitStack() as stack:
        yield add
