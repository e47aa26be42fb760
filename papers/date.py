"""DATE's own small tasks, trained by this program's solvers, trust ratios, schedules and steps.

    python papers/date.py lenet --data MNIST                   RMSprop at 256 and 8,192, section 3.5
    python papers/date.py lenet_momentum --data MNIST          the worked example, section 3.6
    mpirun -np 2 python papers/date.py lstm --data MNIST       4.1.1, Figures 16 and 17
    python papers/date.py ptb --data PTB --methods date adam --batches 640 --seeds 0 1

Each run's result goes to --out as it ends; a run whose result is there is not made again. Every call ends with the
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
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from date_tasks import TASKS, Data, DateTask, Share
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.device import choose_device, environment
from summit_train.core.errors import UserError, exit_status
from summit_train.core.files import check_output, write_json
from summit_train.core.result import TextTable
from summit_train.core.session import report_failure, session
from summit_train.core.text import NONE
from summit_train.models.network import cpu_kernels
from summit_train.models.precision import parameter_type
from summit_train.optim.schedule import Schedule
from summit_train.plan import plan_schedule
from summit_train.report.figures import GREY, drawn, series, wrapped
from summit_train.report.tables import machine_text
from summit_train.spec.keys import OptimizerSpec, ScheduleSpec, TrustRatioSpec
from summit_train.training.build import build_train_step
from summit_train.training.step import StepSettings

METHODS = {
    "baseline": "baseline",
    "linear": "linear scaling",
    "legw": "DATE without ratio",
    "lars": "DATE with LARS's ratio",
    "date": "DATE",
    "adam": "Adam",
    "grid": "tuned baseline",
}
BOUNDED = TrustRatioSpec(kind="bounded")
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """One training of a task. lr: of the baseline for the method to scale, or None for the task's own."""

    task: str
    method: str
    batch: int
    lr: float | None
    seed: int
    epochs: int
    precision: str
    bounds: tuple[float, float] | None

    @property
    def name(self) -> str:
        lr = "" if self.lr is None else f"_lr{self.lr:g}"
        bounds = "" if self.bounds is None else "_bounds{:g}-{:g}".format(*self.bounds)
        return (
            f"{self.task}_{self.method}_{self.batch}{lr}{bounds}_{self.epochs}epochs_{self.precision}_seed{self.seed}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, then draw and print."""
    args, launch = arguments(argv), this_launch()
    task = TASKS[args.task]
    samples = args.samples or task.samples
    try:
        runs, data = list(runs_of(task, args)), task.read(args.data)
        for run in runs:  # refuse what cannot be trained before training anything
            share_of(run, data.num_samples, samples, launch.rank, launch.size)
            recipe(task, run, data.num_samples)
        check_output("--out", args.out, args.out / f"{args.task}.png")
    except UserError as error:
        report_failure(error, launch)
        return exit_status(error)
    with session(launch) as world:
        device, hosts = choose_device(world), world.gather(world.host)
        known = world.broadcast([(args.out / f"{run.name}.json").exists() for run in runs])
        missing = [run for run, is_known in zip(runs, known, strict=True) if not is_known]
        if world.rank == 0 and len(missing) < len(runs):
            print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {args.out} already", file=sys.stderr)
        for run in missing:
            share = share_of(run, data.num_samples, samples, world.rank, world.size)
            result = train(run, data, share, world, device)
            if hosts is not None:  # rank 0
                values = result | {"environment": environment(world, device, hosts, cpu_kernels(device))}
                write_json(args.out / f"{run.name}.json", values)
        if world.rank == 0:
            results = read_results(args.out, args.task)
            print(table_text(task, results), flush=True)
            write_figure(args.out / f"{args.task}.png", task, results)
    return 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's IDX files or of ptb.*.txt (.gz)")
    parser.add_argument("--out", type=Path, default=Path("date"), help="folder of the results [date]")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="[all]")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="[the paper's; grid: the largest]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="[0]")
    parser.add_argument("--lrs", nargs="+", type=float, metavar="LR", help="of adam and grid; baselines of the others")
    parser.add_argument("--epochs", type=int, help="[the paper's]")
    parser.add_argument("--bounds", type=float, nargs=2, metavar=("LOWER", "UPPER"), help="of date's ratio")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--samples", type=int, help="of a virtual GPU, at most [the task's]")
    return parser.parse_args(argv)


def runs_of(task: DateTask, args: argparse.Namespace) -> Iterator[Training]:
    """Yield the runs that the arguments ask for. Raises UserError for a wrong one."""
    for name in ("batches", "lrs", "epochs", "bounds", "samples"):
        value = getattr(args, name)
        if value is not None and not 0 < np.min(value) <= np.max(value) < np.inf:
            raise UserError(f"--{name} must be above 0, got {value}")
    if args.bounds and args.bounds[0] > args.bounds[1]:
        raise UserError("--bounds LOWER must be at most UPPER, got {:g} {:g}".format(*args.bounds))
    for method, seed in itertools.product(args.methods, args.seeds):
        batches = args.batches or (task.batches[-1:] if method == "grid" else task.batches[1:])
        lrs = args.lrs or {"adam": task.adam_lrs, "grid": task.grid_lrs}.get(method, (None,))
        bounds = tuple(args.bounds) if args.bounds and method == "date" else None
        for batch, lr in itertools.product(task.batches[:1] if method == "baseline" else batches, lrs):
            yield Training(
                args.task, method, batch, lr, seed, args.epochs or task.schedule.epochs, args.precision, bounds
            )


# --- one run


def recipe(task: DateTask, run: Training, num_samples: int) -> tuple[OptimizerSpec, Schedule]:
    """Return a run's solver and the course of its LR. Raises UserError where the warm-up takes the whole run.

    With f = task.loss_factor the paper's gradient G is f times ours, g. LR G = (LR f) g; but LR |w| / |G| G = LR |w| /
    |g| g, so where a trust ratio holds, its bounds are f times as large and the LR is the paper's. Adam needs no f.
    """
    base, factor, bounds = task.optimizer, task.loss_factor, run.bounds or (BOUNDED.lower, BOUNDED.upper)
    adam, by_date = run.method == "adam", run.method in ("legw", "lars", "date")
    trust = {
        "lars": TrustRatioSpec(kind="lars"),
        "date": TrustRatioSpec(kind="bounded", lower=bounds[0] * factor, upper=bounds[1] * factor),
    }.get(run.method)
    keys: dict[str, Any] = {} if adam else {"momentum": base.momentum, "trust_ratio": trust}
    if base.clip_norm is not None:
        keys["clip_norm"] = base.clip_norm / factor
    solver = OptimizerSpec(
        name="adam" if adam else base.name,
        base_lr=(base.base_lr if run.lr is None else run.lr) * (1.0 if adam or trust else factor),
        base_batch=base.base_batch,
        lr_scaling="sqrt" if by_date else "linear" if run.method == "linear" else "none",
        weight_decay=base.weight_decay,
        **keys,
    )
    schedule = task.schedule.model_copy(update={"epochs": run.epochs})
    if adam:
        schedule = ScheduleSpec(epochs=run.epochs, warmup_epochs=0, decay="none")
    elif by_date:
        warmup = {"warmup_epochs": task.warmup_epochs, "warmup_scaling": "linear"}
        schedule = ScheduleSpec(epochs=run.epochs, decay="linear", **warmup)
    return solver, plan_schedule(solver, schedule, run.batch, num_samples)


def share_of(run: Training, num_samples: int, samples: int, rank: int, ranks: int) -> Share:
    """Return a rank's share of a batch, in virtual GPUs of at most `samples`."""
    if run.batch > num_samples:
        raise UserError(f"--batches: {run.batch:,} is more than the {num_samples:,} training samples")
    virtual_gpus = max(1, run.batch // samples)
    if run.batch % virtual_gpus or virtual_gpus < ranks:
        raise UserError(
            f"--samples: a batch of {run.batch:,} makes {virtual_gpus} virtual GPUs of {samples:,}, which must leave "
            f"no rest and be at least one for each of {ranks} ranks; try --samples {max(1, run.batch // ranks)}"
        )
    return Share(rank, ranks, virtual_gpus, run.batch // virtual_gpus, num_samples // run.batch)


def train(run: Training, data: Data, share: Share, world: World, device: torch.device) -> dict[str, Any]:
    """Train and score epoch by epoch; return the result as one JSON object. Collective."""
    began = time.perf_counter()
    solver, schedule = recipe(TASKS[run.task], run, data.num_samples)
    with torch.random.fork_rng():  # the seed alone decides the weights
        torch.manual_seed(rng.seed_of(run.seed, "weights"))
        network = TASKS[run.task].build().to(device, parameter_type(run.precision))
    network.load_state_dict(world.broadcast({name: value.cpu() for name, value in network.state_dict().items()}))
    settings = StepSettings(
        seed=run.seed,
        virtual_gpus=share.virtual_gpus,
        precision=run.precision,
        clip_norm=solver.clip_norm,
        modality=data.modality,
    )
    step = build_train_step(solver, settings, world, network, device, {})
    curve, skipped = list[dict[str, Any]](), 0
    for epoch in range(run.epochs):
        losses, skipped = list[float](), 0
        network.begin_epoch(len(share.own))
        for number, batches in zip(share.steps_of(epoch), data.epoch(run.seed, share, epoch), strict=True):
            step.begin(schedule.learning_rate(number))
            for batch in batches:
                step.accumulate(batch)
            vote = step.update().read(run.batch, share.virtual_gpus, world.size)
            losses.append(vote.loss)
            skipped += vote.skipped
        scores = world.broadcast(data.score(network, device) if world.rank == 0 else {})
        found = {"loss": statistics.fmean(losses), **scores}
        # JSON has no infinity.
        found = {name: value if math.isfinite(value) else None for name, value in found.items()}
        curve.append({"epoch": epoch + 1, "skipped": skipped, **found})
        if world.rank == 0:
            print(f"{run.name}: {json.dumps(curve[-1])}", file=sys.stderr, flush=True)
        if skipped == share.steps:
            break  # as diverged
    return asdict(run) | {
        "peak_lr": schedule.peak_lr,
        "warmup_steps": int(schedule.warmup_steps),
        "total_steps": schedule.total_steps,
        "virtual_gpus": share.virtual_gpus,
        "solver": solver.model_dump(mode="json"),
        "diverged": skipped == share.steps,
        "test": curve[-1]["test"],
        "curve": curve,
        "seconds": time.perf_counter() - began,
    }


# --- the results of all runs


def read_results(folder: Path, task: str) -> list[Result]:
    """Return the results of a task, in the order of methods, batches, LRs and seeds."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}_*_seed*.json"))]
    return sorted((result for result in results if result["task"] == task), key=lambda r: (*without_seed(r), r["seed"]))


def without_seed(result: Result) -> tuple[Any, ...]:
    """Return a key that runs share if they differ in the seed alone."""
    order = list(METHODS).index(result["method"])
    return (order, result["bounds"] or [], result["epochs"], result["precision"], result["batch"], result["lr"] or 0.0)


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Put the seeds together, as `read_results` orders them. mean, std: of the test figure; None if diverged or one."""
    rows = []
    for _, group in itertools.groupby(results, without_seed):
        runs = list(group)
        first, tests = runs[0], [run["test"] for run in runs]
        name = METHODS[first["method"]]
        if first["method"] == "date":
            name += " [{:g}, {:g}]".format(*(first["bounds"] or (BOUNDED.lower, BOUNDED.upper)))
        whole = None not in tests and not any(run["diverged"] for run in runs)
        mean = statistics.fmean(tests) if whole else None
        std = statistics.stdev(tests) if whole and len(runs) > 1 else None
        rows.append({**first, "name": name, "seeds": len(runs), "mean": mean, "std": std})
    return rows


def table_text(task: DateTask, results: Sequence[Result]) -> str:
    """Return the table: a row for each method, batch and LR, next to what the paper has for it."""
    cells = []
    for row in rows_of(results):
        published = task.published.get((row["method"], row["batch"])) if row["bounds"] is None else None
        test = "diverged" if row["mean"] is None else f"{row['mean']:.2f}"
        cells.append(
            {
                "method": row["name"],
                "batch": f"{row['batch']:,}",
                "peak LR": f"{row['peak_lr']:.4g}",
                **{key: str(row[key]) for key in ("epochs", "precision", "seeds")},
                f"test {task.metric}": test + ("" if row["std"] is None else f" \N{PLUS-MINUS SIGN} {row['std']:.2f}"),
                "published": NONE if published is None else f"{published:g}",
            }
        )
    return f"{task.title}\n{TextTable.of_records(cells)}"


def write_figure(path: Path, task: DateTask, results: Sequence[Result]) -> None:
    """Draw the test error or perplexity against the batch (the paper's Figure 16) and, of a grid, the LR (Figure 17).

    Runs that are shorter than the longest are left out, and of several LRs all but the best in the first panel.
    """
    longest = max(result["epochs"] for result in results)
    rows = [row for row in rows_of(results) if row["epochs"] == longest]
    lost = [f"{row['name']} at {row['batch']:,}, LR {row['peak_lr']:.3g}" for row in rows if row["mean"] is None]
    rows = [row for row in rows if row["mean"] is not None]
    machines = "; ".join(dict.fromkeys(machine_text(result["environment"]) for result in results))
    caption = (
        f"{longest} epochs each. Bars: one standard deviation over seeds. Adam, tuned baseline: the best LR. "
        f"{'Diverged: ' + '; '.join(lost) + '. ' if lost else ''}"
        f"{'Grey crosses: You et al. 2019. ' if task.published else ''}Machine: {machines}."
    )
    grid = [row for row in rows if row["method"] == "grid"]
    styles = {name: series(i) for i, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    with drawn(path, wrapped(caption), (12.0 if grid else 10.0, 4.8)) as figure:
        figure.suptitle(task.title, fontsize=12)
        left, *right = figure.subplots(1, 2 if grid else 1, squeeze=False)[0]

        def draw(axes: Axes, points: Sequence[Result], x: str, **style: Any) -> None:
            means, deviations = [height(task, row["mean"]) for row in points], [row["std"] or 0.0 for row in points]
            axes.errorbar([row[x] for row in points], means, deviations, capsize=3, **style)

        for name, style in styles.items():
            draw(left, curve_of(task, [row for row in rows if row["name"] == name]), "batch", label=name, **style)
        for i, ((method, batch), value) in enumerate(task.published.items()):
            left.plot(batch, height(task, value), "x", color=GREY, label=None if i else "published")
            left.annotate(METHODS[method], (batch, height(task, value)), fontsize=8, color=GREY)
        log_axes(left, task, sorted({row["batch"] for row in rows}), "batch (samples a step)")
        for axes in right:
            batch = max(row["batch"] for row in grid)
            points = [row for row in grid if row["batch"] == batch]
            draw(axes, points, "lr", **styles[METHODS["grid"]])
            for row in rows:
                if row["batch"] == batch and row["method"] in ("date", "legw"):
                    axes.axhline(height(task, row["mean"]), linestyle="--", color=styles[row["name"]]["color"])
            log_axes(axes, task, [row["lr"] for row in points], f"baseline's LR at a batch of {batch:,}")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=9)


def height(task: DateTask, value: float) -> float:
    """Return a test figure as it is drawn, less being better: the error of an accuracy."""
    return value if task.metric == "perplexity" else max(100 - value, 0.01)


def curve_of(task: DateTask, rows: Sequence[Result]) -> list[Result]:
    """Return the points of one curve: of several LRs at a batch the best."""
    best: dict[int, Result] = {}
    for row in sorted(rows, key=lambda row: height(task, row["mean"])):
        best.setdefault(row["batch"], row)
    return [best[batch] for batch in sorted(best)]


def log_axes(axes: Axes, task: DateTask, ticks: Sequence[float], label: str) -> None:
    """Make both axes logarithmic, x with these ticks alone."""
    axes.set(xscale="log", yscale="log", xlim=(min(ticks) / 1.5, max(ticks) * 1.5), xlabel=label)
    axes.set_ylabel("test perplexity" if task.metric == "perplexity" else "test error (%)")
    for axis, places in ((axes.xaxis, FixedLocator(ticks)), (axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))):
        axis.set_major_locator(places)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1000 else f"{value:,.0f}"))


if __name__ == "__main__":
    sys.exit(main())
