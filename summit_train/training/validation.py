"""Validate at the ends of epochs; the best checkpoint, the early stop and a growing batch follow from it."""

from __future__ import annotations

import math
import time
from typing import Any

from summit_train.core.run_log import BatchRecord, EarlyStopRecord, EvalRecord
from summit_train.core.text import counted
from summit_train.core.watch import StopRequest
from summit_train.evaluation.evaluation import build_scorer
from summit_train.evaluation.measures import left_out, say_left_out
from summit_train.evaluation.scores import Scored
from summit_train.plan import validates
from summit_train.training.decisions import Decided, Values
from summit_train.training.metrics import RunLog
from summit_train.training.run import Run


def take_in_last_validation(run: Run, log: RunLog | None, stop: StopRequest) -> None:
    """Decide by the validation that belongs to the checkpoint from which a run resumes. Collective.

    Its result is stored next to the checkpoint unless the run was killed before that; then validate again. The curve,
    the batch, the best checkpoint and the end are then those of a run that was not interrupted.
    """
    epoch, inside = divmod(run.start_step, run.plan.steps_per_epoch)
    if epoch and not inside and validates(run.spec, epoch):
        measures = run.world.from_first(run.saved_measures)
        decide(run, log, epoch, validate(run, log, stop, epoch) if measures is None else measures)
    run.world.from_first(run.decisions.write_best)


def decide(run: Run, log: RunLog | None, epoch: int, measures: Values) -> None:
    """Take in a validation: keep the best checkpoint, end training or let the batch grow. Collective."""
    step = epoch * run.plan.steps_per_epoch
    decided = run.decisions.update(epoch, step, measures)
    if decided.is_best:
        run.keep_best(step)
    if log is not None:
        _record(run, log, epoch, decided)
    run.save_validation(epoch, measures, stops_early=decided.stops)


def _record(run: Run, log: RunLog, epoch: int, decided: Decided) -> None:
    spec = run.spec.schedule.early_stop
    decisions = run.decisions
    if decided.stops and spec is not None:
        record = EarlyStopRecord(
            epoch=epoch,
            step=epoch * run.plan.steps_per_epoch,
            measure=spec.measure,
            best=decisions.stop_best_value,
            best_epoch=decisions.stop_best_epoch,
        )
        log.write(record)
        waited = counted(epoch - decisions.stop_best_epoch, "epoch")
        best = f"the best {spec.measure}, {decisions.stop_best_value:.4g}, is that of epoch {decisions.stop_best_epoch}"
        log.say(f"epoch {epoch}: stops early, {waited} without improvement: {best}")
    if (growth := decided.growth) is not None:
        size = growth.after.clips_per_gpu
        batch = growth.after.global_batch
        accuracy = growth.accuracy
        log.write(BatchRecord(epoch=epoch, clips_per_gpu=size, global_batch=batch, accuracy=accuracy, best=growth.best))
        before = counted(growth.before.clips_per_gpu, "clip")
        steps = counted(growth.after.steps_per_epoch, "step")
        grown = f"grows from {before} to {size:,}, {steps} an epoch"
        change = grown if growth.after != growth.before else f"stays at {before}"
        accuracies = f"{accuracy:.2f} %, best before {growth.best:.2f} %"
        log.say(f"epoch {epoch}: batch of a learner {change} ({accuracies})")


def validate(run: Run, log: RunLog | None, stop: StopRequest, epoch: int) -> Values:
    """Score one clip and one crop of every video, as for the curve in the paper's Figure 5; return the measures.

    With evaluate.mode "stream", stream all frames in one crop. The loss is that of training on those logits, without
    mixing. Collective. Raises Stopped on request.
    """
    run.watchdog.at(f"validating after epoch {epoch}")
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        run.watchdog.at(f"validating video {done} of {total} after epoch {epoch}", waits=done == total)

    crops = "full" if run.spec.task == "detection" else 1  # a detector sees whole frames
    one_view = run.spec.evaluate.model_copy(update={"clips": 1, "crops": crops})
    spec = run.spec.model_copy(update={"evaluate": one_view})
    scorer = build_scorer(spec, run.val_set, run.world, run.device, stop)
    scores = scorer.score(run.model, progress, source=f"validation after epoch {epoch}")

    def values() -> dict[str, Any]:
        assert scores is not None  # on rank 0
        loss = run.loss.of_scores(scores)
        known_loss = loss if loss is not None and math.isfinite(loss) else None  # JSON has no NaN
        return run.measures.values(scores) | {"val_loss": known_loss, "classes": run.measures.by_class(scores)}

    measures = run.world.from_first(values)  # the user's code may fail in it
    if log is not None and scores is not None:
        is_streamed = spec.evaluate.mode == "stream"
        step = epoch * run.plan.steps_per_epoch
        record = EvalRecord(
            epoch=epoch,
            step=step,
            measures={key: value for key, value in measures.items() if key not in ("val_loss", "classes")},
            val_loss=measures["val_loss"],
            classes=tuple(measures["classes"]),
            videos=len(scores.videos),
            clips=None if is_streamed else 1,
            seconds=time.perf_counter() - began,
        )
        log.write(record)
        log.say(f"epoch {epoch}: {_text(run, scores, measures, is_streamed=is_streamed)}")
        if (warning := run.health.of_validation(step, scores, run.val_set.manifest.class_names)) is not None:
            log.warn(step, warning)
    return measures


def _text(run: Run, scores: Scored, measures: Values, *, is_streamed: bool) -> str:
    """Return a line for people about a validation."""
    main = run.measures.main
    notes = [f"{counted(len(scores.videos), 'video')}, {'all frames streamed' if is_streamed else 'one clip each'}"]
    if scores.num_bad:
        notes.append(f"{scores.num_bad} unreadable, counted as wrong")
    if missing := say_left_out(left_out(scores, run.val_set.manifest.class_names)):
        notes.append(missing)
    if measures[main.key] is None:
        notes.append(f"{main.name} is unknown; nothing is decided by it")
    loss = measures["val_loss"]
    return f"{run.measures.text(measures)}{'' if loss is None else f'  loss {loss:.4f}'}  ({'; '.join(notes)})"
