"""Fit the constants of configs/machines/summit.yaml to the paper's Table 3, and say how well they are determined.

    python papers/fit_summit.py             prints constants and predictions
    python papers/fit_summit.py --write     also writes configs/machines/summit.yaml

Three numbers are worked out of three times: seconds a clip, fixed seconds a pass, and the deviation of a rank. The
network is not fitted: at these sizes its exposed part is milliseconds, which the rows cannot tell from stragglers.
Source: Lin, Gan, Han, "Training Kinetics in 15 Minutes" (2019), Tables 1 and 3, section 4.2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import published

from summit_train.core.errors import RunFailed
from summit_train.core.files import write_text
from summit_train.scaling.cost import ScaledJob, expected_maximum, forecast, step_time, steps_per_epoch
from summit_train.scaling.machines import Compute, Machine, Rate, Storage, load_machine
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import to_yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FILES = {"tsm": "tsm_r50_8f_1536gpu", "i3d_3x3x3": "i3d_3x3x3_r50_16f", "i3d_3x1x1": "i3d_3x1x1_r50_32f"}
SPECS = {
    arch: load_spec(CONFIGS / "kinetics" / f"{name}.yaml", ["scale.clips_per_gpu=8"]) for arch, name in FILES.items()
}
ROWS = (1, 8, 384)
# Section 4.2 and abstract: how many times as fast TSM trains at 256 nodes.
SPEED_RATIO = {"i3d_3x3x3": 1.6, "i3d_3x1x1": 2.9}
RATIO_ROW = next(row for row in published.TABLE_3 if row.nodes == 256)
ROUNDS = 6  # of communication and constants in turn
HEADER = """\
# Summit with the constants that no document gives. Written by `python papers/fit_summit.py --write`; do not edit.
# Fitted: compute.step_overhead_s, straggler_cv and tsm's rate, to the rows of {rows} nodes of Table 3 of Lin, Gan,
# Han, "Training Kinetics in 15 Minutes" (2019); the file system's frames, to the 2.9 times of its section 4.2.
# Not fitted: the network (summit_published.yaml). The other rows of Table 3 come out within {worst:.1f} %.
# last_batch keep: the published times fit steps that count an epoch's partial batch; `train` drops it, as does
# `simulate --set last_batch=drop`.
"""


class Fit(NamedTuple):
    """The fitted constants and the rows (numbers of nodes) that they come from."""

    rows: tuple[int, ...]
    seconds_per_clip: float
    step_overhead_s: float
    straggler_cv: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write configs/machines/summit.yaml")
    args = parser.parse_args()
    base = load_machine(CONFIGS / "machines" / "summit_published.yaml")
    fit = fit_table_3(base)
    machine = fitted(base, fit)
    print_fit(machine, fit)
    if args.write:
        write_text(CONFIGS / "machines" / "summit.yaml", machine_text(machine, fit))
        print("\nwritten: configs/machines/summit.yaml")
    return 0


def fit_table_3(machine: Machine, nodes: tuple[int, ...] = ROWS) -> Fit:
    """Solve step = (overhead + n clip) (1 + cv d) + communication for overhead, clip and cv on three rows.

    n: clips a GPU, d: by how many deviations the slowest rank is behind. Two rows with one n give cv, the third with
    another n the other two. Raises RunFailed for other rows, and where a constant would have to be zero or below.
    """
    rows = sorted((row for row in published.TIMED_ROWS if row.nodes in nodes), key=lambda row: -row.clips_per_gpu)
    if len(rows) != 3 or rows[0].clips_per_gpu == rows[1].clips_per_gpu:
        raise RunFailed("three rows with two numbers of clips a GPU are needed, to tell clips and passes apart")

    seconds = [published_step_seconds(row) for row in rows]
    behind = [expected_maximum(row.gpus) for row in rows]
    fit = Fit(nodes, 0.04, 0.05, 0.05)
    tried = []
    for _ in range(ROUNDS):
        # Communication is worked out with the constants so far: it jumps by up to a cycle where a gradient just misses
        # one. So the last round is not always the best.
        steps = [step_time(job_of(with_constants(machine, fit), SPECS["tsm"], row)) for row in rows]
        errors = [step.step_s / published_s - 1 for step, published_s in zip(steps, seconds, strict=True)]
        tried.append((sum(error**2 for error in errors), fit))
        left_s, first_s, second_s = (t - step.communication_s for t, step in zip(seconds, steps, strict=True))
        cv = (second_s - first_s) / (first_s * behind[2] - second_s * behind[1])
        long_pass_s = left_s / (1 + cv * behind[0])
        pass_s = first_s / (1 + cv * behind[1])
        clip_s = (long_pass_s - pass_s) / (rows[0].clips_per_gpu - rows[1].clips_per_gpu)
        fit = Fit(nodes, clip_s, pass_s - rows[1].clips_per_gpu * clip_s, cv)
        if min(fit[1:]) <= 0:
            raise RunFailed(f"no positive constants solve the rows of {nodes} nodes: {fit}")
    return min(tried)[1]


def published_step_seconds(row: published.Table3Row) -> float:
    """Return the seconds of one step of a timed row. The last, partial batch of an epoch counts as a step."""
    steps = steps_per_epoch(published.TRAINING_VIDEOS, row.global_batch, "keep")
    return (row.seconds or 0) / (published.EPOCHS * steps)


def job_of(machine: Machine, spec: Spec, row: published.Table3Row) -> ScaledJob:
    """Return a row's job: the paper's data set on its nodes, with its clips a GPU."""
    spec = spec.model_copy(update={"scale": spec.scale.model_copy(update={"clips_per_gpu": row.clips_per_gpu})})
    return ScaledJob(spec, machine, row.nodes, published.TRAINING_VIDEOS, published.VALIDATION_VIDEOS)


def errors_of(machine: Machine) -> dict[int, float]:
    """Return the relative errors of the predicted times of Table 3, by the rows' nodes: 0.01 is 1 % too long."""
    rows = published.TIMED_ROWS
    return {row.nodes: forecast(job_of(machine, SPECS["tsm"], row)).run_s / (row.seconds or 0) - 1 for row in rows}


def speed_ratios(machine: Machine) -> dict[str, float]:
    """Return TSM's clips a second over those of each I3D on the nodes that the paper compares them on."""
    speed = {arch: forecast(job_of(machine, spec, RATIO_ROW)).clips_per_second for arch, spec in SPECS.items()}
    return {arch: speed["tsm"] / speed[arch] for arch in SPEED_RATIO}


def with_constants(machine: Machine, fit: Fit) -> Machine:
    """Return the machine with the fitted constants. The I3Ds' rates are TSM's by the ratio of Table 1's throughputs."""
    tsm = 1 / fit.seconds_per_clip
    table = published.TABLE_1
    tsn = "as tsm: the shift is taken to cost nothing"
    rates = [Rate(arch="tsn", num_frames=8, clips_per_second=tsm, source=tsn)]
    for arch, row in table.items():
        by_ratio = "tsm's times the ratio of throughputs in Table 1 (P100, inference)"
        source = "fitted to Table 3" if arch == "tsm" else by_ratio
        speed = tsm * row.clips_per_second / table["tsm"].clips_per_second
        rates.append(Rate(arch=arch, num_frames=row.frames, clips_per_second=speed, source=source))
    source = f"fitted to the rows of {', '.join(map(str, fit.rows))} nodes of Table 3"
    constants = {"step_overhead_s": fit.step_overhead_s, "straggler_cv": fit.straggler_cv}
    compute = Compute(**constants, rates=tuple(rates), source=source)
    return machine.model_copy(update={"compute": compute, "last_batch": "keep"})


def fitted(base: Machine, fit: Fit) -> Machine:
    """Return the machine with all fitted constants, to the four digits that its file has.

    Its file system is so slow that I3D 3x1x1 takes 2.9 times as long as TSM, as section 4.2 says.
    """

    def four_digits(value: float) -> float:  # which the published times resolve
        return float(f"{value:.4g}")

    rounded = Fit(fit.rows, *map(four_digits, (fit.seconds_per_clip, fit.step_overhead_s, fit.straggler_cv)))
    machine = with_constants(base, rounded)
    arch = "i3d_3x1x1"
    nodes = RATIO_ROW.nodes
    spec = SPECS[arch]
    ratio = SPEED_RATIO[arch]
    step_s = ratio * step_time(job_of(machine, SPECS["tsm"], RATIO_ROW)).step_s
    frames = machine.gpus_per_node * spec.scale.clips_per_gpu * spec.data.num_frames
    source = f"fitted: {arch} is {ratio} times as slow as TSM at {nodes} nodes (section 4.2)"
    shared = Storage(frames_per_second_per_node=four_digits(frames / step_s), source=source)
    speeds = [four_digits(rate.clips_per_second) for rate in machine.compute.rates]
    rates = [r.model_copy(update={"clips_per_second": s}) for r, s in zip(machine.compute.rates, speeds, strict=True)]
    compute = machine.compute.model_copy(update={"rates": tuple(rates)})
    return machine.model_copy(update={"shared": shared, "compute": compute})


def machine_text(machine: Machine, fit: Fit) -> str:
    """Return summit.yaml: the fitted sections, over the published ones."""
    values = machine.model_dump(mode="json", include={"compute", "shared", "last_batch"}, exclude_defaults=True)
    errors = errors_of(machine)
    worst = max(abs(error) for nodes, error in errors.items() if nodes not in fit.rows)
    header = HEADER.format(rows=", ".join(map(str, fit.rows)), worst=100 * worst)
    return header + to_yaml({"extends": "summit_published.yaml", **values})


def print_fit(machine: Machine, fit: Fit) -> None:
    """Print the constants, Table 3 predicted and published, and the speed ratios."""
    assert machine.shared is not None
    print(f"fitted to the rows of {', '.join(map(str, fit.rows))} nodes of Table 3 (3 constants, 3 times):")
    print(f"  {fit.seconds_per_clip * 1e3:.2f} ms a clip and GPU, {fit.step_overhead_s * 1e3:.1f} ms a pass besides,")
    print(f"  a rank's pass deviates by {100 * fit.straggler_cv:.2f} % of its time")
    print("\nnodes  published s  predicted s   error  step s, published times / (100 x ceil(240000 / batch))")
    errors = errors_of(machine)
    for row in published.TIMED_ROWS:
        seconds = row.seconds or 0
        error = errors[row.nodes]
        note = "fitted" if row.nodes in fit.rows else f"(printed to {60 if row.nodes <= 32 else 1} s)"
        times = f"{seconds:11,}  {seconds * (1 + error):11,.0f}  {100 * error:+5.2f} %"
        print(f"{row.nodes:5}  {times}  {published_step_seconds(row):.4f}  {note}")
    print(f"\nTSM's speed over the I3Ds' at {RATIO_ROW.nodes} nodes, predicted (published):")
    for arch, ratio in speed_ratios(machine).items():
        print(f"  {arch}: {ratio:.2f} ({SPEED_RATIO[arch]})")
    print(f"  fitted to the second: {machine.shared.frames_per_second_per_node:,.0f} frames a second and node")
    alone = speed_ratios(machine.model_copy(update={"shared": None}))
    print("  without a file system to wait for: " + ", ".join(f"{arch} {ratio:.2f}" for arch, ratio in alone.items()))


if __name__ == "__main__":
    sys.exit(main())
