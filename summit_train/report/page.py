"""The report: one self-contained HTML page, of one run or of several compared.

Its texts come from files of any origin. All are escaped, and the page's Content-Security-Policy forbids
scripts and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from summit_train.core.errors import UserError
from summit_train.core.files import read_file, replacing
from summit_train.core.text import counted, duration, percent, show
from summit_train.evaluation.fuse import read_run
from summit_train.evaluation.paired import compare
from summit_train.report import tables
from summit_train.report.confusion import read_classes, read_precisions
from summit_train.report.curves import pictures
from summit_train.report.goodput import goodput_rows, restarts, time_spent
from summit_train.report.mistakes import read_mistakes
from summit_train.report.noise import noise_section
from summit_train.report.records import RunRecord, read_runs

if TYPE_CHECKING:
    from summit_train.tasks.detection.section import DetectionSection

_SPEED_AND_PLACE = ("data.workers", "data.root", "data.stage")  # which change no number


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of these run directories to `out`, whole or not at all, and return its path.

    Raises UserError where a directory is not a run and if `out` is not a regular file, OSError if writing fails.
    """
    write_page(Path(out), render(read_runs(run_dirs)))
    return Path(out)


def write_page(path: Path, page: str) -> None:
    """Write a page whole or not at all. A surrogate, as in a file name outside UTF-8, becomes a question mark.

    Raises UserError where `path` is another file than a page.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is not a regular file; give the name of an HTML file, such as report.html")
    if path.exists() and read_file(path)[:1] not in (b"", b"<"):
        raise UserError(f"{path}: already exists and is not a page; give another name with --out")
    with replacing(path) as file:
        file.write(page.encode("utf-8", "replace"))


def environment() -> jinja2.Environment:
    """Return the environment of this package's templates. Every text is escaped."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader("summit_train", folder) for folder in ("report", "tasks")])
    strict = jinja2.StrictUndefined
    pages = jinja2.Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(percent=percent, show=show, duration=duration, counted=counted)
    read = (read_classes, read_precisions, read_mistakes, read_section, noise_section, time_spent)
    shown = (pictures, goodput_rows, restarts)
    pages.globals.update({function.__name__: function for function in (*read, *shown)}, tables=tables)
    return pages


def read_section(run: RunRecord) -> DetectionSection | None:
    """Read the section that the run's task adds to its page; None without one."""
    if run.spec.get("task") != "detection":
        return None
    from summit_train.tasks.detection import section

    return section.read_section(run)


def comparison(first: RunRecord, second: RunRecord) -> list[str]:
    """Compare two runs on the videos that both scored, by their last checkpoints, and note other losses and data."""
    try:
        runs = [replace(read_run(str(run.path)), name=run.label) for run in (first, second)]
        notes = [compare(*runs)]
        if runs[0].clips != runs[1].clips:
            notes.append(f"They scored {len(runs[0].clips):,} and {len(runs[1].clips):,} videos")
    except UserError as error:
        notes = [f"Not compared video by video: {error}"]
    settings = [dict(run.settings()) for run in (first, second)]
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [one.get(key) for one in settings]
        if key.startswith(("loss.", "data.")) and key not in _SPEED_AND_PLACE and values[0] != values[1]:
            notes.append(f"{key} differs: {show(values[0])} and {show(values[1])}")
    return notes


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML; the same text for the same runs."""
    return environment().get_template("page.html.j2").render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        summary=[tables.summary_row(run) for run in runs],
        columns={measure.key: measure.name for run in runs for measure in run.measures.shown},
        comparison=comparison(*runs) if len(runs) == 2 else [],
        overlay=pictures(runs) if len(runs) > 1 else [],
        runs=runs,
    )  # fmt: skip
