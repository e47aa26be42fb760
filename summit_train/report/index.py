"""Runs side by side: a page, a CSV and one JSON object of all runs below a folder."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from summit_train.core.errors import UserError
from summit_train.core.files import is_locked, read_file, write_text
from summit_train.core.run_log import number
from summit_train.core.text import counted, csv_text
from summit_train.report.figures import Picture
from summit_train.report.overlay import RunCurves, overlay
from summit_train.report.page import environment, write_page
from summit_train.report.records import RUN_MARKS, RunRecord, unique_labels
from summit_train.report.tables import moment

STATES = ("done", "running", "stopped", "unfinished", "not started", "broken")
_SUBMITTED = "job/spec.yaml"  # all that a run has before it starts


@dataclass
class IndexRow:
    """A run below a folder.

    epochs: done so far. last, best, mean: of the measure, in percent; over the checkpoints of the final evaluation, or
    while `evaluation` is "training" over the validations so far, which have no mean. lr: the peak. clips_per_second:
    the median. node_hours: recorded time times nodes; None if the run had several numbers of ranks. started: of the
    first job. remarks: what is missing or unreadable. low, high: the 95 % interval of a mean top-1. macro: its mean
    over classes of unequal numbers of videos. settings: by dotted keys, what differs between the specs; None where a
    spec lacks the key. curves: None of a run that cannot be read.
    """

    name: str
    state: str
    epochs: float | None = None
    planned_epochs: float | None = None
    measure: str | None = None
    last: float | None = None
    best: float | None = None
    mean: float | None = None
    evaluation: str | None = None
    lr: float | None = None
    global_batch: float | None = None
    clips_per_second: float | None = None
    node_hours: float | None = None
    started: str | None = None
    run: str = ""
    remarks: str | None = None
    low: float | None = None
    high: float | None = None
    macro: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    curves: RunCurves | None = None


COLUMNS = tuple(column.name for column in fields(IndexRow) if column.name not in ("settings", "curves"))


@dataclass(frozen=True)
class Index:
    """All runs below a folder, in the order of their paths."""

    folder: Path
    rows: list[IndexRow]

    def values(self) -> dict[str, Any]:
        """Return the object of --json."""
        states = {state: sum(row.state == state for row in self.rows) for state in STATES}
        shown = (*COLUMNS, "settings")
        runs = [{name: getattr(row, name) for name in shown} for row in self.rows]
        return {"folder": str(self.folder), "states": states, "runs": runs}

    def csv(self) -> str:
        """Return the rows as CSV, with a column for each key that differs."""
        rows = ([*(getattr(row, name) for name in COLUMNS), *row.settings.values()] for row in self.rows)
        return csv_text([[*COLUMNS, *self.rows[0].settings], *rows])

    def picture(self) -> Picture | None:
        return overlay({row.name: row.curves for row in self.rows if row.curves})


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
    rows: list[IndexRow] = []
    for path in find_runs(folder):
        try:
            rows.append(_row(RunRecord(path)))
        except (UserError, OSError) as error:
            is_submitted = (path / _SUBMITTED).is_file()
            row = IndexRow(path.name, "not started" if is_submitted else "broken", run=str(path))
            row.remarks = None if is_submitted else str(error)
            rows.append(row)
    if not rows:
        what = "no run below it" if folder.is_dir() else "no such directory"
        raise UserError(f"{folder}: {what}; give a folder of runs, such as run_dir of their specs")
    known = [row for row in rows if row.curves]
    names = unique_labels([row.name for row in known], [Path(row.run) for row in known])
    for row, name in zip(known, names, strict=True):
        row.name = name
    specs = [row.settings for row in rows if row.settings]
    keys = [key for key in dict.fromkeys(key for spec in specs for key in spec) if key not in ("name", "run_dir")]
    differing = [key for key in keys if len({repr(spec.get(key)) for spec in specs}) > 1]
    for row in rows:
        row.settings = {key: row.settings.get(key) for key in differing}
    return Index(folder, rows)


def write_index(folder: Path, out: Path) -> Index:
    """Write the page to `out`, and the CSV next to it. Raises UserError where another file has one of the names."""
    table = out.with_suffix(".csv")
    if table.is_file() and not read_file(table).startswith(",".join(COLUMNS[:2]).encode()):
        raise UserError(f"{table}: already exists and is not a table of runs; give another name with --out")
    index = read_index(folder)
    script = resources.files(__package__).joinpath("index.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    reports = [Path(row.run) / "report.html" for row in index.rows]
    links = [quote(os.fsencode(os.path.relpath(one, out.parent))) if one.is_file() else "" for one in reports]
    about: dict[str, Any] = {"index": index, "picture": index.picture(), "links": links, "runs": []}
    about |= {"title": f"{folder}: {counted(len(index.rows), 'run')}", "script": script, "script_hash": script_hash}
    write_page(out, environment().get_template("index.html.j2").render(about))
    write_text(table, index.csv())
    return index


def _row(run: RunRecord) -> IndexRow:
    log = run.log
    row = IndexRow(
        name=run.label,
        state=_state(run),
        epochs=log.last_step / run.steps_per_epoch if run.steps_per_epoch else None,
        planned_epochs=number(run.setting("schedule", "epochs")),
        lr=number(run.plan.get("peak_lr")),
        global_batch=number(run.plan.get("global_batch")),
        clips_per_second=run.clips_per_second,
        node_hours=_node_hours(run),
        started=moment(log.starts[0].time) if log.starts else None,
        run=str(run.path),
        remarks="; ".join([*(f"{name} is missing" for name in run.missing), *run.notes]),
        settings=dict(run.settings()),
        curves=RunCurves.of(run),
    )
    main = run.measures.main
    measured = run.final.checkpoints if run.final else log.evals
    scores = [value for one in measured if (value := one.of(main.key)) is not None]
    if run.final or scores:
        row.measure = main.name
        row.evaluation = "final" if run.final else "training"
    if run.final:
        row.mean = run.final.of(f"{main.key}_mean")
        row.low, row.high = run.final.interval(main) or (None, None)
        row.macro = run.final.of("top1_macro_mean")
    if scores:
        row.last = scores[-1]
        row.best = max(scores)
    return row


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
    if not isinstance(hosts, Mapping | list) or not hosts or len({start.ranks for start in run.log.starts}) > 1:
        return None
    return len(hosts) * run.log.seconds / 3600 if run.log.seconds else None
