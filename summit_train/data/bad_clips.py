"""Count the clips of a run that cannot be read, the same on all ranks, name them in a file, and limit them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from summit_train.core.comm import World
from summit_train.core.errors import AgreedError
from summit_train.core.files import naming, read_file, write_text
from summit_train.core.text import counted, from_json
from summit_train.data.batches.loader import BadClip, MicroBatch

FILE = "bad_clips.jsonl"


class BadClips:
    """The count, which is part of a checkpoint. The limit is `fraction` of the `clips_per_epoch`, in each epoch."""

    def __init__(self, world: World, run_path: Path, clips_per_epoch: int, fraction: float) -> None:
        self._world = world
        self._path = run_path / FILE
        self._clips_per_epoch = clips_per_epoch
        self._fraction = fraction
        self._epoch = 0
        self._in_epoch = 0
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "epoch": self._epoch, "in_epoch": self._in_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self._epoch, self._in_epoch = state["total"], state["epoch"], state["in_epoch"]

    def forget_after(self, step: int) -> None:
        """Delete the records of the steps after `step`, from which the run resumes."""
        if self._world.rank == 0 and self._path.exists():
            kept = []
            for line in read_file(self._path).decode().splitlines(keepends=True):
                try:
                    if from_json(line).get("step", 0) <= step:  # those of a test have none
                        kept.append(line)
                except ValueError:  # half a line of a killed run
                    continue
            write_text(self._path, "".join(kept))

    def add(self, num_bad: int, micro_batches: Sequence[MicroBatch], step: int, epoch: int) -> None:
        """Count a step's `num_bad` clips of all ranks and record them, given this rank's own micro-batches.

        Collective unless num_bad is 0. Raises AgreedError if the epoch has too many.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._in_epoch = 0
        if not num_bad:
            return
        self.total += num_bad
        self._in_epoch += num_bad
        records = [
            {"step": step, "epoch": epoch, "virtual_gpu": batch.virtual_gpu, **asdict(bad)}
            for batch in micro_batches
            for bad in batch.bad
        ]
        _append(self._path, [record for of_rank in self._world.gather(records) or [] for record in of_rank])
        if self._in_epoch > self._fraction * self._clips_per_epoch:
            raise AgreedError(
                f"{counted(self._in_epoch, 'clip')} of epoch {epoch} could not be read, more than data.max_bad_fraction"
                f" ({self._fraction:g}) of {self._clips_per_epoch}: {self._path} names them. `summit-train data scan` "
                "finds all of a manifest at once and writes the list without them"
            )


def record_test(run_path: Path, bad: Sequence[BadClip]) -> None:
    """Record bad videos of a test, in their order in the manifest."""
    _append(run_path / FILE, [{"test": True, **asdict(clip)} for clip in sorted(bad, key=lambda clip: clip.clip)])


def check_test(world: World, run_path: Path, num_bad: int, videos: int, fraction: float) -> None:
    """Raise AgreedError if rank 0's `num_bad` videos of a test are more than `fraction` of all. Collective."""
    total = world.broadcast(num_bad)
    if total > fraction * videos:
        raise AgreedError(
            f"{total} of {videos} test videos could not be read, more than data.max_bad_fraction ({fraction:g}): "
            f"{run_path / FILE} names them"
        )


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    if records:
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
