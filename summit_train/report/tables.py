"""The text of the report: strings and rows of strings, made from a RunRecord. The page escapes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from summit_train.core.run_log import StartRecord, StepRecord, number
from summit_train.core.text import MOST_ITEMS, NONE, counted, duration, listed, percent, show
from summit_train.evaluation.confusion import MOST_CLASSES
from summit_train.evaluation.measures import say_certainty
from summit_train.report.records import RunRecord
from summit_train.report.results import ClipsPerClass, FinalEval

CONSEQUENCES = {  # of a file that is missing
    "eval.json": ": there was no final evaluation",
    "metrics.jsonl": ": no step was recorded",
    "plan.json": ": batch and epochs are not known",
}


def summary_row(run: RunRecord) -> dict[str, str]:
    """Return the run's row of the summary table: column -> text, a dash where the value is unknown."""
    final = run.final
    last = run.log.evals[-1] if run.log.evals else None
    measured = dict.fromkeys((measure.key for measure in run.measures.every), NONE)
    for measure in run.measures.shown:
        if final is not None:
            measured[measure.key] = final.text(measure)
        elif last is not None:
            epoch = f" (epoch {last.epoch:g})" if measure == run.measures.main else ""
            measured[measure.key] = f"{percent(last.of(measure.key), measure.unit)}{epoch}"
    model = " ".join(str(part) for key in ("arch", "backbone") if (part := run.setting("model", key)))
    frames = number(run.setting("data", "num_frames"))
    planned = number(run.setting("schedule", "epochs"))
    done = NONE if run.steps_per_epoch is None else f"{run.log.last_step / run.steps_per_epoch:.4g}"
    speed = run.clips_per_second
    return {
        "label": run.label,
        "model": (f"{model}, {counted(frames, 'frame')}" if model and frames else model) or NONE,
        "scale": _scale(run),
        "global_batch": show(run.plan.get("global_batch")),
        "epochs": done if planned is None else f"{done} of {planned:g}",
        **measured,
        "clips_per_second": NONE if speed is None else f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}",
        "data_wait": NONE if run.data_wait_share is None else f"{run.data_wait_share:.1f} %",
        "seconds": duration(run.log.seconds) if run.log.seconds > 0 else NONE,
    }


def _scale(run: RunRecord) -> str:
    """Return `ranks x accumulation = virtual GPUs`, with every number of ranks that the run had, and the mean one."""
    virtual = number(run.plan.get("virtual_gpus"))
    planned = number(run.plan.get("ranks"))
    ranks = list(dict.fromkeys(start.ranks for start in run.log.starts if start.ranks))
    ranks = ranks or ([int(planned)] if planned else [])
    if not ranks:
        return NONE
    if virtual is None:
        return " then ".join(f"{counted(count, 'rank')}" for count in ranks)
    products = [f"{count:,} \N{MULTIPLICATION SIGN} {round(virtual / count, 2):,g}" for count in ranks]
    return f"{' then '.join(products)} = {int(virtual):,}"


def notes_of(run: RunRecord) -> list[str]:
    """List what limits the numbers: missing files, unread lines, an unfinished run, classes without clips."""
    notes = [f"{name} is missing{CONSEQUENCES.get(name, '')}" for name in run.missing]
    notes += run.notes
    total = number(run.plan.get("total_steps"))
    if (stop := run.log.early_stop) is not None:
        better = f"no better {stop.measure} in {counted(stop.epoch - stop.best_epoch, 'epoch')}"
        best = "" if stop.best is None else f" than the {stop.best:.4g} of epoch {stop.best_epoch}"
        steps = f"step {stop.step:,} of at most {show(total)}"
        notes.append(f"Stopped early after epoch {stop.epoch}, {steps}: {better}{best}")
    elif total is not None and run.log.last_step < total:
        notes.append(f"Unfinished: {run.log.last_step:,} of {total:,.0f} steps are done")
    if run.log.skipped_steps:
        count = counted(len(run.log.skipped_steps), "step")
        notes.append(f"{count} without an update, the gradient was not finite: {listed(run.log.skipped_steps)}")
    notes += [f"After step {warning.step:,}: {warning.text}" for warning in run.log.warnings]
    notes += _averaging_notes(run)
    if number(run.plan.get("virtual_gpus")) == 1 and number(run.setting("noise_scale", "every_steps")):
        notes.append("No gradient noise scale: one virtual GPU has no other to compare its gradient with")
    bad_clips = run.log.steps[-1].bad_clips if run.log.steps else 0
    if bad_clips:
        times = counted(bad_clips, "time")
        notes.append(f"{times} a clip could not be read and another took its place: see bad_clips.jsonl")
    if len(run.log.starts) > 1:
        again = sum(start.steps_again for start in run.log.starts)
        times = "once" if len(run.log.starts) == 2 else f"{len(run.log.starts) - 1:,} times"
        notes.append(f"Resumed {times}; {counted(again, 'step')} done again")
    if run.final is not None and (lacking := run.final.classes_left_out):
        notes.append(f"{run.measures.main.name} leaves out classes without ground truth: {listed(lacking)}")
    for start in run.log.starts:
        if start.forced:
            since = f"Another experiment since step {start.step:,}"
            notes.append(f"{since}; only its checkpoints are in the mean: {'; '.join(start.forced)}")
    for more in run.log.extensions:
        since = f"{more.after} epochs instead of {more.before} since step {more.step:,} (--more-epochs)"
        notes.append(f"{since}; only checkpoints after it are in the mean")
    for key, what in (("shared_clips", "validation clip"), ("shared_groups", "validation group")):
        if shared := number(run.plan.get(key)):
            notes.append(f"{counted(int(shared), what)} also trained on: the accuracy is too high")
    for side, counts in run.clips_per_class.sides().items() if run.clips_per_class else ():
        if empty := [name for name, count in counts.items() if count == 0]:
            notes.append(f"Classes without {side} clips: {listed(empty)}")
    return notes


def _averaging_notes(run: RunRecord) -> list[str]:
    """Note the cost of averaging the learners, and the sizes of a batch that may grow."""
    notes = []
    if run.log.averages:
        seconds = sum(one.seconds for one in run.log.averages)
        sent = sum(one.bytes for one in run.log.averages)
        share = f", {100 * seconds / run.log.seconds:.1f} % of the recorded time" if run.log.seconds > 0 else ""
        count = counted(len(run.log.averages), "average")
        notes.append(f"{count} of the learners' networks: {seconds:,.1f} s{share}, {sent / 1e6:,.1f} MB from each rank")
    if run.log.batches:
        sizes = list(dict.fromkeys(one.clips_per_gpu for one in run.log.batches))
        first = {one.clips_per_gpu: one.epoch for one in reversed(run.log.batches)}  # the epoch that each began after
        steps = [f"{size:,} after epoch {first[size]}" for size in sizes[1:]]
        grown = f"grew to {', '.join(steps)}" if steps else "did not grow"
        notes.append(f"The batch of a learner began with {sizes[0]:,} clips and {grown}")
    return notes


def class_rows(classes: ClipsPerClass) -> list[tuple[str, ...]]:
    """Return (class, training clips, validation clips) for each of up to 30 classes, and the sum."""
    sides = list(classes.sides().values())
    names = list(sides[0]) if len(sides[0]) <= MOST_CLASSES else []
    total = (f"all {len(sides[0]):,} classes", *(f"{sum(counts.values()):,}" for counts in sides))
    return [*((name, *(f"{counts[name]:,}" for counts in sides)) for name in names), total]


def start_rows(run: RunRecord) -> list[tuple[str, str, str, str, str]]:
    """Return (time, step, ranks, how long to the first step, repeated steps) for each start.

    The first step's record comes with the second step, or an epoch's end.
    """
    rows = []
    places = [i for i, record in enumerate(run.log.records) if isinstance(record, StartRecord)]
    for start, place, end in zip(run.log.starts, places, [*places[1:], len(run.log.records)], strict=True):
        steps = (record for record in run.log.records[place:end] if isinstance(record, StepRecord))
        first = number(next((step.time for step in steps), None))
        began = number(start.time)
        took = NONE if first is None or began is None else duration(first - began + (start.startup_s or 0.0))
        rows.append((moment(start.time), f"{start.step:,}", show(start.ranks), took, f"{start.steps_again:,}"))
    return rows


def moment(time: float | str | None) -> str:
    """Return seconds since 1970 as a date and time."""
    seconds = number(time)
    try:
        return show(time) if seconds is None else f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %T} UTC"
    except (OverflowError, OSError, ValueError):
        return str(time)


def views_of(final: FinalEval) -> str:
    """Return `10 clips x 3 crops` or `all frames x 3 crops`, as far as it is known."""
    clips = "" if final.clips is None else counted(final.clips, "clip")
    if final.mode == "stream":
        clips = "all frames, streamed"
    crops = {None: "", "full": "the full frame", 1: "1 crop"}.get(final.crops, f"{final.crops} crops")
    return " \N{MULTIPLICATION SIGN} ".join(part for part in (clips, crops) if part)


def remarks_of(run: RunRecord) -> list[str]:
    """List remarks on the final evaluation: its uncertainty, its checkpoints, and the best validation."""
    remarks = list[str]()
    wanted = number(run.setting("evaluate", "last_checkpoints"))
    if run.final is not None:
        means = (run.final.of(f"{key}_mean") for key in ("top1_macro", "top1_macro_f1"))
        remarks += say_certainty(run.final.interval(run.measures.main), *means)
        if wanted is not None and (found := len(run.final.checkpoints)) < wanted:
            count = counted(found, "checkpoint")
            remarks.append(f"The mean is over {count}, fewer than evaluate.last_checkpoints, {wanted:.0f}")
        remarks += _earlier(run, run.final)
    if run.baseline is not None:
        top1 = f"{percent(run.baseline.top1)}, 95 % interval {{:.2f}} to {{:.2f}} %".format(*run.baseline.top1_interval)
        remarks.append(f"Baseline, logistic regression of frozen features: top-1 {top1}")
    if evals := [one for one in run.log.evals if one.step > _line(run)]:
        key = run.measures.main.key
        best = max(evals, key=lambda one: one.of(key) or 0.0)
        last, first = (f"{percent(one.of(key))} (epoch {one.epoch:g})" for one in (evals[-1], best))
        remarks.append(f"Validation during training: last {last}, best {first}")
    if run.best is not None:
        unit = next((one.unit for one in run.measures.every if one.key == run.best.measure), "%")
        measured = f"{run.best.measure} {percent(run.best.value, unit)} in the validation during training"
        remarks.append(f"Best checkpoint: step {run.best.step:,}, {measured}")
    return remarks


def differences_of(result: FinalEval, run: RunRecord) -> str:
    """List the keys and checkpoints in which an evaluation differs from the final one."""
    keys = [f"{key}={show(value)}" for key, value in result.overrides.items()]
    return ", ".join([*keys, *_earlier(run, result)]) or NONE


def _line(run: RunRecord) -> int:
    """Return the step at which the run's line of checkpoints began: with the last other keys, or more epochs."""
    forced = [start.step for start in run.log.starts if start.forced]
    return max([*forced, *(more.step for more in run.log.extensions)], default=0)


def _earlier(run: RunRecord, result: FinalEval) -> list[str]:
    """Return a note on an evaluation of checkpoints from before the line."""
    is_earlier = any(0 < (score.step or 0) <= _line(run) for score in result.checkpoints)
    return [f"from the experiment before step {_line(run):,}"] if is_earlier else []


def machine_of(environment: Mapping[str, Any]) -> str:
    """Return the machine in a few words for a caption; empty if the environment names none."""
    hosts = environment.get("hosts")
    device = environment.get("device")
    names = [str(host) for host in hosts] if isinstance(hosts, (Mapping, list)) else []
    on_cpu = device in (None, "cpu")
    cores = number(environment.get("cores")) if on_cpu else None
    parts = (
        f"{len(names):,} hosts" if len(names) > 1 else "".join(names),
        environment.get("processor") if on_cpu else device,
        counted(cores, "core") if cores else "",
    )
    return ", ".join(str(part) for part in parts if part)


def machine_text(environment: Mapping[str, Any]) -> str:
    """Return the machine for a caption: host, processor, cores, threads of a rank, torch."""
    threads = environment["threads_per_rank"]
    without = ", without kernels" if str(environment.get("kernels", "")).startswith("none") else ""
    return f"{machine_of(environment)}, {counted(threads, 'thread')} a rank, torch {environment['torch']}{without}"


def rows(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return a nested mapping as (dotted key, value) rows. A long inner mapping (hundreds of hosts) is one row."""
    found: list[tuple[str, str]] = []
    for key, value in mapping.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_ITEMS:
            found += rows(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", show(value)))
    return found
