"""Figure 4 of Lin, Gan and Han (2019): the accuracies of a sweep and those of their Table 3.

    python papers/figure4.py shipped:sweeps/table3 --out figure4.png

The sweep is one that `summit-train sweep` runs; runs that are not done have no accuracy yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published import TABLE_3
from script import checked_figure, run_script

from summit_train.core.result import Result, TextTable
from summit_train.core.text import NONE, mean_std
from summit_train.report.figures import GREY, drawn, finite, log_ticks, series
from summit_train.sweep.grid import load_sweep
from summit_train.sweep.status import as_values, read_rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP", help="sweep file (YAML), or a started sweep's folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")
    parser.add_argument("--out", metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return run_script(parser, run, argv)


def run(args: argparse.Namespace) -> Result:
    out = checked_figure(args.out)
    sweep = load_sweep(args.sweep, args.overrides)
    papers = {row.global_batch: row for row in TABLE_3}
    rows = []
    for found in as_values(sweep, read_rows(sweep))["runs"]:
        row = {name: found[name] for name in ("name", "state", "global_batch")}
        row |= {name: found.get(name) if found["state"] == "done" else None for name in ("top1", "top1_std")}
        paper = papers.get(row["global_batch"])
        row |= {"reference_top1": paper and paper.top1, "reference_top1_std": paper and paper.std}
        rows.append(row)
    if out is not None:
        draw(out, sweep.name, rows)
    return Result([TextTable(table(rows), left=2)], values={"sweep": sweep.name, "runs": rows})


def table(rows: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    cells: list[Sequence[str]] = [("run", "state", "batch", "top-1", "published")]
    for row in rows:
        batch = NONE if row["global_batch"] is None else f"{row['global_batch']:,}"
        accuracies = (mean_std(row[name], row[f"{name}_std"]) for name in ("top1", "reference_top1"))
        cells.append((row["name"], row["state"], batch, *accuracies))
    return cells


def draw(path: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the finished runs' top-1 and the published one against the global batch."""
    done = sorted((row for row in rows if row["top1"] is not None), key=lambda row: row["global_batch"])
    with drawn(path, "Bars: one standard deviation over the last checkpoints.") as figure:
        axes = figure.subplots()
        batches = [row["global_batch"] for row in done]
        errors = finite(row["top1_std"] for row in done)
        axes.errorbar(batches, [row["top1"] for row in done], errors, label=name, capsize=3, **series(0))
        axes.errorbar(
            [row.global_batch for row in TABLE_3],
            [row.top1 for row in TABLE_3],
            [row.std for row in TABLE_3],
            label="published: Lin, Gan, Han (2019), Table 3",
            marker="s", markerfacecolor="white", linestyle=":", color=GREY, capsize=3,
        )  # fmt: skip
        log_ticks(axes, sorted({*batches, *(row.global_batch for row in TABLE_3)}), base=2)
        axes.set(xlabel="global batch (clips)", ylabel="top-1 (%)")
        axes.legend()


if __name__ == "__main__":
    sys.exit(main())
