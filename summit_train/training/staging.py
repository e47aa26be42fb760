"""Staging before the first step: one rank of each node copies the packed sets to its disk, the others wait."""

from __future__ import annotations

from pathlib import Path

from summit_train.core.watch import Watchdog
from summit_train.data.packed.stage import stage
from summit_train.training.run import Run


def stage_sets(run: Run, watchdog: Watchdog) -> list[str]:
    """Copy the packed sets of a run to data.stage; return the notes for rank 0.

    Collective. A set that does not fit the disk, or a missing disk, gives one warning for all nodes; the set is then
    read from the shared folder. Raises UserError where a set is damaged.
    """
    dest, world = run.spec.data.stage, run.world
    if dest is None:
        return []
    if dest == "auto":
        return ["data.stage is auto: a job that `submit` writes stages; here nothing is staged"]
    sets = {manifest.source: manifest.is_packed for manifest in (run.val_set.manifest, run.train_set.manifest)}
    packed = [source for source, is_packed in sets.items() if is_packed]
    done = []
    for source in packed if world.local_rank == 0 else []:

        def show(number: int, total: int, source: str = source) -> None:
            watchdog.at(f"copying {source} to {dest}: {number} of {total} files")

        done.append(stage(Path(source), Path(dest), show))
    world.wait(lambda: watchdog.at("waiting for the nodes' copies of the data", waits=True))
    nodes = [node for node in world.gather(done) or [] if node]
    notes = []
    if nodes:
        copied, present = (sum(getattr(one, name) for node in nodes for one in node) for name in ("copied", "present"))
        notes.append(f"staged to {dest} on {len(nodes)} nodes: {copied:,} bytes copied, {present:,} were there")
    warnings = [one.warning for node in nodes for one in node if one.warning]
    if warnings:
        more = f" (and {len(warnings) - 1} more such copies)" if len(warnings) > 1 else ""
        notes.append(f"warning: {warnings[0]}{more}")
    raw = [source for source, is_packed in sets.items() if not is_packed] if world.rank == 0 else []
    return notes + [f"data.stage: {source} is not a packed set; its files are read where they are" for source in raw]
