"""What speed.json recommends for a site with such GPUs, as YAML lines for a spec with the numbers that they rest on.

    python bench/gpu/verdict.py speed.json [--hours 4]

A site profile has no keys for precision or execution: the lines go into the spec, or into a base that a site's specs
extend. Decisions that have no key are printed as comments. Nothing is decided by a gain of 5 % or less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_GAIN = 0.05
HOURS = 4.0  # of a job: the shipped profiles' default walltime; each job compiles anew
NETWORK, TRAIN_BATCH = "tsm", 16
SMALL_BATCHES = (1, 4)
Speed = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """One decision. line: YAML for a spec, or None where no key exists or nothing was measured; why: its numbers."""

    about: str
    line: str | None
    why: str


def verdict(speed: Speed, hours: float = HOURS) -> list[Advice]:
    """Return the decisions that the measured rows and ratios support."""
    chosen, precision = _precision(speed)
    passes = [("graph", "inference", "bf16", batch, f"CUDA graph, {batch} a pass") for batch in SMALL_BATCHES]
    return [
        chosen,
        _compile(speed, precision, hours),
        _without_key(speed, "plain", "train", "bf16", TRAIN_BATCH, "plain network"),
        _without_key(speed, "official", "train", "bf16", TRAIN_BATCH, "published shift"),
        _without_key(speed, "weights_last", "train", "bf16", TRAIN_BATCH, "weights in channels last"),
        *(_without_key(speed, *one) for one in passes),
    ]


def as_text(decisions: Sequence[Advice], speed: Speed) -> str:
    """Return YAML lines for a spec, each with its reason; what has no key as comments."""
    device = speed.get("environment", {}).get("device", "unknown device")
    rehearsed = " A REHEARSAL WITH TINY NETWORKS, NO MEASUREMENT." if speed.get("small") else ""
    lines = [f"# Measured on {device}, {NETWORK}.{rehearsed}"]
    for advice in decisions:
        lines += [f"# {advice.about}: {advice.why}", *([advice.line] if advice.line is not None else [])]
    return "\n".join(lines)


def _precision(speed: Speed) -> tuple[Advice, str | None]:
    """Choose the first of fp32, bf16 and fp16 that the fastest exceeds by 5 % at most: fp16 needs a loss scale."""
    rates: dict[str, float] = {}
    for row in speed["rows"]:
        if _is_row(row, "train", "accelerated"):
            rates.setdefault(row["precision"], row["clips_per_second"]["median"])
    about = "precision"
    if not rates.keys() & {"bf16", "fp16"} or not rates.keys() & {"tf32", "fp32"}:
        known = ", ".join(sorted(rates)) or "none"
        return Advice(about, None, f"undecided, measured: {known}; wanted: bf16 or fp16, and tf32 or fp32"), None
    best = max(rates.values())
    # fp32 in a spec runs convolutions in TF32, as torch allows by default.
    names = {"fp32": max(rates.get("tf32", 0.0), rates.get("fp32", 0.0))}
    names |= {name: rates[name] for name in ("fp16", "bf16") if name in rates}
    order = [name for name in ("fp32", "bf16", "fp16") if name in names]
    chosen = next(name for name in order if names[name] * (1 + LEAST_GAIN) >= best)
    said = ", ".join(f"{name} {rate:.4g}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
    return Advice(about, f"precision: {chosen}", f"clips/s of training, {TRAIN_BATCH} a step: {said}"), chosen


def _compile(speed: Speed, precision: str | None, hours: float) -> Advice:
    """Recommend compilation where it gains more than 5 % and pays its time back within `hours`."""
    about, found = "execution.compile", None
    for name in dict.fromkeys((precision, "bf16", "fp16")):
        found = found or (_ratio(speed, "compiled", "train", name, TRAIN_BATCH) if name else None)
    if found is None:
        return Advice(about, None, f"undecided, not measured{_reason(speed, 'compiled')}")
    ratio = found["ratio"]
    row = next(
        row for row in speed["rows"] if _is_row(row, "train", "compiled") and row["precision"] == found["precision"]
    )
    gained, took = _gain(ratio["median"]), row["compile_s"]
    saved = hours * 3600 * (1 - ratio["median"])  # of a run that takes `hours` without
    pays = gained > LEAST_GAIN and saved > took
    why = (
        f"{found['precision']}: {gained:+.1%} clips/s ({_gain(ratio['max']):+.1%} .. {_gain(ratio['min']):+.1%}); "
        f"compiling takes {took:.0f} s, a job of {hours:g} h saves {saved:.0f} s"
    )
    return Advice(about, f"execution: {{compile: {'true' if pays else 'false'}}}", why)


def _without_key(speed: Speed, execution: str, mode: str, precision: str, batch: int, about: str) -> Advice:
    """Say what an execution gains for which the product has no key."""
    found = _ratio(speed, execution, mode, precision, batch)
    if found is None:
        return Advice(about, None, f"not measured{_reason(speed, execution)}")
    gained = _gain(found["ratio"]["median"])
    said = "would pay, and has no key" if gained > LEAST_GAIN else "keep the default"
    return Advice(about, None, f"{gained:+.1%} clips/s over the default in {mode}, {precision}: {said}")


def _ratio(speed: Speed, execution: str, mode: str, precision: str, batch: int) -> Mapping[str, Any] | None:
    """Return the measured ratio of an execution's seconds over the default's; None where there is none."""
    setting = {"mode": mode, "precision": precision, "batch": batch}
    of, over = ({"network": NETWORK, "execution": name} for name in (execution, "accelerated"))
    wanted = setting | {"of": of, "over": over}
    return next((ratio for ratio in speed["ratios"] if wanted == {key: ratio[key] for key in wanted}), None)


def _is_row(row: Mapping[str, Any], mode: str, execution: str) -> bool:
    wanted = (NETWORK, mode, execution, TRAIN_BATCH)
    return (row["network"], row["mode"], row["execution"], row["batch"]) == wanted


def _gain(ratio: float) -> float:
    """Return how many more clips a second a ratio of seconds means: 0.5 is 100 % more."""
    return 1 / ratio - 1


def _reason(speed: Speed, execution: str) -> str:
    """Return why an execution was skipped, where the file says so."""
    known = {**speed.get("skipped", {}), **speed.get("out_of_memory", {})}
    return next((f": {why}" for name, why in known.items() if execution in name), "")


def main() -> int:
    """Print the recommendation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speed", type=Path, help="the JSON file of speed.py")
    parser.add_argument("--hours", type=float, default=HOURS, help=f"of a job, without compilation [{HOURS:g}]")
    args = parser.parse_args()
    speed = json.loads(args.speed.read_text(encoding="utf-8"))
    print(as_text(verdict(speed, args.hours), speed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
