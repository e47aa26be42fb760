"""Runs side by side: a page, a CSV and one JSON object of all runs below a folder."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from summit_train.core.errors import UserError
from summit_train.core.files import is_locked, read_file, write_text
from summit_train.core.run_log import number
from summit_train.core.text import NONE, counted, csv_text, from_json
from summit_train.report.overlay import RunCurves, overlay
from summit_train.report.page import environment, write_page
from summit_train.report.records import RUN_MARKS, RunRecord, unique_labels
from summit_train.report.tables import moment

STATES = ("done", "running", "stopped", "unfinished", "not started", "broken")
_SUBMITTED = "job/spec.yaml"  # all that a run has before it starts


# A run below a folder by these keys, then `measures`, those of the user's own, and `settings`: by dotted keys what
# differs between the specs, None where a spec lacks the key. A value is None while it is unknown.
#   epochs: done so far. last, best, mean: of the measure, in percent; over the checkpoints of the final evaluation, or
#     while evaluation is "training" over the validations so far, which have no mean. lr: the peak.
#   clips_per_second: the median. node_hours: recorded time times nodes; None if the run had several numbers of ranks.
#   started: of the first job. remarks: what is missing or unreadable. low, high: the 95 % interval of a mean top-1.
#   macro: its mean over classes of unequal numbers of videos. sweep: the folder of the run's sweep.
Row = dict[str, Any]
COLUMNS = (
    "name", "state", "epochs", "planned_epochs", "measure", "last", "best", "mean", "evaluation", "lr", "global_batch",
    "clips_per_second", "node_hours", "started", "run", "remarks", "low", "high", "macro", "sweep",
)  # fmt: skip


@dataclass(frozen=True)
class Index:
    """All runs below a folder, in the order of their paths. curves: by name, of the runs that can be read."""

    folder: Path
    rows: list[Row]
    curves: dict[str, RunCurves]

    def values(self) -> dict[str, Any]:
        """Return the object of --json."""
        states = {state: sum(row["state"] == state for row in self.rows) for state in STATES}
        return {"folder": str(self.folder), "states": states, "runs": self.rows}

    def csv(self) -> str:
        """Return the rows as CSV, with a column for each measure of the user's own and each key that differs."""
        table = [{name: row[name] for name in COLUMNS} | row["measures"] | row["settings"] for row in self.rows]
        return csv_text([table[0], *(row.values() for row in table)])

    def sweep_table(self) -> list[dict[str, str]]:
        """Return the tables of the sweeps' folds and seeds as one, without the columns in which nothing is known."""
        rows: list[dict[str, str]] = []
        for name, folder in {row["sweep"]: Path(row["run"]).parent for row in self.rows if row["sweep"]}.items():
            with suppress(OSError, ValueError, KeyError, TypeError):  # of an older version, or half of it
                rows += [{"sweep": name} | row for row in from_json(read_file(folder / "table.json"))["table"]]
        known = dict.fromkeys(key for row in rows for key, value in row.items() if value not in ("", NONE))
        return [{key: row.get(key, NONE) for key in known} for row in rows]


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
    rows: list[Row] = []
    curves: list[RunCurves | None] = []
    for path in find_runs(folder):
        row: Row = dict.fromkeys(COLUMNS) | {"name": path.name, "run": str(path), "measures": {}, "settings": {}}
        if (path.parent / "sweep.yaml").is_file():
            below = os.path.relpath(path.parent, folder)
            row["sweep"] = path.parent.resolve().name if below == "." else below
        try:
            run = RunRecord(path)
            values = _values(run)
            curves.append(RunCurves.of(run))
            row |= values
        except (UserError, OSError) as error:
            is_submitted = (path / _SUBMITTED).is_file()
            row["state"] = "not started" if is_submitted else "broken"
            row["remarks"] = None if is_submitted else str(error)
            curves.append(None)
        rows.append(row)
    if not rows:
        what = "no run below it" if folder.is_dir() else "no such directory"
        raise UserError(f"{folder}: {what}; give a folder of runs, such as run_dir of their specs")
    known = [row for row, drawn in zip(rows, curves, strict=True) if drawn]
    number_of = Counter(row["name"] for row in known)
    labels = [
        f"{row['sweep']}/{row['name']}" if row["sweep"] and number_of[row["name"]] > 1 else row["name"] for row in known
    ]
    for row, name in zip(known, unique_labels(labels, [Path(row["run"]) for row in known]), strict=True):
        row["name"] = name
    specs = [row["settings"] for row in rows if row["settings"]]
    keys = [key for key in dict.fromkeys(key for spec in specs for key in spec) if key not in ("name", "run_dir")]
    differing = [key for key in keys if len({repr(spec.get(key)) for spec in specs}) > 1]
    measures = dict.fromkeys(key for row in rows for key in row["measures"])
    for row in rows:
        row["settings"] = {key: row["settings"].get(key) for key in differing}
        row["measures"] = measures | row["measures"]
    return Index(folder, rows, {row["name"]: drawn for row, drawn in zip(rows, curves, strict=True) if drawn})


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
    sweeps: dict[str, list[int]] = {}  # the rows of each, by its name; "" without one
    for place, row in enumerate(index.rows):
        sweeps.setdefault(row["sweep"] or "", []).append(place)
    about: dict[str, Any] = {"index": index, "links": links, "sweeps": sweeps, "picture": overlay(index.curves)}
    about |= {
        "runs": [],
        "title": f"{folder}: {counted(len(index.rows), 'run')}",
        "script": script,
        "script_hash": script_hash,
    }
    write_page(out, environment().get_template("index.html.j2").render(about))
    write_text(table, index.csv())
    return index


def _values(run: RunRecord) -> Row:
    """Return what a run's files say for its row."""
    log = run.log
    final = run.final
    main = run.measures.main
    own = [measure for measure in run.measures.every if not measure.unit]
    scores = [value for one in (final.checkpoints if final else log.evals) if (value := one.of(main.key)) is not None]
    low, high = (final and final.interval(main)) or (None, None)
    last = log.evals[-1] if log.evals else None
    hosts = run.environment.get("hosts")  # of the last job
    is_known = isinstance(hosts, Mapping | list) and len({start.ranks for start in log.starts}) <= 1
    host_seconds = len(hosts or ()) * log.seconds if is_known else 0.0
    return {
        "name": run.label,
        "state": _state(run),
        "epochs": log.last_step / run.steps_per_epoch if run.steps_per_epoch else None,
        "planned_epochs": number(run.setting("schedule", "epochs")),
        "measure": main.name if final or scores else None,
        "last": scores[-1] if scores else None,
        "best": max(scores, default=None),
        "mean": final and final.of(f"{main.key}_mean"),
        "evaluation": "final" if final else "training" if scores else None,
        "lr": number(run.plan.get("peak_lr")),
        "global_batch": number(run.plan.get("global_batch")),
        "clips_per_second": run.clips_per_second,
        "node_hours": host_seconds / 3600 if host_seconds else None,
        "started": moment(log.starts[0].time) if log.starts else None,
        "remarks": "; ".join([*(f"{name} is missing" for name in run.missing), *run.notes]),
        "low": low,
        "high": high,
        "macro": final and final.of("top1_macro_mean"),
        "measures": {one.key: final.of(f"{one.key}_mean") if final else last and last.of(one.key) for one in own},
        "settings": dict(run.settings()),
    }


def _state(run: RunRecord) -> str:
    if not run.spec:
        return "broken"
    if run.is_done:
        return "done"
    if is_locked(run.path / "lock"):
        return "running"
    return "stopped" if (run.path / "stopped").exists() else "unfinished"
