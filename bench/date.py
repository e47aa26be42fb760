"""DATE's own small tasks, trained by this program's solvers, trust ratios, schedules and steps.

    python bench/date.py lenet --data MNIST                   RMSprop at 256 and 8,192, section 3.5
    python bench/date.py lenet_momentum --data MNIST          the worked example, section 3.6
    mpirun -np 2 python bench/date.py lstm --data MNIST       4.1.1, Figures 16 and 17
    python bench/date.py ptb --data PTB --methods date,adam --batches 640 --seeds 0,1

Each run's result goes to --out as it ends, and a run whose result is there is not made again. Every call ends with the
table and the figure of all results of the task in --out. Methods, at a batch B with the baseline's B0:

    baseline  the paper's baseline, at B0
    linear    its LR x B / B0, its schedule
    legw      its LR x sqrt(B / B0), warm-up of as many steps as the baseline's, linear decay
    lars      legw with the trust ratio of LARS
    date      legw with the bounded trust ratio
    adam      constant LRs, --lrs
    grid      the baseline's schedule with each of the LRs, --lrs
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from date_data import Data, Share
from date_results import read_results, show_figure, table_text, write_figure
from date_tasks import TASKS, Task
from date_train import Run, Trainer, recipe, share_of

from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError, exit_status
from summit_train.core.files import check_writable, write_json
from summit_train.core.progress import shown
from summit_train.core.session import report_failure, session
from summit_train.core.text import duration
from summit_train.training.environment import environment
from summit_train.training.start import choose_device

METHODS = ("baseline", "linear", "legw", "lars", "date", "adam", "grid")


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, then draw and print."""
    args, launch = _arguments(argv), this_launch()
    try:
        runs, data = list(runs_of(TASKS[args.task], args)), TASKS[args.task].read(args.data)
        for run in runs:
            # What cannot be trained is refused before anything is.
            _share(run, data, args, launch.rank, launch.size)
            recipe(TASKS[run.task], run, data.num_samples)
        check_writable(args.out / f"{args.task}.png")
    except (UserError, OSError) as error:
        report_failure(error, launch)
        return exit_status(error)
    with session(launch) as world:
        train_missing(runs, data, args, world)
        if world.rank == 0:
            show_results(args)
    return 0


def show_results(args: argparse.Namespace) -> None:
    """Draw and print all results of the task that are in --out."""
    task, results = TASKS[args.task], read_results(args.out, args.task)
    write_figure(args.out / f"{args.task}.png", task, results)
    print(json.dumps({"task": args.task, "results": results}) if args.json else table_text(task, results))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's IDX files or of ptb.*.txt (.gz)")
    parser.add_argument("--out", type=Path, default=Path("date"), help="folder of the results [date]")
    parser.add_argument("--methods", type=_listed(str), default=METHODS, help=f"of {', '.join(METHODS)} [all]")
    parser.add_argument("--batches", type=_listed(int), help="[the paper's; grid: the largest]")
    parser.add_argument("--seeds", type=_listed(int), default=(0,), help="[0]")
    parser.add_argument("--lrs", type=_listed(float), help="LRs of adam and grid; baselines of the others [the task's]")
    parser.add_argument("--epochs", type=int, help="[the paper's]")
    parser.add_argument("--bounds", type=float, nargs=2, metavar=("LOWER", "UPPER"), help="of date's ratio [0.1 10]")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--samples", type=int, help="of a virtual GPU, at most [the task's]")
    parser.add_argument("--json", action="store_true", help="one JSON object of all results on stdout")
    return parser.parse_args(argv)


def _listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        return tuple(kind(word) for word in text.split(","))

    read.__name__ = "comma-separated"  # argparse: "invalid comma-separated value"
    return read


# --- what to run


def runs_of(task: Task, args: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that the arguments ask for. Raises UserError for values that no run can have."""
    for method in args.methods:
        if method not in METHODS:
            raise UserError(f"--methods: there is no {method!r}; there are {', '.join(METHODS)}")
    numbers = {"--batches": args.batches, "--lrs": args.lrs, "--epochs": args.epochs and (args.epochs,)}
    for option, values in (numbers | {"--samples": args.samples and (args.samples,)}).items():
        if any(not 0 < value < math.inf for value in values or ()):
            raise UserError(f"{option}: {', '.join(map(str, values))}; all have to be above 0")
    if args.bounds and not 0 < args.bounds[0] <= args.bounds[1]:
        raise UserError("--bounds: {:g} {:g}; 0 < LOWER <= UPPER is wanted".format(*args.bounds))
    for method, seed in itertools.product(args.methods, args.seeds):
        for batch, lr in itertools.product(_batches(task, method, args), _lrs(task, method, args)):
            bounds = tuple(args.bounds) if args.bounds and method == "date" else None
            epochs = args.epochs or task.schedule.epochs
            yield Run(args.task, method, batch, lr, seed, epochs, args.precision, bounds)


def _batches(task: Task, method: str, args: argparse.Namespace) -> tuple[int, ...]:
    if method == "baseline":
        return task.batches[:1]
    usual = task.batches[-1:] if method == "grid" else task.batches[1:]
    return args.batches or usual


def _lrs(task: Task, method: str, args: argparse.Namespace) -> tuple[float | None, ...]:
    usual = {"adam": task.adam_lrs, "grid": task.grid_lrs}
    return args.lrs or usual.get(method, (None,))


# --- train


def train_missing(runs: list[Run], data: Data, args: argparse.Namespace, world: World) -> None:
    """Train the runs that have no result in --out yet, and write theirs. Collective."""
    device = choose_device(world)
    missing = world.broadcast([run for run in runs if not _path(args, run).exists()])
    if world.rank == 0 and len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {args.out} already", file=sys.stderr)
    hosts = world.gather(world.host)
    shares = {run: _share(run, data, args, world.rank, world.size) for run in missing}
    done, total = 0, sum(run.epochs * shares[run].steps * run.batch for run in missing)
    with shown("samples", world, in_logs=True) as show:

        def tell(samples: int) -> None:
            nonlocal done
            done += samples
            show(done, total)

        for run in missing:
            result = Trainer(run, data, shares[run], world, device).train(tell)
            if world.rank == 0:
                write_json(_path(args, run), result | {"environment": environment(world, device, hosts or [])})
                figure = f"{TASKS[run.task].metric} {show_figure(result['test'])}"
                print(f"{run.name}: {figure}, {duration(result['seconds'])}", file=sys.stderr)


def _share(run: Run, data: Data, args: argparse.Namespace, rank: int, ranks: int) -> Share:
    return share_of(run, data.num_samples, args.samples or TASKS[run.task].samples, rank, ranks)


def _path(args: argparse.Namespace, run: Run) -> Path:
    folder: Path = args.out
    return folder / f"{run.name}.json"


if __name__ == "__main__":
    sys.exit(main())
