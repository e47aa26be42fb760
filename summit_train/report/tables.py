"""The words and numbers of the report: plain rows of strings, made from a Run. Nothing is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from summit_train.report.metrics import FinalEval, Run, StartRecord, number
from summit_train.text import MOST_ITEMS, NONE, duration, listed, mean_std, percent, show


@dataclass(frozen=True)
class SummaryRow:
    """One line of the summary table."""

    label: str
    model: str
    scale: str
    global_batch: str
    epochs: str
    top1: str
    top5: str
    clips_per_second: str
    data_wait: str
    seconds: str


def summary_row(run: Run) -> SummaryRow:
    """The run in one line; a dash where it does not say."""
    top1, top5 = accuracy_cells(run)
    return SummaryRow(
        label=run.label,
        model=_model(run),
        scale=scale_of(run),
        global_batch=show(run.plan.get("global_batch")),
        epochs=_epochs(run),
        top1=top1,
        top5=top5,
        clips_per_second=_rounded(run.clips_per_second, 4),
        data_wait=NONE if run.data_wait_share is None else f"{run.data_wait_share:.1f} %",
        seconds=duration(run.seconds) if run.seconds > 0 else NONE,
    )


def accuracy_cells(run: Run) -> tuple[str, str]:
    """Top-1 and top-5: of the final evaluation, else of the last validation in training, with its epoch."""
    if run.final is not None:
        final = run.final
        return mean_std(final.top1_mean, final.top1_std), mean_std(final.top5_mean, final.top5_std)
    if run.evals:
        last = run.evals[-1]
        return f"{percent(last.top1)} (epoch {last.epoch:g})", percent(last.top5)
    return NONE, NONE


def scale_of(run: Run) -> str:
    """'ranks x accumulation = virtual GPUs', with every number of ranks that the run was played on."""
    virtual = _int(run.plan.get("virtual_gpus"))
    started = [start.ranks for start in run.starts if start.ranks]
    played = list(dict.fromkeys(started)) or [count for count in [_int(run.plan.get("ranks"))] if count]
    if not played:
        return NONE
    if virtual is None:
        return " then ".join(f"{count:,} ranks" for count in played)
    products = [f"{count:,} \N{MULTIPLICATION SIGN} {virtual // count:,}" for count in played]
    return f"{' then '.join(products)} = {virtual:,}"


def notes_of(run: Run) -> list[str]:
    """What to know before believing the numbers: missing files, unread lines, a run not finished."""
    notes = [f"{name} is missing{_consequence(name)}" for name in run.missing]
    notes += run.notes
    total = _int(run.plan.get("total_steps"))
    if total is not None and run.last_step < total:
        notes.append(f"Unfinished: {run.last_step:,} of {total:,} steps are done")
    if run.skipped_steps:
        count = _steps(len(run.skipped_steps))
        notes.append(f"{count} without an update, the gradient was not finite: {listed(run.skipped_steps)}")
    bad_clips = run.steps[-1].bad_clips if run.steps else 0
    if bad_clips:
        notes.append(f"{bad_clips:,} times a clip could not be read and another took its place: see bad_clips.jsonl")
    if len(run.starts) > 1:
        again = sum(start.steps_again for start in run.starts)
        times = "once" if len(run.starts) == 2 else f"{len(run.starts) - 1:,} times"
        notes.append(f"Resumed {times}; {_steps(again)} done again")
    return notes


def start_rows(starts: Sequence[StartRecord]) -> list[tuple[str, str, str, str]]:
    """One row a start: time, step, ranks, steps that were done again."""
    return [(_time(s.time), f"{s.step:,}", show(s.ranks), f"{s.steps_again:,}") for s in starts]


def views_of(final: FinalEval) -> str:
    """'10 clips x 3 crops', as far as it is known."""
    clips = "" if final.clips is None else f"{final.clips} clips"
    crops = {None: "", "full": "the full frame", 1: "1 crop"}.get(final.crops, f"{final.crops} crops")
    return " \N{MULTIPLICATION SIGN} ".join(part for part in (clips, crops) if part)


def machine_of(environment: Mapping[str, Any]) -> str:
    """The machine in a few words for a caption; empty when the environment does not say."""
    hosts, device = environment.get("hosts"), environment.get("device")
    names = [str(host) for host in hosts] if isinstance(hosts, (Mapping, list)) else []
    on_cpu = device in (None, "cpu")
    cores = environment.get("cores") if on_cpu else None
    parts = (
        f"{len(names):,} hosts" if len(names) > 1 else "".join(names),
        environment.get("processor") if on_cpu else device,
        f"{cores} cores" if cores else "",
    )
    return ", ".join(str(part) for part in parts if part)


def rows(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A nested mapping as (dotted key, value) rows; a long one inside (hundreds of hosts) in one row."""
    return [(key, show(value)) for key, value in _flat(mapping, "")]


def _flat(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_ITEMS:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _model(run: Run) -> str:
    model, data = run.spec.get("model"), run.spec.get("data")
    known = {**(data if isinstance(data, Mapping) else {}), **(model if isinstance(model, Mapping) else {})}
    parts: Iterable[object] = (known.get("arch"), known.get("backbone"))
    text = " ".join(str(part) for part in parts if part)
    frames = known.get("num_frames")
    return (f"{text}, {frames} frames" if text and frames else text) or NONE


def _epochs(run: Run) -> str:
    schedule = run.spec.get("schedule")
    planned = number(schedule.get("epochs")) if isinstance(schedule, Mapping) else None
    per_epoch = run.steps_per_epoch
    done = NONE if per_epoch is None else f"{run.last_step / per_epoch:.4g}"
    return done if planned is None else f"{done} of {planned:g}"


def _consequence(name: str) -> str:
    return {
        "eval.json": ": there was no final evaluation",
        "metrics.jsonl": ": no step was recorded",
        "plan.json": ": batch and epochs are not known",
    }.get(name, "")


def _time(value: float | str | None) -> str:
    seconds = number(value)
    if seconds is None:
        return NONE if value is None else str(value)
    try:
        moment = datetime.fromtimestamp(seconds, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return str(value)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def _int(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _rounded(value: float | None, digits: int) -> str:
    """So many significant digits, but no exponent for large numbers."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
