"""Packed sets copied to each node's own disk before the first step: one rank a node copies, the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from summit_train.data.manifest import Manifest
from summit_train.data.quarantine import kept_clips
from summit_train.data.staged_clips import Clips, clips_of_ranks
from summit_train.data.staging import Needed, Staged, Staging
from summit_train.training.run import Run
from summit_train.training.watch import Watchdog


def stage_sets(run: Run, watchdog: Watchdog) -> list[str]:
    """Copy the packed sets of a run to data.stage, as far as it has room; what is to be said of it, on rank 0.

    Collective. A disk that is full or missing is a warning, one for all nodes; what is not copied is read from the
    shared folder. Raises PackError where a set is damaged.
    """
    data, world = run.spec.data, run.world
    if data.stage is None:
        return []
    if data.stage == "auto":
        return ["data.stage is auto: a job that `submit` writes stages; here nothing is staged"]
    sets = {manifest.source: manifest for manifest in (run.val_manifest, run.train_manifest)}
    ranks = world.gather_node(world.rank)
    done = []
    if ranks is not None:
        done = [_stage(run, watchdog, manifest, ranks) for manifest in sets.values() if manifest.is_packed]
    world.wait(lambda: watchdog.at("waiting for the nodes' copies of the data", waits=True))
    nodes = world.gather(done)
    raw = [source for source, manifest in sets.items() if not manifest.is_packed]
    return [] if nodes is None else [*_said(run, [node for node in nodes if node]), *map(_not_packed, raw)]


def _stage(run: Run, watchdog: Watchdog, manifest: Manifest, ranks: Sequence[int]) -> Staged:
    staging = Staging(Path(manifest.source), Path(str(run.spec.data.stage)), _needed(run, manifest, ranks))
    for _ in staging.work():
        watchdog.at(f"copying {manifest.source} to {staging.folder}")
    return staging.result


def _needed(run: Run, manifest: Manifest, ranks: Sequence[int]) -> Needed:
    """The clips that the ranks of a node read, in the order of their use."""

    def validation() -> Iterable[Clips]:
        everyone = np.arange(len(manifest))
        yield everyone[np.isin(everyone % run.world.size, ranks)]

    def training() -> Iterable[Clips]:
        plan, kept = run.plan, kept_clips(run.spec.data, manifest)
        places = clips_of_ranks(
            len(kept),
            run.spec.seed,
            plan.virtual_gpus,
            plan.clips_per_gpu,
            plan.steps_per_epoch,
            plan.accumulation,
            ranks,
            run.start_step,
            plan.total_steps,
        )
        return map(kept.ids, places)

    return training if manifest is run.train_manifest else validation


def _said(run: Run, nodes: Sequence[Sequence[Staged]]) -> list[str]:
    """One line for what was copied and one warning at most, whatever the number of nodes and sets."""
    staged = [one for node in nodes for one in node]
    copied, present = sum(one.copied for one in staged), sum(one.present for one in staged)
    said = [f"staged to {run.spec.data.stage} on {len(nodes)} nodes: {copied:,} bytes copied, {present:,} were there"]
    warnings = [one.warning for one in staged if one.warning]
    if warnings:
        more = f" (and {len(warnings) - 1} more such copies)" if len(warnings) > 1 else ""
        said.append(f"warning: {warnings[0]}{more}")
    return said if staged else []


def _not_packed(source: str) -> str:
    return f"data.stage: {source} is no packed set; it is read where it lies"
