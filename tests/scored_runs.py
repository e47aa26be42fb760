"""Directories of runs that hold scores and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.scores import Scores

# Probabilities of three videos of the classes 0, 1, 2. RGB is right on the first and the last, FLOW on the second.
RGB = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.3, 0.5]]
FLOW = [[0.4, 0.5, 0.1], [0.1, 0.8, 0.1], [0.4, 0.5, 0.1]]
LABELS = (0, 1, 2)
CLIPS = tuple(map(Clip, ("a.mp4", "b.mp4", "c.mp4")))
NAMES = ("hop", "run", "skip")


def write_scores(
    path: Path,
    probabilities: Sequence[Sequence[float]],
    labels: Sequence[int] = LABELS,
    clips: Sequence[Clip] = CLIPS,
    names: Sequence[str] = NAMES,
) -> Path:
    """Write an npz of logits: the logarithms of the probabilities, plus 7."""
    logits = np.log(np.array(probabilities)) + 7
    is_read = ~np.isnan(logits).all(1)
    scores = Scores(np.arange(len(labels)), np.array(labels, np.int64), logits.astype(np.float32), is_read)
    scores.save(path, clips, names)
    return path


def write_scored_run(folder: Path, probabilities: Sequence[Sequence[float]], *args: Sequence[object]) -> Path:
    """Write the folder of a run whose newest checkpoint has these scores, and an older one others; see above."""
    (folder / "predictions").mkdir(parents=True)
    (folder / "spec.yaml").write_text(f"name: {folder.name}\n")
    write_scores(folder / "predictions/step_00000010.npz", np.roll(probabilities, 1, axis=1).tolist(), *args)  # type: ignore[arg-type]
    write_scores(folder / "predictions/step_00000020.npz", probabilities, *args)  # type: ignore[arg-type]
    rows = [{"path": f"/elsewhere/step_{step:08}.pt", "step": step} for step in (10, 20)]
    (folder / "eval.json").write_text(json.dumps({"top1_mean": 50.0, "checkpoints": rows}))
    return folder
