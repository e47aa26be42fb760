"""`summit-train eval SPEC --observed`: early recognition, on any number of ranks, and its figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.core.files import figure_path, write_json
from summit_train.core.progress import watched
from summit_train.core.result import Result, TextTable
from summit_train.core.saved import CheckpointError, find_checkpoints
from summit_train.core.session import session
from summit_train.core.text import has_top5
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.evaluation.observed import TENTHS, parse_fractions, score_observed
from summit_train.evaluation.scoring import Scorer
from summit_train.report.figures import draw_observed
from summit_train.report.records import OBSERVED_FILE, Observed, read_observed
from summit_train.spec import Spec
from summit_train.spec.catalog import stream_problem
from summit_train.training.run import fresh_model
from summit_train.training.start import check_agreement, choose_device, run_spec


def run_observed(args: argparse.Namespace, checkpoints: Sequence[str], overrides: Sequence[str]) -> Result:
    """Score one checkpoint after parts of the videos; rank 0 writes observed.json and draws."""
    fractions = parse_fractions(args.observed) if args.observed else TENTHS
    out = None if args.out is None else figure_path(args.out)
    beside = [read_observed(Path(run)) for run in args.beside or []]
    launch = this_launch()
    spec = run_spec(args.spec, overrides)
    if spec.data.modality == "flow":
        raise UserError(
            "--observed: a frame of flow (data.modality) stacks the fields after it, so that the network would see "
            "more than the observed part; take an rgb run"
        )
    dataset = Dataset.open(spec, "val")
    path = _checkpoint(spec.run_path, checkpoints)
    with session(launch) as world, ExitStack() as held:
        watchdog = held.enter_context(Watchdog(world, world.broadcast(spec.watch.stall_seconds)))
        seen = [str(fraction) for fraction in fractions]
        check_agreement(world, spec, {"val": dataset}, command="eval --observed", checkpoint=str(path), fractions=seen)
        device = choose_device(world)
        scorer = Scorer(spec, dataset, world, device)
        with watched("videos", "evaluating video", world, watchdog) as progress:
            result = score_observed(scorer, fresh_model(spec, device), path, fractions, progress)
        if result is not None:
            write_json(spec.run_path / OBSERVED_FILE, result)
            if out is not None:
                draw_observed(out, [Observed.model_validate(result), *beside])
    return Result() if result is None else Result(_text(result, spec), values=result)


def _checkpoint(run_path: Path, chosen: Sequence[str]) -> Path:
    """Return the one checkpoint that is meant, by default the run's newest. Raises CheckpointError."""
    if len(chosen) > 1 or (chosen and chosen[0].startswith("last:") and chosen[0] != "last:1"):
        raise CheckpointError(f"--observed takes one checkpoint, not {' '.join(chosen)}; by default the newest")
    if chosen and chosen[0] != "last:1":
        if not Path(chosen[0]).is_file():
            raise CheckpointError(f"checkpoint {chosen[0]} not found; must be a file")
        return Path(chosen[0])
    found = find_checkpoints(run_path)
    if not found:
        raise CheckpointError(f"{run_path}: no checkpoint to evaluate")
    return found[-1]


def _text(result: dict[str, Any], spec: Spec) -> list[str | TextTable]:
    """Return the curves as a table, and what cannot be seen in it."""
    top5 = ["top5"] if has_top5(spec.model.num_classes) else []
    names = {"top1": "top-1", "top5": "top-5"}
    curves = {"clip": result["observed"], "stream": result.get("anytime")}
    known = {kind: rows for kind, rows in curves.items() if rows}
    keys = ["top1", *top5]
    rows = [["observed", *(f"{kind} {names[key]}" for kind in known for key in keys)]]
    for place, point in enumerate(result["observed"]):
        cells = [f"{curve[place][key]:.2f} %" for curve in known.values() for key in keys]
        rows.append([f"{100 * point['fraction']:g} %", *cells])
    unread = f"; {result['bad_videos']} could not be read and count as wrong" if result["bad_videos"] else ""
    lines: list[str | TextTable] = [TextTable(rows), f"{result['videos']} videos, step {result['step']}{unread}"]
    model = spec.model
    if (why := stream_problem(model.arch, model.shift_direction, model.non_local)) is not None:
        lines.append(f"no stream: {why}")
    undecided = {100 * row["fraction"]: row["undecided"] for row in curves["stream"] or [] if row["undecided"]}
    if undecided:
        parts = ", ".join(f"{number} at {part:g} %" for part, number in undecided.items())
        lines.append(f"videos of which the stream has no frame yet, which count as wrong: {parts}")
    return lines
