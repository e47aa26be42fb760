"""`summit-train train`: one spec -> a trained, evaluated and reported run, on whatever ranks it was started with."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys

from summit_train.core.errors import UserError
from summit_train.core.ranks import PASSED_ON, run_ranks
from summit_train.core.result import Result, tell
from summit_train.core.watch import StopRequest
from summit_train.spec import run_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC|RUN", help="experiment spec (YAML), or a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")
    parser.add_argument("--more-epochs", type=int, metavar="N", help="train a run folder for N epochs more")
    begin = "begin a new run, NAME-from-STEP or name=, with this checkpoint of a run folder and other key=value"
    parser.add_argument("--from", dest="from_step", type=int, metavar="STEP", help=begin)
    trace = "record what all ranks do in these steps, both included, in RUN/trace/ (for ui.perfetto.dev)"
    parser.add_argument("--trace", metavar="FROM:TO", help=trace)
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks, on this machine or on --hosts")
    parser.add_argument("--hosts", metavar="A,B", help="start them on these hosts, with Open MPI's mpirun over ssh")


def run(args: argparse.Namespace) -> Result:
    if args.ranks is not None:
        return _start_ranks(args)
    if args.hosts is not None:
        raise UserError("--hosts must be used with --ranks N")
    faulthandler.enable(sys.__stderr__ or 2)  # a crash in a library shows where every thread stood
    with StopRequest().listening() as stop:
        # Importing torch takes minutes where thousands of ranks read it from one file system. A signal that comes
        # meanwhile must not end the rank, so it is caught by now.
        from summit_train.cli.pipeline import run_pipeline

        return run_pipeline(args, stop)


def _start_ranks(args: argparse.Namespace) -> Result:
    options = [] if args.trace is None else ["--trace", args.trace]
    options += [] if args.more_epochs is None else ["--more-epochs", str(args.more_epochs)]
    options += [] if args.from_step is None else ["--from", str(args.from_step)]
    hosts = [] if args.hosts is None else args.hosts.split(",")
    former = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # a request to stop waits for the ranks
    try:
        run_spec(args.spec, args.overrides)  # a mistake in it is said once, by no rank
        return Result(status=run_ranks(["train", args.spec, *args.overrides, *options], args.ranks, hosts, tell))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
