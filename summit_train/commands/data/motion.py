"""`summit-train data motion`: the embedded data set."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.commands.data.progress import followed
from summit_train.data.motion import KINDS, MotionSet, write_motion_set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    usual = MotionSet()
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that gets videos/, train.csv and val.csv")
    parser.add_argument("--train", type=int, metavar="N", required=True, help="training videos")
    parser.add_argument("--val", type=int, metavar="N", required=True, help="validation videos")
    parser.add_argument("--size", type=int, default=usual.size, help="pixels of a side [%(default)s]")
    parser.add_argument("--frames", type=int, default=usual.num_frames, help="frames a video [%(default)s]")
    parser.add_argument("--classes", type=int, default=usual.num_classes, help="how many [%(default)s]")
    parser.add_argument("--seed", type=int, default=usual.seed, help="[%(default)s]")
    parser.add_argument("--kind", choices=KINDS, default=usual.kind, help="what tells the classes [%(default)s]")
    parser.add_argument("--difficulty", type=float, default=usual.difficulty, help="0 to 1 [%(default)s]")


def run(args: argparse.Namespace) -> int:
    """Write the set; 0 when done."""
    videos = MotionSet(args.size, args.frames, args.classes, args.seed, args.kind, args.difficulty)
    total = args.train + args.val
    rows = list(followed(write_motion_set(args.out, args.train, args.val, videos), total, "videos"))
    print(f"{len(rows)} videos of {videos.num_classes} classes: {', '.join(videos.classes)}")
    print(f"data.train={args.out / 'train.csv'} data.val={args.out / 'val.csv'} data.root={args.out}")
    return 0
