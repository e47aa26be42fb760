"""Before a run: open the data sets that `train` would, and check the state that it would start from.

Torch and the lists are imported where they are needed: `plan --clips` reads neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.errors import UserError
from summit_train.core.run_folder import ORIGIN_FILE, find_checkpoints
from summit_train.plan import Plan
from summit_train.spec import Spec

if TYPE_CHECKING:
    from summit_train.data.dataset import Dataset


@dataclass(frozen=True)
class Files:
    """Content of a spec's files. clips: of data.train. videos: in a validation, None if unknown.

    not_checked: keys whose files were not read. train: the training set, None if it was not opened.
    """

    clips: int
    videos: int | None = None
    warnings: Sequence[str] = ()
    not_checked: Sequence[str] = ()
    train: Dataset | None = None


def read_files(spec: Spec, clips: int | None) -> Files:
    """Open the data sets as `train` does; with --clips do not read them. Raises UserError for a mistake in a file."""
    if clips is not None:
        keys = ("train", "val", "root")
        not_checked = [f"data.{key}" for key in keys if getattr(spec.data, key) is not None]
        has_weights = spec.model.pretrained is None or Path(spec.model.pretrained).exists()
        return Files(clips, not_checked=not_checked if has_weights else [*not_checked, "model.pretrained"])
    from summit_train.data.dataset import leaks, open_datasets
    from summit_train.data.manifest.overlap import class_warnings

    for key, path in (("train", spec.data.train), ("val", spec.data.val)):
        if not Path(path).exists():
            number = "the number of its clips" if key == "train" else "the number of training clips"
            raise UserError(f"data.{key}: {path} not found; give {number} with --clips N")
    train, val = open_datasets(spec)
    warnings = class_warnings(train.manifest, val.manifest)
    warnings += leaks(train, val).warnings(val.manifest)
    return Files(len(train), len(val), warnings, train=train)


def start_notes(spec: Spec, plan: Plan, files: Files, sweep: Path | None = None) -> list[str]:
    """Return notes on the weights or the checkpoint that a run starts from.

    sweep: the folder of the run's sweep, which knows the states of its runs and makes the weights that are there.
    Raises UserError for what `train` would refuse of these and of the network: CheckpointError for the checkpoints in
    the run's folder.
    """
    if spec.scale.clips_per_gpu == 1:  # the check needs torch
        from summit_train.models.network import check_batch

        check_batch(spec)
    weights = spec.model.pretrained
    if find_checkpoints(spec.run_path) or (spec.run_path / ORIGIN_FILE).exists():  # the run takes its weights from them
        is_fresh = sweep is not None
    else:
        is_made = weights is not None and sweep is not None and sweep.absolute() in Path(weights).absolute().parents
        is_fresh = weights is None or is_made or "model.pretrained" in files.not_checked
    if is_fresh:
        return []
    import torch

    from summit_train.models.build import build_network
    from summit_train.training.checkpoint import starting_state

    with torch.device("meta"):  # a network without numbers takes little time and memory
        model = build_network(spec)
    return starting_state(spec, plan, files.train, model)[1]
