"""`summit-train fuse RUN RUN ...`: the scores of two or more runs on one validation set, combined."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.files import check_output, write_json
from summit_train.core.result import Result, TextTable
from summit_train.core.session import check_single
from summit_train.core.text import counted
from summit_train.evaluation.confusion import Confusion
from summit_train.evaluation.fuse import fuse, fused_values, parse_weights, read_runs
from summit_train.evaluation.measures import Measures, measures_of

_SHOWN = 5  # classes of the largest gains, and as many of the largest losses
_NPZ = "fused.npz"
_JSON = "fuse.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "run folder: its newest checkpoint's scores; or an npz of scores"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=what)
    parser.add_argument("--weights", metavar="W,W,...", help="one for each run [equal]")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--softmax", action="store_true", default=True, help="add probabilities [the default]")
    kind.add_argument("--logits", dest="softmax", action="store_false", help="add logits")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write fused scores and the JSON object there")


def run(args: argparse.Namespace) -> Result:
    check_single("fuse")
    weights = parse_weights(args.weights, len(args.runs))
    out: Path | None = args.out
    if out is not None:
        check_output("--out", out, out / _NPZ, *args.runs)
    runs = read_runs(args.runs)
    fused = fuse(runs, weights, softmax=args.softmax)
    names = runs[0].class_names
    binary = fused.kind == "binary"
    values = fused_values(runs, weights, fused)
    values["scores"] = "logits" if not args.softmax else "sigmoid" if binary else "softmax"
    if not binary:
        counts = Confusion.of([fused]).among(range(fused.scores.shape[1])).tolist()
        values["confusion"] = {"names": list(fused.names(names)), "counts": counts}
    text = _text(values, measures_of(fused.kind, fused.scores.shape[1]))
    if out is not None:
        if args.softmax:  # as logits, of which these are the probabilities
            with np.errstate(divide="ignore"):
                fused = replace(fused, scores=np.log(fused.scores) - (np.log1p(-fused.scores) if binary else 0))
        fused.save(out / _NPZ, runs[0].clips, names)
        write_json(out / _JSON, values)
        text.append(f"in {out}: {_NPZ}, {_JSON}")
    return Result(text, values=values)


def _text(values: Mapping[str, Any], known: Measures) -> list[str | TextTable]:
    """Return the table of the runs, what was added, and the classes of the largest gains and losses."""
    names = {measure.key: measure.name for measure in known.shown}
    main = known.main
    best = next(run[main.key] for run in values["runs"] if run["name"] == values["best"])

    def row(found: Mapping[str, Any], name: str, checkpoint: str = "", weight: str = "") -> list[str]:
        gain = "" if weight else f"{found[main.key] - best:+.2f}"
        return [name, checkpoint, weight, *(f"{found[key]:.2f} %" for key in names), gain]

    rows = [["run", "predictions", "weight", *names.values(), "gain"]]
    rows += [row(run, run["name"], Path(run["predictions"]).stem, f"{run['weight']:g}") for run in values["runs"]]
    rows.append(row(values, "fused"))
    what = "logits" if values["scores"] == "logits" else f"{values['scores']} probabilities"
    notes = [f"{counted(values['videos'], 'video')}, matched by {values['matched_by']}; fused: weighted mean of {what}"]
    if values["bad_videos"]:
        notes.append(f"{counted(values['bad_videos'], 'video')} unreadable in at least one run, counted as wrong")
    return [TextTable(rows, left=2), *notes, *_changes(values, main.class_key)]


def _changes(values: Mapping[str, Any], key: str) -> list[str | TextTable]:
    """Return a table of the classes with the largest gains and losses, or one line."""
    gains = sorted(values["classes"], key=lambda row: (-row["gain"], row["label"]))
    ups = [row for row in gains if row["gain"] > 0]
    downs = [row for row in gains if row["gain"] < 0]
    shown = ups[:_SHOWN] + downs[-_SHOWN:]
    if not shown:
        return [f"no class gains or loses over {values['best']}"]
    rows = [["class", "videos", values["best"], "fused", "gain"]]
    for row in shown:
        before, after = (f"{row[name]:.2f} %" for name in (f"best_{key}", key))
        rows.append([row["name"], f"{row['videos']:,}", before, after, f"{row['gain']:+.2f}"])
    return ["", TextTable(rows), f"classes that gain: {len(ups):,}, that lose: {len(downs):,}, of {len(gains):,}"]
