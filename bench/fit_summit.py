"""Fit the constants of configs/machines/summit.yaml to the paper's Table 3, and say how well they are determined.

    python bench/fit_summit.py                  prints constants and predictions
    python bench/fit_summit.py --alternatives   also prints what every other choice of rows would have given
    python bench/fit_summit.py --write          also writes configs/machines/summit.yaml
    python bench/fit_summit.py --rows 1 16 384  fits to other rows

Source: Lin, Gan, Han, "Training Kinetics in 15 Minutes" (2019), Tables 1 and 3, section 4.2.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from summit_train.files import write_text
from summit_train.scaling import fit as table_3
from summit_train.scaling import published
from summit_train.scaling.cost import expected_maximum
from summit_train.scaling.fit import Fit, FitError, fit_table_3
from summit_train.scaling.machines import Machine, load_machine
from summit_train.source import to_yaml
from summit_train.spec import Spec, load_spec

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SPECS = {"tsm": "tsm_r50_8f_1536gpu", "i3d_3x3x3": "i3d_3x3x3_r50_16f", "i3d_3x1x1": "i3d_3x1x1_r50_32f"}
ROWS = (1, 8, 384)
HEADER = """\
# Summit with the constants that no document gives. Written by `python bench/fit_summit.py --write`; do not edit.
# Fitted: compute.step_overhead_s, straggler_cv and tsm's rate, to the rows of {rows} nodes of Table 3 of Lin, Gan,
# Han, "Training Kinetics in 15 Minutes" (2019); the file system's frames, to the 2.9 times of its section 4.2.
# Not fitted: the network (summit_published.yaml). The other rows of Table 3 come out within {worst:.1f} %.
# last_batch keep: the published times fit steps that count an epoch's partial batch; `train` drops it (--last-batch).
"""


def main() -> int:
    """Print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="NODES", help="rows of Table 3 to fit to")
    parser.add_argument("--alternatives", action="store_true", help="fit to every other choice of three rows, too")
    parser.add_argument("--write", action="store_true", help="write configs/machines/summit.yaml")
    args = parser.parse_args()
    specs, base = paper_specs(), load_machine(CONFIGS / "machines" / "summit_published.yaml")
    fit = fit_table_3(base, specs["tsm"], rows_of(args.rows))
    machine = fitted(base, specs, fit)
    print_fit(machine, specs, fit)
    if args.alternatives:
        print_alternatives(base, specs["tsm"])
    if args.write:
        write_text(CONFIGS / "machines" / "summit.yaml", machine_text(machine, specs, fit))
        print("\nwritten: configs/machines/summit.yaml")
    return 0


def paper_specs() -> dict[str, Spec]:
    """Return the paper's three networks with 8 clips a GPU."""
    folder = CONFIGS / "kinetics"
    return {arch: load_spec(folder / f"{name}.yaml", ["scale.clips_per_gpu=8"]) for arch, name in SPECS.items()}


def rows_of(nodes: list[int] | tuple[int, ...]) -> list[published.Row]:
    """Return the timed rows of Table 3 of these numbers of nodes."""
    rows = [row for row in published.timed_rows() if row.nodes in nodes]
    if len(rows) != len(nodes):
        known = ", ".join(str(row.nodes) for row in published.timed_rows())
        sys.exit(f"--rows {' '.join(map(str, nodes))}: timed rows of Table 3 are {known}, each once")
    return rows


def fitted(base: Machine, specs: dict[str, Spec], fit: Fit) -> Machine:
    """Return the machine with all fitted constants, to the four digits that its file has."""
    rounded = Fit(fit.rows, *map(four_digits, (fit.seconds_per_clip, fit.step_overhead_s, fit.straggler_cv)))
    machine = table_3.with_storage(table_3.with_constants(base, rounded), specs, "i3d_3x1x1")
    values = machine.model_dump()
    for section in (values["shared"], *values["compute"]["rates"]):
        section |= {key: four_digits(value) for key, value in section.items() if "per_second" in key and value}
    return Machine.model_validate(values)


def four_digits(value: float) -> float:
    """Round to the digits that the published times resolve."""
    return float(f"{value:.4g}")


def machine_text(machine: Machine, specs: dict[str, Spec], fit: Fit) -> str:
    """Return summit.yaml: the fitted sections, over the published ones."""
    values = machine.model_dump(mode="json", include={"compute", "shared", "last_batch"}, exclude_defaults=True)
    worst = max(abs(row.error) for row in table_3.compare(machine, specs["tsm"], fit) if not row.fitted)
    header = HEADER.format(rows=", ".join(map(str, fit.rows)), worst=100 * worst)
    return header + to_yaml({"extends": "summit_published.yaml", **values})


def print_fit(machine: Machine, specs: dict[str, Spec], fit: Fit) -> None:
    """Print the constants, Table 3 predicted and published, and the speed ratios."""
    assert machine.shared is not None
    print(f"fitted to the rows of {', '.join(map(str, fit.rows))} nodes of Table 3 (3 constants, 3 times):")
    print(f"  {fit.seconds_per_clip * 1e3:.2f} ms a clip and GPU, {fit.step_overhead_s * 1e3:.1f} ms a pass besides,")
    print(f"  a rank's pass deviates by {100 * fit.straggler_cv:.2f} % of its time")
    print("\nnodes  published s  predicted s   error  step s, published times / (100 x ceil(240000 / batch))")
    for row, source in zip(table_3.compare(machine, specs["tsm"], fit), published.timed_rows(), strict=True):
        note = "  fitted" if row.fitted else f"  (printed to {source.resolution_s} s)"
        step = table_3.published_step_seconds(source)
        times = f"{row.published_s:11,.0f}  {row.predicted_s:11,.0f}  {100 * row.error:+5.2f} %"
        print(f"{row.nodes:5}  {times}  {step:.4f}{note}")
    ratios = table_3.speed_ratios(machine, specs, published.RATIO_NODES)
    print(f"\nTSM's speed over the I3Ds' at {published.RATIO_NODES} nodes, predicted (published):")
    for arch, ratio in ratios.items():
        print(f"  {arch}: {ratio:.2f} ({published.SPEED_RATIO[arch]})")
    print(f"  fitted to the second: {machine.shared.frames_per_second_per_node:,.0f} frames a second and node")
    alone = table_3.speed_ratios(machine.model_copy(update={"shared": None}), specs, published.RATIO_NODES)
    print("  without a file system to wait for: " + ", ".join(f"{arch} {ratio:.2f}" for arch, ratio in alone.items()))


def print_alternatives(base: Machine, spec: Spec) -> None:
    """Print what every other choice of three rows gives, which shows how well the rows determine the constants."""
    print("\nother rows, the constants from them, and their largest error over all rows:")
    for rows in itertools.combinations(published.timed_rows(), 3):
        if rows[0].nodes != 1:
            continue  # without the row of 16 clips a GPU, clips and passes cannot be told apart
        name = ", ".join(str(row.nodes) for row in rows)
        try:
            fit = fit_table_3(base, spec, rows)
        except FitError:
            print(f"  {name:>12}: no positive constants")
            continue
        worst = max(abs(row.error) for row in table_3.compare(table_3.with_constants(base, fit), spec, fit))
        times = f"{fit.seconds_per_clip * 1e3:.1f} ms, {fit.step_overhead_s * 1e3:4.0f} ms"
        print(f"  {name:>12}: {times}, {100 * fit.straggler_cv:4.1f} %; {100 * worst:.1f} %")
    spread = expected_maximum(2304) - expected_maximum(48)
    print(f"(the slowest of 2,304 ranks lies {spread:.2f} deviations behind the slowest of 48)")


if __name__ == "__main__":
    sys.exit(main())
