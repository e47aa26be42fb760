"""Prove on one NVIDIA GPU that the product is right there, and measure how fast it is. Started by bench/gpu.sh.

Each part is a process of its own with a time limit; one that fails is named and the rest goes on. OUT gets NAME.json
and NAME.log of each part, gpu.json with all of them, gpu.md with the table, and figures. Exit status: 0 every check
passes, 1 a check or a part fails, 2 the options are wrong or a package is missing. Without a GPU every part is skipped
with the reason, status 0.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parts import PARTS, Part
from runner import SLOWER, Ended, missing_packages, no_gpu, run


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts, then print and write what they found."""
    args = _arguments().parse_args(words)
    chosen = [part for part in PARTS if not args.only or part.name in args.only]
    if args.dry_run:
        for part in chosen:
            print(f"{part.name} ({part.group}, at most {part.limit_s:g} s): {part.about}")
            print(f"  {shlex.join(part.command(args.out.absolute(), args.rehearse))}")
        return 0
    reason = None if args.rehearse else no_gpu()
    if reason is not None:
        for part in chosen:
            print(f"skipped: {part.name} ({part.about}): {reason}")
        return 0
    if missing := missing_packages():
        print(f"{sys.executable} has no {', '.join(missing)}; --help says how to bring wheels", file=sys.stderr)
        return 2
    from summary import machine, show, values_of, write  # it needs those packages

    args.out.mkdir(parents=True, exist_ok=True)
    ended = _run_all(chosen, args)
    values = values_of(ended, machine(args.rehearse))
    write(values, args.out)
    print(show(values))
    return 0 if all(one.passes for one in ended) else 1


def _run_all(parts: Sequence[Part], args: argparse.Namespace) -> list[Ended]:
    """Run one part after another; those for which no time is left are named."""
    minutes = args.minutes * (SLOWER if args.rehearse else 1)
    until, ended = time.monotonic() + 60 * minutes, []
    for number, part in enumerate(parts, 1):
        left = until - time.monotonic()
        print(f"[{number}/{len(parts)}] {part.name}: {part.about}; {left:.0f} s left", file=sys.stderr, flush=True)
        ended.append(run(part, args.out.absolute(), args.rehearse, left))
        print(f"    {ended[-1].as_text()}", file=sys.stderr, flush=True)
    return ended


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for what is found")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9,
        metavar="X",
        help="for all parts together [9]; a rehearsal has eight times as many",
    )
    parser.add_argument("--dry-run", action="store_true", help="print each part's command and end")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny networks: does the code run?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
