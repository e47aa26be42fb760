"""What `train` and `eval` begin with: the spec's inputs checked, then the world of ranks opened around the work."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from summit_train.cluster.launcher import Launch, find_launch
from summit_train.comm import World, open_world
from summit_train.data.batches.store import open_store
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.errors import UserError
from summit_train.memory import keep_freed_memory
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, SpecError, load_spec
from summit_train.training.watch import AgreedError, Watchdog


@dataclass(frozen=True)
class Inputs:
    """What the user gave, read and found to fit together, before any rank talks to another."""

    spec: Spec
    plan: Plan
    train_manifest: Manifest
    val_manifest: Manifest


def this_launch() -> Launch:
    """How this process was started; a process started by hand is rank 0 of 1."""
    return find_launch(os.environ) or Launch("hand", 0, 1, interactive=True)


def read_inputs(path: str, overrides: Sequence[str], ranks: int) -> Inputs:
    """Read spec and manifests and work out the plan. Raises ValueError for any mistake in them."""
    spec = load_spec(path, overrides)
    train_manifest, val_manifest = (manifest_of(spec, which) for which in ("train", "val"))
    val_manifest.check_classes(train_manifest)
    plan = make_plan(spec, ranks, len(kept_clips(spec.data, train_manifest)))
    return Inputs(spec, plan, train_manifest, val_manifest)


def manifest_of(spec: Spec, which: str) -> Manifest:
    """The spec's manifest, `which` is train or val. Raises ValueError where it is missing or wrong."""
    path = spec.data.train if which == "train" else spec.data.val
    if not Path(path).exists():
        raise SpecError(f"data.{which}: there is no {path} (relative paths start at {Path.cwd()})")
    manifest = read_manifest(path)
    manifest.check_labels(spec.model.num_classes)
    open_store(spec.data, manifest)  # a packed set that is damaged or does not fit is refused before ranks meet
    return manifest


@contextmanager
def session(launch: Launch) -> Iterator[World]:
    """The open world for the block. An error on one rank ends all of them, after it was said which and why.

    An AgreedError was raised by all ranks together, so they can leave in order and rank 0 alone speaks.
    """
    world = open_world(launch.size)
    try:
        yield world
    except AgreedError:
        world.close()
        raise
    except BaseException as error:
        if world.size > 1:
            print(f"{world.who}: {describe(error)}", file=sys.stderr, flush=True)
            world.abort(2 if isinstance(error, ValueError | UserError) else 1)
        raise
    world.close()


def watched(world: World, stall_seconds: float | None) -> Watchdog:
    """This rank's watchdog; one rank that stalls ends all of them."""
    return Watchdog(world.who, stall_seconds, lambda: world.abort(1))


def describe(error: BaseException) -> str:
    """An error of ours as its message, any other with its traceback."""
    if isinstance(error, ValueError | UserError) or type(error).__module__.startswith("summit_train"):
        return str(error)
    return "".join(traceback.format_exception(error))


def choose_device(world: World) -> torch.device:
    """One GPU a rank by local rank, or the CPU with this rank's share of the cores.

    Where a launcher shows each rank one GPU only (jsrun -r6 -g1), every local rank's device is number 0.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    keep_freed_memory()
    return torch.device("cpu")
