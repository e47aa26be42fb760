"""How fast a GPU trains and infers: clips a second by network, precision, batch and execution, and their ratios.

    python bench/gpu/speed.py --out speed.json                       one GPU, 150 s
    python bench/gpu/speed.py --out speed.json --seconds 600         the whole table
    python bench/gpu/speed.py --out speed.json --device cpu --small  a rehearsal

Groups of rows are measured one after the other, those that decide a default first. The rows of a group take turns, so
each ratio is of neighbours in time. Times are of the device's events. Groups that the time does not suffice for are
named under "skipped".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from agenda import Group, agenda
from outcome import Check, Outcome, fact, free, run_part
from rows import (
    IMAGES_PER_CLIP,
    Row,
    arithmetic,
    inferring,
    network_of,
    random_clips,
    reason_to_skip,
    spec_of,
    torchvision_network,
)
from subjects import Inference, Timed

from summit_train.bench.benches import measure_peak
from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text, training_multiply_adds
from summit_train.core.comm import World
from summit_train.models.network import count_network
from summit_train.training.environment import environment

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
OVER_TSN, OF_IMAGES = 1.03, 0.97  # wanted: TSM's step over TSN's, TSM's pictures over a plain ResNet-50's
# Two executions whose errors are at most e lie at most 2 e apart; independent errors lie sqrt(2) e apart.
SLACK = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """Where rows are measured, until when, and the peaks in multiply-adds/s by precision."""

    device: torch.device
    small: bool
    ends: float
    peaks: dict[str, float]
    outcome: Outcome

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.ends - time.monotonic()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the time to measure."""
    parser.add_argument("--seconds", type=float, default=150.0, help="no group begins later than this [150]")


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Measure the peaks, then the groups."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the time to compile is that of a first run
    ends = time.monotonic() + args.seconds
    world = World()
    outcome.values |= {
        "environment": environment(world, device, [world.host]),
        "small": args.small,
        "images": "torchvision" if torchvision_network(spec_of(Row("images", "train", "fp32", 1))) else "TSN's network",
        "peaks": measure_peaks(device, small=args.small),
        **{"rows": [], "ratios": [], "skipped": {}, "out_of_memory": {}},
    }
    bench = Bench(device, args.small, ends, outcome.values["peaks"], outcome)
    for group in agenda(small=args.small):
        if bench.left_s < group.needs_s:
            outcome.values["skipped"][group.title] = f"{max(0, bench.left_s):.0f} s were left of {args.seconds:g}"
            continue
        measure_group(group, bench)
        free(device)


def measure_peaks(device: torch.device, *, small: bool) -> dict[str, float]:
    """Return the multiply-adds/s of the best square matrix product in each precision."""
    peaks = {}
    for precision in PRECISIONS:
        with arithmetic(precision):
            tried = measure_peak("fp32" if precision == "tf32" else precision, device, (), 1e-9 if small else 1.0)
        peaks[precision] = max(tried.values())
        print(f"peak in {precision}: {peaks[precision] / 1e12:.4g} T multiply-adds/s", file=sys.stderr, flush=True)
    return peaks


def measure_group(group: Group, bench: Bench) -> None:
    """Measure the rows of a group in turn; store rows and ratios, and add the checks that they decide."""
    first = group.rows[0]
    contexts = inferring(spec_of(first).precision, bench.device) if first.mode == "inference" else nullcontext()
    print(f"{group.title} ({bench.left_s:.0f} s left)", file=sys.stderr, flush=True)
    with arithmetic(first.precision), contexts:
        timed = {row: one for row in group.rows if (one := prepared(row, bench)) is not None}
        seconds = turns_of(timed, group.repeats, bench)
        logits = {row: one.subject.logits() for row, one in timed.items() if isinstance(one.subject, Inference)}
    rows = [row_values(timed[row], times, bench.peaks) | {"group": group.title} for row, times in seconds.items()]
    bench.outcome.values["rows"] += rows
    ratios = [ratio_values(a, b, seconds) for a, b in group.pairs if a in seconds and b in seconds]
    bench.outcome.values["ratios"] += ratios
    for ratio in ratios:
        print(f"  {ratio['name']}: {spread_text(ratio['ratio'])}", file=sys.stderr, flush=True)
        if (check := goal(ratio)) is not None and group.decides:
            bench.outcome.add(check)
    if group.agree and first in logits:
        agree(first, logits, bench)


def prepared(row: Row, bench: Bench) -> Timed | None:
    """Return a row ready to be timed; None where it cannot be, which the outcome then says."""
    if (why := reason_to_skip(row, bench.device)) is not None:
        bench.outcome.values["skipped"][row.name] = why
        return None
    if row.execution == "compiled":
        torch.compiler.reset()  # else a second batch of one network would be compiled for any batch
    return attempt(row, bench.outcome, lambda: Timed(row, bench.device, small=bench.small))


def attempt(row: Row, outcome: Outcome, action: Callable[[], T]) -> T | None:
    """Return what `action` does; None where it raises: memory that is out is noted, another error is a failed check."""
    try:
        return action()
    except torch.OutOfMemoryError as error:
        outcome.values["out_of_memory"][row.name] = str(error).partition("\n")[0]
    except RuntimeError as error:
        outcome.add(fact(f"{row.name} runs", False, f"{type(error).__name__}: {str(error).strip()[:400]}"))
    return None


def turns_of(timed: Mapping[Row, Timed], repeats: int, bench: Bench) -> dict[Row, list[float]]:
    """Measure in turn, whole rounds until the time is over; return the seconds of the rows that ran in all of them."""
    found: dict[Row, list[float]] = {row: [] for row in timed}
    turns = {row: lambda row=row, one=one: attempt(row, bench.outcome, one.turn) for row, one in timed.items()}
    for taken, (row, seconds) in enumerate(in_turn(turns, repeats), 1):
        if seconds is not None:
            found[row].append(seconds)
        if taken % len(timed) == 0 and bench.left_s < 0:
            break
    most = max(map(len, found.values()), default=0)
    return {row: times for row, times in found.items() if 0 < len(times) == most}


def row_values(timed: Timed, seconds: list[float], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return a row as a JSON object. compile_s: of the first run, beyond a later one."""
    row, spec = timed.row, timed.spec
    count = count_network(spec)
    work = count.multiply_adds if row.mode == "inference" else training_multiply_adds(count)
    rates = [spec.scale.clips_per_gpu * work / second for second in seconds]
    values = {name: getattr(row, name) for name in ("network", "mode", "precision", "batch", "execution")}
    compiled = {"compile_s": max(0.0, timed.first_s - min(seconds))} if row.execution == "compiled" else {}
    return values | compiled | {
        "name": row.name,
        "runs": timed.runs,
        "seconds": spread(seconds),
        "clips_per_second": spread([row.batch / second for second in seconds]),
        "utilisation": spread([rate / peaks[row.precision] for rate in rates]),
    }  # fmt: skip


def ratio_values(of: Row, over: Row, seconds: Mapping[Row, list[float]]) -> dict[str, Any]:
    """Return the ratio of two rows' seconds, turn by turn."""
    sides = {"of": of, "over": over}
    names = {side: {"network": row.network, "execution": row.execution} for side, row in sides.items()}
    setting = {"mode": of.mode, "precision": of.precision, "batch": of.batch}
    name = f"{of.mode} {of.precision} batch {of.batch}: seconds of {words(of)} / {words(over)}"
    return names | setting | {"name": name, "ratio": spread(pair_ratios(seconds[of], seconds[over]))}


def words(row: Row) -> str:
    """Return network and execution; of single pictures, how many."""
    return f"{row.batch * IMAGES_PER_CLIP} images" if row.network == "images" else f"{row.network} {row.execution}"


def goal(ratio: Mapping[str, Any]) -> Check | None:
    """Return the goal of speed that a ratio is about, if any: by its median."""
    of, over, precision = ratio["of"], ratio["over"], ratio["precision"]
    if ratio["mode"] != "train" or precision not in ("fp16", "bf16") or over["execution"] != "accelerated":
        return None
    note = f"batch {ratio['batch']}, {spread_text(ratio['ratio'])}"
    value = ratio["ratio"]["median"]
    if (of["network"], of["execution"], over["network"]) == ("tsm", "accelerated", "tsn"):
        return Check(f"step of TSM / of TSN, {precision}", value, OVER_TSN, wanted=True, note=note)
    if (of["network"], over["network"]) == ("images", "tsm"):
        name = f"TSM's clips/s x {IMAGES_PER_CLIP} / images/s of a plain ResNet-50, {precision}"
        return Check(name, value, OF_IMAGES, at_least=True, wanted=True, note=note)
    return None


def agree(eager: Row, logits: Mapping[Row, torch.Tensor], bench: Bench) -> None:
    """Check that executions give the eager logits, to SLACK times the error that eager ones have against fp64.

    An execution rounds in the same precision in another order, so its error is about that of the eager one.
    """
    exact_row = Row(eager.network, eager.mode, "fp64", eager.batch, "plain")
    with torch.inference_mode():
        network = network_of(exact_row, bench.device, small=bench.small).eval()
        exact = network(random_clips(spec_of(exact_row, small=bench.small), bench.device))
    error = distance(logits[eager], exact)
    for row, own in logits.items():
        if row != eager:
            note = f"eager's distance from fp64: {error:.2e}"
            bench.outcome.add(
                Check(f"{row.name}: logits from eager", distance(own, logits[eager]), SLACK * error, note=note)
            )


def distance(values: torch.Tensor, others: torch.Tensor) -> float:
    """Return the L2 norm of the difference over that of `others`."""
    return float((values - others).norm() / others.norm())


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
