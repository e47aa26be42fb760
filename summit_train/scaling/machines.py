"""Machines for the cost model, typed as a spec is: YAML -> frozen Machine, shipped or from a file of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from summit_train.core.errors import UserError
from summit_train.spec import Spec
from summit_train.spec.catalog import Arch, Backbone, NonLocal
from summit_train.spec.source import SpecError, file_of, read_tree, shipped
from summit_train.spec.typed import Count, Positive, Section, validated

Seconds = Annotated[float, Field(ge=0)]
Precision = Literal["fp32", "fp16", "bf16", "fp64"]


class MachineError(UserError):
    """A figure that a machine's file lacks, or a request beyond it."""


class Link(Section):
    """One hop: its seconds at size 0, and bytes a second in one direction."""

    latency_s: Seconds
    bytes_per_second: Positive
    source: str


class Network(Section):
    """How gradients travel: `intra` between the ranks of a node, `inter` to and from a whole node."""

    intra: Link
    inter: Link | None = Field(default=None, description="null: the machine is one node.")
    overhead_s: Seconds = Field(default=0.0, description="Of every allreduce, whatever its size and ranks.")
    algorithm: Literal["ring", "tree", "hierarchical", "fastest"] = Field(
        default="fastest", description="fastest: of ring and tree, message by message, as NCCL chooses."
    )
    fusion_bytes: int | None = Field(
        default=None, ge=1, description="Horovod's fusion buffer; null: gradients travel in buckets of fixed order."
    )
    cycle_s: Positive = Field(default=1e-3, description="Horovod looks for ready gradients so often (default 1 ms).")
    blocking: bool = Field(
        default=False, description="true: a cycle waits for its allreduce (MPI); false: it queues on the GPU (NCCL)."
    )
    core_share: float = Field(
        default=0.0, ge=0.0, lt=1.0,
        description="Part of a rank's core that an allreduce takes from its backward pass, by waiting without a pause "
        "(MPI): 0 where the waiting thread has a core of its own, 0.5 where the two share one.",
    )  # fmt: skip


class Rate(Section):
    """Clips a second that one GPU trains, without the steps' fixed part; other sizes by their multiply-adds."""

    arch: Arch
    backbone: Backbone | None = "resnet50"
    non_local: NonLocal = False
    width: Positive = 1.0
    num_classes: Count = 400
    num_frames: Count
    crop: Count = 224
    precision: Precision = "fp32"
    clips_per_second: Positive
    source: str


class Compute(Section):
    """What a GPU does alone."""

    step_overhead_s: Seconds = Field(default=0.0, description="Of every forward and backward pass, whatever its clips.")
    straggler_cv: Seconds = Field(
        default=0.0, description="Deviation of a rank's time for one pass, as a part of that time."
    )
    rates: tuple[Rate, ...] = ()
    source: str = ""


class Storage(Section):
    """Where frames come from: the frames a second, read and decoded, of a node and of all nodes together."""

    frames_per_second_per_node: Positive
    frames_per_second_total: Positive | None = Field(default=None, description="null: nodes do not slow each other.")
    source: str


class Machine(Section):
    """One cluster, or one computer."""

    name: str
    about: str
    gpus_per_node: Count = Field(description="Ranks of a node; on a machine without GPUs they are processes.")
    network: Network
    compute: Compute = Compute()
    shared: Storage | None = Field(default=None, description="File system of all nodes; null: never waited for.")
    local: Storage | None = Field(default=None, description="Disk of each node, after staging.")
    last_batch: Literal["drop", "keep"] = Field(
        default="drop",
        description="An epoch's last, partial batch: dropped as `train` does, or a step of its own as in the runs "
        "that the constants were fitted to.",
    )


def load_machine(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Machine:
    """Load the shipped machine of that name, or the file at that path, with `section.key=value` overrides.

    Raises SpecError for a name that is neither, and (file:line) for a mistake in the file.
    """
    path = file_of("machine", str(name_or_path))
    machine = validated(Machine, read_tree(path, overrides))
    if machine.network.algorithm == "hierarchical" and machine.network.inter is None:
        raise SpecError(f"{path}: network.algorithm: hierarchical needs network.inter, a link between nodes")
    return machine


def machine_names() -> list[str]:
    """Return the names of the shipped machines."""
    return sorted(path.stem for path in shipped("configs/machines").glob("*.yaml"))


def find_rate(machine: Machine, arch: str, precision: str) -> Rate:
    """Return the machine's rate for a network and precision. Raises MachineError where it has none."""
    for rate in machine.compute.rates:
        if (rate.arch, rate.precision) == (arch, precision):
            return rate
    known = ", ".join(f"{rate.arch} {rate.precision}" for rate in machine.compute.rates) or "none"
    raise MachineError(
        f"{machine.name}: no rate for {arch} in {precision} (compute.rates has: {known}); measure the clips a second "
        "of one rank and give them with --clips-per-second X"
    )


def with_rate(machine: Machine, spec: Spec, clips_per_second: float) -> Machine:
    """Return the machine with one rate in place of all others, which has the steps' fixed part in it.

    It is measured with the spec's own network, frames, crop and precision, on one GPU, without waiting for data.
    """
    network = spec.model.model_dump(include={"arch", "backbone", "non_local", "width", "num_classes"})
    network |= spec.data.model_dump(include={"num_frames", "crop"})
    rate = Rate(**network, precision=spec.precision, clips_per_second=clips_per_second, source="given")
    source = f"{clips_per_second:g} clips a second of one GPU, given"
    updates = {"rates": (rate,), "step_overhead_s": 0.0, "source": source}
    return machine.model_copy(update={"compute": machine.compute.model_copy(update=updates)})
