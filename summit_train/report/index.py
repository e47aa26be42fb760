"""Runs side by side: a page, a CSV and one JSON object of all runs below a folder."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from summit_train.core.errors import UserError
from summit_train.core.files import is_locked, read_file, write_text
from summit_train.core.text import counted, csv_text
from summit_train.report.figures import finite, stretches
from summit_train.report.log_records import StepRecord, number
from summit_train.report.overlay import overlay
from summit_train.report.page import environment, write_page
from summit_train.report.records import RUN_MARKS, RunRecord, tell_apart
from summit_train.report.tables import moment

STATES = ("done", "running", "stopped", "unfinished", "not started", "broken")
COLUMNS = (
    "name", "state", "epochs", "planned_epochs", "measure", "last", "best", "mean", "evaluation", "lr",
    "global_batch", "clips_per_second", "node_hours", "started", "run", "remarks", "low", "high", "macro",
)  # fmt: skip
_SUBMITTED = "job/spec.yaml"  # all that a run has before it starts


@dataclass(frozen=True)
class Index:
    """All runs below a folder: one row by COLUMNS each, in the order of their paths.

    epochs: done so far. last, best, mean: of the measure, in percent; over the checkpoints of the final evaluation, or
    while `evaluation` is "training" over the validations so far, which have no mean. low, high: the 95 % interval of a
    mean top-1. macro: its mean over classes of unequal numbers of videos. lr: the peak. clips_per_second:
    the median. node_hours: recorded time times nodes; None if the run had several numbers of ranks. started: of the
    first job. remarks: what is missing or unreadable. settings: by dotted keys, what differs between the specs; None
    where a spec lacks the key. runs: those that could be read.
    """

    folder: Path
    rows: list[dict[str, Any]]
    runs: list[RunRecord]

    def values(self) -> dict[str, Any]:
        """Return the object of --json."""
        states = {state: sum(row["state"] == state for row in self.rows) for state in STATES}
        return {"folder": str(self.folder), "states": states, "runs": self.rows}

    def csv(self) -> str:
        """Return the rows as CSV, with a column for each key that differs."""
        rows = ([*(row[name] for name in COLUMNS), *row["settings"].values()] for row in self.rows)
        return csv_text([[*COLUMNS, *self.rows[0]["settings"]], *rows])


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder, by path, through links too. Runs that were only submitted count."""
    seen = set[str]()
    for path, folders, _ in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        is_run = any(os.path.isfile(os.path.join(path, mark)) for mark in (*RUN_MARKS, _SUBMITTED))
        if is_run and real not in seen:
            yield Path(path)
        folders[:] = [] if is_run or real in seen else sorted(folders)  # a link may lead upward
        seen.add(real)


def read_index(folder: Path) -> Index:
    """Read all runs below a folder; of one that cannot be read the reason. Raises UserError where there is none."""
    rows, runs = list[dict[str, Any]](), list[RunRecord]()
    for path in find_runs(folder):
        row = dict.fromkeys(COLUMNS) | {"name": path.name, "run": str(path), "settings": {}}
        try:
            run = RunRecord(path)
            row |= _known(run)
            _forget_steps(run)
            runs.append(run)
        except (UserError, OSError) as error:
            submitted = (path / _SUBMITTED).is_file()
            row |= {"state": "not started"} if submitted else {"state": "broken", "remarks": str(error)}
        rows.append(row)
    if not rows:
        what = "no run below it" if folder.is_dir() else "no such directory"
        raise UserError(f"{folder}: {what}; give a folder of runs, such as run_dir of their specs")
    tell_apart(runs)
    labels = {str(run.path): run.label for run in runs}
    specs = [row["settings"] for row in rows if row["settings"]]
    keys = [key for key in dict.fromkeys(key for spec in specs for key in spec) if key not in ("name", "run_dir")]
    differing = [key for key in keys if len({repr(spec.get(key)) for spec in specs}) > 1]
    for row in rows:
        row["name"] = labels.get(row["run"], row["name"])
        row["settings"] = {key: row["settings"].get(key) for key in differing}
    return Index(folder, rows, runs)


def write_index(folder: Path, out: Path) -> Index:
    """Write the page to `out`, and the CSV next to it. Raises UserError where another file has one of the names."""
    table = out.with_suffix(".csv")
    if table.is_file() and not read_file(table).startswith(",".join(COLUMNS[:2]).encode()):
        raise UserError(f"{table}: already exists and is not a table of runs; give another name with --out")
    index = read_index(folder)
    script = resources.files(__package__).joinpath("index.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    reports = [Path(row["run"]) / "report.html" for row in index.rows]
    links = [quote(os.fsencode(os.path.relpath(one, out.parent))) if one.is_file() else "" for one in reports]
    template, picture = environment().get_template("index.html.j2"), overlay(index.runs)
    title = f"{folder}: {counted(len(index.rows), 'run')}"
    about = {"title": title, "index": index, "picture": picture, "links": links}
    write_page(out, template.render(about, script=script, script_hash=script_hash))
    write_text(table, index.csv())
    return index


def _known(run: RunRecord) -> dict[str, Any]:
    """Return the columns of a run that can be read."""
    row: dict[str, Any] = {
        "state": _state(run),
        "epochs": run.last_step / run.steps_per_epoch if run.steps_per_epoch else None,
        "planned_epochs": number(run.setting("schedule", "epochs")),
        "lr": number(run.plan.get("peak_lr")),
        "global_batch": number(run.plan.get("global_batch")),
        "clips_per_second": run.clips_per_second,
        "node_hours": _node_hours(run),
        "started": moment(run.starts[0].time) if run.starts else None,
        "remarks": "; ".join([*(f"{name} is missing" for name in run.missing), *run.notes]),
        "settings": dict(run.settings()),
    }
    main, measured = run.measures.main, run.final.checkpoints if run.final else run.evals
    scores = [value for one in measured if (value := one.of(main.key)) is not None]
    if run.final or scores:
        mean = run.final and run.final.of(f"{main.key}_mean")
        row |= {"measure": main.name, "evaluation": "final" if run.final else "training", "mean": mean}
    if run.final:
        bounds = run.final.interval(main) or (None, None)
        row |= {"low": bounds[0], "high": bounds[1], "macro": run.final.of("top1_macro_mean")}
    return row | ({"last": scores[-1], "best": max(scores)} if scores else {})


def _forget_steps(run: RunRecord) -> None:
    """Keep of the log what the overlay draws: 300 long runs do not fit in memory."""
    steps, losses = finite(one.step for one in run.steps), finite(one.loss for one in run.steps)
    curve = zip(*stretches(steps, losses), strict=True)
    run.log, run.trust_ratios, run.steps = [], [], [StepRecord(step=round(x), epoch=0, loss=y) for x, y in curve]


def _state(run: RunRecord) -> str:
    if not run.spec:
        return "broken"
    if run.is_done:
        return "done"
    if is_locked(run.path / "lock"):
        return "running"
    return "stopped" if (run.path / "stopped").exists() else "unfinished"


def _node_hours(run: RunRecord) -> float | None:
    hosts = run.environment.get("hosts")  # of the last job
    if not isinstance(hosts, Mapping | list) or not hosts or len({start.ranks for start in run.starts}) > 1:
        return None
    return len(hosts) * run.seconds / 3600 if run.seconds else None
