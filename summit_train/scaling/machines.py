"""Machines for the cost model, typed as a spec is: YAML -> frozen Machine, shipped or from a file of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from summit_train.core.errors import UserError
from summit_train.counts import count_network
from summit_train.spec import ArchName, Spec
from summit_train.spec.catalog import Backbone, NonLocal
from summit_train.spec.source import read_kind, shipped_names
from summit_train.spec.typed import Count, Positive, Section, validated

Seconds = Annotated[float, Field(ge=0)]
RATE_KEYS = {"arch", "options", "backbone", "non_local", "width", "num_classes"}  # of a spec's `model` section


class Link(Section):
    """One hop: its seconds at size 0, and bytes a second in one direction."""

    latency_s: Seconds
    bytes_per_second: Positive
    source: str


class Network(Section):
    """How gradients travel: `intra` between the ranks of a node, `inter` to and from a whole node."""

    intra: Link
    inter: Link | None = None  # None: the machine is one node
    overhead_s: Seconds = 0.0  # of every allreduce, whatever its size and ranks
    # fastest: of ring and tree, message by message, as NCCL chooses
    algorithm: Literal["ring", "tree", "hierarchical", "fastest"] = "fastest"
    fusion_bytes: int | None = Field(default=None, ge=1)  # Horovod's fusion buffer; None: buckets of fixed order
    cycle_s: Positive = 1e-3  # Horovod looks for ready gradients once a cycle
    blocking: bool = False  # True: a cycle waits for its allreduce (MPI); False: it queues on the GPU (NCCL)
    # Part of a rank's core that an allreduce takes from its backward pass by polling (MPI): 0 where the polling thread
    # has a core of its own, 0.5 where the two share one.
    core_share: float = Field(default=0.0, ge=0.0, lt=1.0)


class Rate(Section):
    """Clips a second that one GPU trains, without the steps' fixed part; other sizes by their multiply-adds."""

    arch: ArchName
    options: dict[str, Any] = Field(default={})
    backbone: Backbone | None = "resnet50"
    non_local: NonLocal = False
    width: Positive = 1.0
    num_classes: Count = 400
    num_frames: Count
    crop: Count = 224
    multiply_adds: Annotated[int, Field(ge=1)] | None = None  # of a clip; None: counted from the keys above
    precision: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    clips_per_second: Positive
    source: str


class Compute(Section):
    """The speed of one GPU, without communication."""

    step_overhead_s: Seconds = 0.0  # of every forward and backward pass, whatever its clips
    straggler_cv: Seconds = 0.0  # deviation of a rank's time for one pass, as a part of that time
    rates: tuple[Rate, ...] = ()
    source: str = ""


class Storage(Section):
    """Where frames come from: the frames a second, read and decoded, of a node."""

    frames_per_second_per_node: Positive
    source: str


class Failures(Section):
    """How often the machine ends a job, and what comes of it. The defaults are those of no particular machine."""

    gpu_hours: Positive = 50_700.0  # on average between two failures, on all GPUs of the job together
    restart_s: Seconds = 300.0  # from a failure until the next job makes steps, without a queue
    copy_bytes_per_second: Positive = 1.3e9  # of a checkpoint into memory
    write_bytes_per_second: Positive = 4.0e8  # of its SHA-256 and its file, flushed, by one process
    source: str = "Llama 3's 419 interruptions of 16,384 GPUs in 54 days; 5 min and the bytes a second are assumed"


class Machine(Section):
    """One cluster, or one computer. On a machine without GPUs, `gpus_per_node` are processes."""

    name: str
    about: str
    gpus_per_node: Count
    network: Network
    compute: Compute = Compute()
    shared: Storage | None = None  # the file system of all nodes; None: never waited for
    failures: Failures = Failures()
    # An epoch's partial batch: dropped as `train` does, or a step as in the runs that the constants were fitted to.
    last_batch: Literal["drop", "keep"] = "drop"


def load_machine(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Machine:
    """Load the shipped machine of that name, or the file at that path, with overrides. Raises UserError (file:line)."""
    machine = validated(Machine, read_kind("machine", str(name_or_path), overrides))
    if machine.network.algorithm == "hierarchical" and machine.network.inter is None:
        raise UserError(f"{name_or_path}: network.algorithm: hierarchical needs network.inter, a link between nodes")
    return machine


def machine_names() -> list[str]:
    return [name.removeprefix("machines/") for name in shipped_names("machines/")]


def find_rate(machine: Machine, arch: str, precision: str) -> Rate:
    """Return the machine's rate for a network and precision. Raises UserError where it has none."""
    for rate in machine.compute.rates:
        if (rate.arch, rate.precision) == (arch, precision):
            return rate
    known = ", ".join(f"{rate.arch} {rate.precision}" for rate in machine.compute.rates) or "none"
    right = "measure the clips a second of one rank and give them with --clips-per-second X"
    raise UserError(f"{machine.name}: no rate for {arch} in {precision} (compute.rates has: {known}); {right}")


def with_rate(machine: Machine, spec: Spec, clips_per_second: float) -> Machine:
    """Return the machine with one rate in place of all others, which includes the steps' fixed part.

    It is measured with the spec's own network, clips and precision, on one GPU, without waiting for data.
    """
    own: dict[str, Any] = {"arch": spec.model.arch, "num_frames": spec.data.num_frames, "precision": spec.precision}
    own["multiply_adds"] = count_network(spec).multiply_adds
    rate = Rate(**own, clips_per_second=clips_per_second, source="given")
    source = f"{clips_per_second:g} clips a second of one GPU, given"
    updates = {"rates": (rate,), "step_overhead_s": 0.0, "source": source}
    return machine.model_copy(update={"compute": machine.compute.model_copy(update=updates)})
