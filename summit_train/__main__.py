"""Run one command of `summit-train COMMAND ...`, and import no other command's module."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

import summit_train
from summit_train.core.comm.launch import Launch, this_launch
from summit_train.core.errors import UserError, exit_status, is_bug
from summit_train.core.result import Result, show
from summit_train.core.session import report_failure
from summit_train.core.watch import STOP_SIGNALS

# command -> (module, what it does)
_COMMANDS = {
    "init": ("cli.init", "write a spec for a folder of your own videos, and name the next commands"),
    "configs": ("cli.configs", "list or print the shipped specs, presets, sweeps, sites and machines"),
    "plan": ("cli.plan", "every number of a run before the run"),
    "train": ("cli.train", "train, evaluate and report; in one process, with --ranks N, or under a launcher"),
    "eval": ("cli.evaluate", "accuracy of a run's checkpoints"),
    "baseline": ("cli.baseline", "the accuracy of a frozen network's features under logistic regression"),
    "predict": ("cli.predict", "the classes of new videos, by a trained network"),
    "stream": ("inference.stream.command", "the label of a video frame by frame, as it plays, by a past-only network"),
    "cam": ("inference.cam.command", "where a trained network looks: class activation maps of videos"),
    "export": ("inference.export.command", "a trained network, or its stream, as an ONNX file that was checked"),
    "fuse": ("cli.fuse", "scores of two or more runs on one validation set, combined"),
    "model": ("cli.model", "parameters, multiply-adds, T per stage, compute/IO"),
    "data": ("cli.data", "make, index and check data sets"),
    "submit": ("cli.submit", "submit a spec's job to the batch system, after printing its cost"),
    "bench": ("bench.command", "measure on this machine what limits a step"),
    "simulate": ("cli.simulate", "step time, run time and cost of a spec on N nodes of a machine"),
    "sweep": ("cli.sweep", "many runs from one file: plan, submit as a job array or run here, follow"),
    "report": ("cli.report", "one HTML page of one run, several, or all below a folder; export to other programs"),
    "doctor": ("cli.doctor", "what works on this machine, and how to fix what does not"),
    "build-horovod": ("cli.build_horovod", "build a patched Horovod, and install it and mpi4py into this environment"),
    "env": ("cli.env", "this Python environment as one file, for the nodes' own disks"),
    "schema": ("cli.schema", "the spec's JSON schema, for editors"),
    "completion": ("cli.completion", "the completion script of bash, zsh or fish"),
}
_WITH_JSON = (
    "plan", "eval", "baseline", "predict", "stream", "cam", "export", "fuse", "model", "simulate", "sweep", "report",
    "doctor", "configs",
)  # fmt: skip

_ONLY_PRINT = ("plan", "model", "simulate", "doctor", "schema", "configs", "completion")  # and fail without a reader

Run = Callable[[argparse.Namespace], Result]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0 done, 1 the run failed, 2 the input is wrong, 85 stopped."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        _start_in_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no work ends with a name that a terminal cannot show
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A request to stop that comes while `train` is imported waits for its handler, which unblocks them.
    waiting = STOP_SIGNALS if arguments[:1] == ["train"] else ()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        try:
            parser, command = _parser(arguments)
            args = parse_arguments(parser, arguments)
        except SystemExit:
            if not show(Result()):  # flushes a help text here, where an error can still be caught
                return 1
            raise
        result = command(args)
        is_read = show(result, as_json=getattr(args, "json", False))
        return result.status if is_read or args.writes else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        try:
            launch = this_launch()
        except UserError:
            launch = Launch("broken", 0, 1)  # which is what is wrong, or is said the next time
        if launch.size == 1 and is_bug(error):
            raise
        report_failure(error, launch)
        return exit_status(error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _start_in_utf8() -> None:
    """Start this process again with names of files in UTF-8, as lists hold them; output stays in the locale's encoding.

    Python chooses the encoding of names before it runs anything. The process keeps its id, descriptors and signals.
    """
    output = {"PYTHONIOENCODING": sys.stdout.encoding} if sys.stdout else {}
    environ = {**os.environ, "PYTHONUTF8": "1", **output}  # for the commands that this one starts
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environ)


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, Run]:
    parser = argparse.ArgumentParser(prog="summit-train", description="Train video models on supercomputers.")
    parser.add_argument("--version", action="version", version=f"summit-train {summit_train.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    run: Run = lambda args: Result(status=2)  # noqa: E731  (argparse refuses an unknown command)
    for name, (module_name, help_text) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name == chosen or chosen == "completion":  # which is of all commands
            module = importlib.import_module(f"summit_train.{module_name}")
            module.add_arguments(command)
            command.set_defaults(writes=name not in _ONLY_PRINT)
            if name == "completion":
                command.set_defaults(parser=parser)
            if name in _WITH_JSON:
                command.add_argument("--json", action="store_true", help="print JSON instead of text")
            run = module.run if name == chosen else run
    return parser, run


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; `key=value` may stand before and behind options, which argparse alone does not allow."""
    args, left = parser.parse_known_args(arguments)
    wrong = [word for word in left if word.startswith("-") or "=" not in word or "overrides" not in args]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if left:
        args.overrides = [*args.overrides, *left]
    return args


if __name__ == "__main__":
    sys.exit(main())
