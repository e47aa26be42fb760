"""`summit-train bench lr SPEC`: the loss against a LR that grows in each step, and the base_lr that follows from it.

The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (2015), section 3.3, with a LR that
grows exponentially. It takes the LR at which the loss is lowest, divided by 3: the loss is a mean over a few steps and
diverges only some steps after the LR is too high. (The steepest descent, which others take, is noisier.)
"""

from __future__ import annotations

import argparse
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.bench.measure import Values, add_spec, open_context
from summit_train.core.errors import UserError
from summit_train.core.progress import followed
from summit_train.core.result import TextTable
from summit_train.core.session import check_single
from summit_train.core.text import NONE, counted
from summit_train.data.dataset import Dataset
from summit_train.models.network import initial_network
from summit_train.models.weights import load_pretrained
from summit_train.plan import make_plan
from summit_train.report.figures import GREY, PALETTE, drawable, drawn, moving_mean, wrapped
from summit_train.spec import load_spec
from summit_train.training.build import build_step
from summit_train.training.loss import build_loss

_WINDOW = 9  # steps of the mean
_DIVERGED = 2.0  # times the first loss
_FALLEN = 0.97  # of the first loss: a lowest loss above does not count as a descent
_MARGIN = 3.0
_ROWS = 12  # of the printed table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec(parser)
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="training steps [100]")
    parser.add_argument("--from", type=float, default=1e-6, metavar="LR", help="first base_lr [1e-6]")
    parser.add_argument("--to", type=float, default=1.0, metavar="LR", help="last base_lr [1]")


def run(args: argparse.Namespace) -> Values:
    """Train from the spec's initial weights, in one process and without a run folder, until the loss diverges."""
    check_single("bench lr")
    spec = load_spec(args.spec, args.overrides)
    lowest = vars(args)["from"]
    highest = args.to
    if args.steps < 2 * _WINDOW or lowest >= highest:
        got = f"got {args.steps}, {lowest:g} and {highest:g}; try the defaults"
        raise UserError(f"--steps must be at least {2 * _WINDOW}, and --from below --to, {got}")
    dataset = Dataset.open(spec, "train")
    plan = make_plan(spec, 1, len(dataset))
    rows = list[dict[str, Any]]()
    with open_context() as context:
        network = initial_network(spec, context.device)
        if spec.model.pretrained is not None:
            context.tell(f"pretrained: {load_pretrained(network, spec.model.pretrained, dataset.manifest.classes)}")
        loss = build_loss(spec, list(dataset.manifest.clips_per_class.values()))
        step = build_step(spec, plan, context.world, network, context.device, loss)
        with dataset.training_batches(plan.order(), 0, 1, range(args.steps)) as batches:
            for number in followed(range(args.steps), args.steps, "steps", in_logs=True):
                base_lr = lowest * (highest / lowest) ** (number / (args.steps - 1))
                lr = base_lr * plan.peak_lr / spec.optimizer.base_lr
                step.begin(lr)
                for batch in islice(batches, plan.virtual_gpus):
                    step.accumulate(batch)
                mean_loss = step.update().read(plan.global_batch, plan.virtual_gpus, 1).loss
                rows.append({"step": number + 1, "base_lr": base_lr, "lr": lr, "loss": mean_loss})
                first, last = (np.mean([row["loss"] for row in part]) for part in (rows[:_WINDOW], rows[-_WINDOW:]))
                if not (math.isfinite(mean_loss) and last <= _DIVERGED * first):
                    break
    return {"name": spec.name, "global_batch": plan.global_batch, "solver": spec.optimizer.name} | suggestion(rows)


def suggestion(rows: list[dict[str, Any]]) -> Values:
    """Add `mean_loss` to the rows; return them, the base_lr that follows, None if none does, and why."""
    is_short = len(rows) < _WINDOW
    means = np.full(len(rows), np.nan) if is_short else moving_mean(np.array([row["loss"] for row in rows]), _WINDOW)
    for row, mean in zip(rows, means.tolist(), strict=True):
        both = {"mean_loss": mean, "loss": row["loss"]}
        row |= {key: value if math.isfinite(value) else None for key, value in both.items()}  # JSON has no NaN
    if is_short:
        reason = f"the loss diverges within {counted(len(rows), 'step')}; try a lower --from"
        return {"base_lr": None, "reason": reason, "rows": rows}
    first = means[_WINDOW // 2]
    best = int(np.nanargmin(means))
    lowest = means[best]
    at = rows[best]["base_lr"]
    base_lr = None
    if lowest <= _FALLEN * first:
        base_lr = float(f"{at / _MARGIN:.1e}")
        reason = f"the mean loss is lowest, {lowest:.3f} from {first:.3f}, at a base_lr of {at:.2g}; a third of that"
        reason += "; it still falls there, so try a higher --to" if best == len(rows) - 1 else ""
    else:
        reason = f"the loss fell from {first:.3f} to no less than {lowest:.3f}; try more --steps, or another range"
    return {"base_lr": base_lr, "reason": reason, "rows": rows}


def as_text(values: Values) -> str:
    rows = values["rows"]
    table: list[tuple[str, ...]] = [("step", "base_lr", "LR", "loss", f"mean of {_WINDOW}")]
    for row in rows[:: -(-len(rows) // _ROWS)]:
        losses = (NONE if row[key] is None else f"{row[key]:.3f}" for key in ("loss", "mean_loss"))
        table.append((f"{row['step']}", f"{row['base_lr']:.2e}", f"{row['lr']:.2e}", *losses))
    found = "no suggestion" if values["base_lr"] is None else f"optimizer.base_lr={values['base_lr']:g}"
    batch = f"{values['solver']}, batches of {values['global_batch']:,} clips, one process"
    return f"{values['name']}: {batch}\n{TextTable(table, left=0, indent='  ')}\n{found}: {values['reason']}"


def draw(path: Path, values: Values) -> None:
    rows = values["rows"]
    rates = [row["base_lr"] for row in values["rows"]]
    caption = f"{values['name']}: each step has a higher LR. Thin: the loss of a step; thick: the mean of {_WINDOW}."
    with drawn(path, wrapped(drawable(caption, 300))) as figure:
        axes = figure.subplots()
        axes.plot(rates, [row["loss"] for row in rows], color=PALETTE[0], linewidth=0.8, alpha=0.5)
        axes.plot(rates, means := [row["mean_loss"] for row in rows], color=PALETTE[0], linewidth=2)
        top = 1.5 * means[_WINDOW // 2] if len(rows) >= _WINDOW else None
        axes.set(xscale="log", xlabel="base_lr", ylabel="training loss", ylim=(0, top))
        if values["base_lr"] is not None:
            axes.axvline(values["base_lr"], linestyle="--", color=GREY)
            axes.set_title(f"suggested base_lr {values['base_lr']:g}")
