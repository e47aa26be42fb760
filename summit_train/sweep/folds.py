"""The clips of a cross-validation: what each run said of each clip of its fold, all in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from summit_train.core.errors import UserError
from summit_train.evaluation.fuse import read_run
from summit_train.evaluation.scores import probabilities
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import Row


def clip_rows(sweep: Sweep, rows: Sequence[Row]) -> Iterator[list[object]]:
    """Yield a heading and a row for each clip of each run that is done: its labels, and the probability of each class.

    A probability is empty where the clip could not be read. The `note` of a row says why a run's scores are left out.
    """
    for number, (run, row) in enumerate(zip(sweep.runs, rows, strict=True)):
        if number == 0:
            names = run.spec.model.num_classes
            yield ["run", "fold", "seed", "clip", "label", "predicted", *range(names or 0)]
        if row["state"] != "done":
            continue
        try:
            found = read_run(row["run"])
        except UserError as error:
            row["note"] = f"{row['note']}; {error}".removeprefix("; ")
            continue
        scores, classes = (
            found.scores,
            found.class_names or [str(label) for label in range(found.scores.scores.shape[1])],
        )
        for clip, hot, is_read, likely in zip(
            found.clips, scores.hot, scores.is_read, probabilities(scores.scores, scores.kind), strict=True
        ):
            labels = ";".join(name for name, is_one in zip(classes, hot, strict=True) if is_one)
            said = [classes[likely.argmax()], *(f"{one:.6f}" for one in likely)] if is_read else []
            yield [run.name, run.fold, run.spec.seed, str(clip), labels, *said]
