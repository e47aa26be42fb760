"""Validate at the ends of epochs; the best checkpoint and a growing batch follow from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from summit_train.core.text import counted
from summit_train.core.watch import StopRequest
from summit_train.evaluation.measures import left_out, say_left_out
from summit_train.plan import validates
from summit_train.tasks.task import task_named
from summit_train.training.metrics import RunLog, validated
from summit_train.training.run import Run


def grow(run: Run, log: RunLog | None, epoch: int, measures: Mapping[str, Any] | None) -> None:
    """Let the batch grow by rank 0's validation after `epoch`. Collective where it may grow."""
    if run.spec.parallel.grow_batch is None or epoch == run.spec.schedule.epochs:
        return
    accuracy = run.world.broadcast(None if measures is None else measures[run.measures.main.key])
    before, decision = run.growth.rung.clips_per_gpu, run.growth.decide(accuracy)
    if log is not None and decision is not None:
        best, rung = decision
        size, batch = rung.clips_per_gpu, rung.global_batch
        log.write("batch", epoch=epoch, clips_per_gpu=size, global_batch=batch, accuracy=accuracy, best=best)
        grows = f"grows from {counted(before, 'clip')} to {size:,}, {counted(rung.steps_per_epoch, 'step')} an epoch"
        change = grows if size > before else f"stays at {counted(size, 'clip')}"
        log.say(f"epoch {epoch}: batch of a learner {change} ({accuracy:.2f} %, best before {best:.2f} %)")


def stop_early(run: Run, log: RunLog | None, epoch: int, measures: Mapping[str, Any] | None) -> None:
    """Decide by rank 0's validation after `epoch` whether it was the last epoch. Collective where it may be."""
    spec, stop = run.spec.schedule.early_stop, run.early_stop
    if spec is None or epoch == run.spec.schedule.epochs:
        return
    stop.update(epoch, run.world.broadcast(None if measures is None else measures[spec.measure]))
    if stop.is_reached and log is not None:
        about = {"measure": spec.measure, "best": stop.best, "best_epoch": stop.best_epoch}
        log.write("early_stop", epoch=epoch, step=epoch * run.plan.steps_per_epoch, **about)
        best = f"the best {spec.measure}, {stop.best:.4g}, is that of epoch {stop.best_epoch}"
        log.say(f"epoch {epoch}: stops early, {counted(epoch - stop.best_epoch, 'epoch')} without improvement: {best}")


def replay_missed_validation(run: Run, log: RunLog | None, stop: StopRequest) -> None:
    """Validate if the run ended between the checkpoint of an epoch and its validation.

    Grow the batch by the result, name the best checkpoint, and stop early, if the checkpoint does not include that yet.
    The curve, the batch, the best and the end then equal those of a run that was not stopped.
    """
    epoch, inside = divmod(run.start_step, run.plan.steps_per_epoch)
    if epoch and not inside and validates(run.spec, epoch):
        first = run.world.rank == 0 and not run.best.is_new  # recorded values may be of another measure of that name
        measures = run.world.broadcast(validated(run.spec.run_path, run.start_step) if first else None)
        if measures is None:
            measures = validate(run, log, stop, epoch)
        run.compare_with_best(run.start_step, measures)
        stop_early(run, log, epoch, measures)
        if run.growth.lacks(epoch // run.spec.evaluate.every_epochs):
            grow(run, log, epoch, measures)
    if log is not None:
        run.best.write()


def validate(run: Run, log: RunLog | None, stop: StopRequest, epoch: int) -> dict[str, Any] | None:
    """Score one clip and one crop of every video, as for the curve in the paper's Figure 5; return rank 0's measures.

    With evaluate.mode "stream", stream all frames in one crop. The loss is that of training on those logits, without
    mixing. Raises Stopped on request.
    """
    run.watchdog.at(f"validating after epoch {epoch}")
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        run.watchdog.at(f"validating video {done} of {total} after epoch {epoch}", waits=done == total)

    task = task_named(run.spec.task)
    one_view = run.spec.evaluate.model_copy(update={"clips": 1, "crops": "full" if task.whole_frames else 1})
    spec = run.spec.model_copy(update={"evaluate": one_view})
    scorer = task.part("scorer")(spec, run.val_set, run.world, run.device, stop)
    scores = scorer.score(run.model, progress, source=f"validation after epoch {epoch}")

    def figures() -> dict[str, Any] | None:  # by code of the user's own, too
        if scores is None:
            return None
        classes = {"classes": run.measures.by_class(scores)}
        return run.measures.values(scores) | {"val_loss": run.val_loss.of_scores(scores)} | classes

    measures = run.world.together(figures)
    if scores is None or measures is None:
        return None
    known, seconds = run.measures, time.perf_counter() - began
    if log is not None:
        step, videos = epoch * run.plan.steps_per_epoch, len(scores.videos)
        bad = f"{scores.num_bad} unreadable, counted as wrong" if scores.num_bad else ""
        missing = say_left_out(left_out(scores, run.val_set.manifest.class_names))
        views, clips = ("one clip each", 1) if spec.evaluate.mode == "clips" else ("all frames streamed", None)
        loss = measures["val_loss"]
        record = measures | {"videos": videos, "clips": clips, "seconds": seconds}
        log.write("eval", epoch=epoch, step=step, **record)
        unknown = "" if measures[known.main.key] is not None else "unknown measure: best checkpoint and batch stay"
        about = "; ".join(filter(None, (f"{counted(videos, 'video')}, {views}", bad, missing, unknown)))
        log.say(f"epoch {epoch}: {known.text(measures)}{'' if loss is None else f'  loss {loss:.4f}'}  ({about})")
        log.warn(step, run.health.of_validation(step, scores, run.val_set.manifest.class_names))
    return measures
