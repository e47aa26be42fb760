"""`summit-train train`: one spec -> a trained, evaluated and reported run, on whatever ranks it was started with."""

from __future__ import annotations

import argparse
import faulthandler
import sys

from summit_train.core.result import Result
from summit_train.core.watch import StopRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")
    parser.add_argument("--force-resume", action="store_true", help="resume from a checkpoint of another experiment")
    trace = "record what all ranks do in these steps, both included, in RUN/trace/ (for ui.perfetto.dev)"
    parser.add_argument("--trace", metavar="FROM:TO", help=trace)


def run(args: argparse.Namespace) -> Result:
    faulthandler.enable(sys.__stderr__ or 2)  # a crash in a library shows where every thread stood
    with StopRequest().listening() as stop:
        # Importing torch takes minutes where thousands of ranks read it from one file system. A signal that comes
        # meanwhile must not end the rank, so it is caught by now.
        from summit_train.cli.pipeline import run_pipeline

        return run_pipeline(args.spec, args.overrides, stop, force=args.force_resume, trace=args.trace)
