"""The clips of a cross-validation: what each run predicts for each clip of its fold, in one table."""

from __future__ import annotations

from collections.abc import Sequence

from summit_train.core.errors import UserError
from summit_train.evaluation.fuse import RunScores, check_classes, read_run
from summit_train.evaluation.scores import probabilities
from summit_train.report.confusion import all_names
from summit_train.sweep.grid import Sweep, SweepRun
from summit_train.sweep.status import Row


def clip_table(sweep: Sweep, rows: Sequence[Row]) -> list[list[object]]:
    """Return a heading and a row for each clip of each run that is done, by its last checkpoint.

    A row has the labels and the probability of each class; none where the clip could not be read. The `note` in `rows`
    says why the scores of a run are left out: they cannot be read, or their classes are not those of the other folds.
    """
    scored: list[tuple[SweepRun, RunScores]] = []
    first: RunScores | None = None  # the first run whose classes have names, if any have
    for run, row in zip(sweep.runs, rows, strict=True):
        if row.state == "done":
            try:
                one = read_run(row.run)
                check_classes(first or one, one)
            except UserError as error:
                row.add_note(str(error))
                continue
            scored.append((run, one))
            if first is None or not first.class_names:
                first = one
    size = first.scores.scores.shape[1] if first else 0
    classes = all_names(first.class_names, size) if first else ()
    table: list[list[object]] = [["run", "fold", "seed", "clip", "label", "predicted", *classes]]
    for run, one in scored:
        scores = one.scores
        likely = probabilities(scores.scores, scores.kind)
        for number, clip in enumerate(one.clips):
            labels = ";".join(name for name, is_one in zip(classes, scores.hot[number], strict=True) if is_one)
            said: list[object] = [""] * (1 + size)
            if scores.is_read[number]:
                said = [classes[likely[number].argmax()], *(f"{share:.6f}" for share in likely[number])]
            table.append([run.name, run.fold, run.spec.seed, str(clip), labels, *said])
    return table
