"""Staging before the first step: one rank of each node copies the packed sets to its disk, the others wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from summit_train.core.watch import Watchdog
from summit_train.data.manifest import Manifest
from summit_train.data.packed.stage import Clips, Staged, Staging
from summit_train.training.run import Run


def stage_sets(run: Run, watchdog: Watchdog) -> list[str]:
    """Copy the packed sets of a run to data.stage, as far as they fit; return the notes for rank 0.

    Collective. A disk that is full or missing gives one warning for all nodes; what is not copied is read from the
    shared folder. Raises PackError where a set is damaged.
    """
    data, world = run.spec.data, run.world
    if data.stage is None:
        return []
    if data.stage == "auto":
        return ["data.stage is auto: a job that `submit` writes stages; here nothing is staged"]
    sets = {manifest.source: manifest for manifest in (run.val_set.manifest, run.train_set.manifest)}
    ranks = world.gather_node(world.rank)
    done = []
    if ranks is not None:
        done = [_stage(run, watchdog, manifest, ranks) for manifest in sets.values() if manifest.is_packed]
    world.wait(lambda: watchdog.at("waiting for the nodes' copies of the data", waits=True))
    nodes = world.gather(done)
    raw = [source for source, manifest in sets.items() if not manifest.is_packed]
    not_packed = [f"data.stage: {source} is no packed set; it is read where it lies" for source in raw]
    return [] if nodes is None else _notes(data.stage, [node for node in nodes if node]) + not_packed


def _stage(run: Run, watchdog: Watchdog, manifest: Manifest, ranks: Sequence[int]) -> Staged:
    needed = partial(needed_clips, run, manifest, ranks)
    staging = Staging(Path(manifest.source), Path(str(run.spec.data.stage)), needed)
    for _ in staging.work():
        watchdog.at(f"copying {manifest.source} to {staging.folder}")
    return staging.result


def needed_clips(run: Run, manifest: Manifest, ranks: Sequence[int]) -> Iterator[Clips]:
    """Yield the clips that these ranks read from now on, in the order of use, if the batch does not grow further."""
    plan, train = run.plan, run.train_set
    if manifest is train.manifest:
        order = plan.order(run.growth.rung)
        yield from map(train.kept.ids, order.clips_of_ranks(ranks, plan.ranks, range(run.start_step, plan.total_steps)))
    else:
        yield np.sort(np.concatenate([run.val_set.shard(rank, plan.ranks) for rank in ranks]))


def _notes(stage: str, nodes: Sequence[Sequence[Staged]]) -> list[str]:
    """Return one line for what was copied and at most one warning, whatever the number of nodes and sets."""
    staged = [one for node in nodes for one in node]
    copied, present = sum(one.copied for one in staged), sum(one.present for one in staged)
    notes = [f"staged to {stage} on {len(nodes)} nodes: {copied:,} bytes copied, {present:,} were there"]
    warnings = [one.warning for one in staged if one.warning]
    if warnings:
        more = f" (and {len(warnings) - 1} more such copies)" if len(warnings) > 1 else ""
        notes.append(f"warning: {warnings[0]}{more}")
    return notes if staged else []
