"""The report: one HTML page that stands alone, of one run or of several compared.

Every text in it comes from files that anybody may have written, so all of it is escaped, and the page forbids
itself scripts and requests (Content-Security-Policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from summit_train.files import replacing
from summit_train.report.figures import Picture, pictures
from summit_train.report.metrics import Run, read_runs
from summit_train.report.tables import (
    SummaryRow,
    notes_of,
    rows,
    start_rows,
    summary_row,
    views_of,
)
from summit_train.text import duration, mean_std, percent, show

TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Section:
    """One run on the page."""

    run: Run
    notes: Sequence[str]
    pictures: Sequence[Picture]
    plan: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str]]
    starts: Sequence[tuple[str, str, str, str]]


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of these run directories to `out`, whole or not at all, and return its path.

    Raises RunError (a ValueError) for a directory that is no run, ValueError if `out` is a directory, OSError
    if it cannot be written.
    """
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; give the name of an HTML file, {path / 'report.html'}")
    page = render(read_runs(run_dirs)).encode("utf-8", "replace")
    with replacing(path) as file:
        file.write(page)
    return path


def render(runs: Sequence[Run]) -> str:
    """The page as text. The same runs give the same text."""
    summary: list[SummaryRow] = [summary_row(run) for run in runs]
    return _template().render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        summary=summary,
        overlay=pictures(runs) if len(runs) > 1 else [],
        sections=[_section(run) for run in runs],
    )


def _section(run: Run) -> Section:
    return Section(
        run=run,
        notes=notes_of(run),
        pictures=pictures([run]),
        plan=rows(run.plan),
        environment=rows(run.environment),
        starts=start_rows(run.starts),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(percent=percent, show=show, duration=duration, views=views_of)
    environment.globals.update(mean_std=mean_std)
    return environment.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
