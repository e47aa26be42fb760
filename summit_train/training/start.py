"""Before the first step: check the inputs, the ranks and this machine, choose the device, stage the data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import summit_train
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.machine import keep_freed_memory, processor_name
from summit_train.core.saved import CheckLearners, CheckpointError, bound_of, check_learners, load_newest
from summit_train.core.text import counted
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.reading import check_same_classes
from summit_train.data.packed.stage import stage
from summit_train.models import VideoNetwork
from summit_train.models.foreign import check_norms
from summit_train.models.network import build_network, count_network, cpu_kernels
from summit_train.models.weights import load_pretrained
from summit_train.plan import Plan, make_plan
from summit_train.spec import Identity, Spec, experiment_keys, rank_keys
from summit_train.training.checkpoint import experiment_differences
from summit_train.training.metrics import last_extension

_WRONG = 0.1  # relative error of a gradient; a right one in bf16 is off by 0.002
_CODE = "summit_train (digest of the code)"
_PACKAGES = ("torch", "horovod", "mpi4py", "numpy", "av", "pydantic")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of an option that takes files and overrides as one list: (files, overrides)."""
    overrides = [word for word in words if re.match(r"(\w+\.)*\+?\w+=", word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


@dataclass(frozen=True)
class Inputs:
    """The user's input, read and found to fit together before any rank talks to another."""

    spec: Spec
    plan: Plan
    train: Dataset
    val: Dataset

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {"train": self.train, "val": self.val}


def read_inputs(spec: Spec, ranks: int) -> Inputs:
    train, val = open_datasets(spec)
    return Inputs(spec, make_plan(spec, ranks, len(train)), train, val)


def open_datasets(spec: Spec) -> tuple[Dataset, Dataset]:
    """Open the training and the validation set. Raises UserError if one is wrong or they do not fit together."""
    train, val = Dataset.open(spec, "train"), Dataset.open(spec, "val")
    check_same_classes(val.manifest.source, val.manifest.classes, train.manifest.source, train.manifest.classes)
    return train, val


def experiment_of(spec: Spec, plan: Plan, train: Dataset | None, model: VideoNetwork) -> Identity:
    """Return what must be equal for one run to resume from another's checkpoint.

    The number of ranks is not part of it, nor where the data are, nor what only changes the speed. train: None where
    the list of the clips is missing; its fingerprints are then left out.
    """
    lists = {
        "data.train (fingerprint)": None if train is None else train.manifest.fingerprint(),
        "data.quarantine (fingerprint)": None if train is None else train.kept.fingerprint(),
    }
    scale = {"scale.gpus": plan.virtual_gpus, "scale.clips_per_gpu": plan.clips_per_gpu}
    return Identity(experiment_keys(spec) | scale, lists, model.sources)


def first_state(
    spec: Spec,
    plan: Plan,
    train: Dataset | None,
    model: VideoNetwork,
    check: CheckLearners = check_learners,
    *,
    more_epochs: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return the newest whole checkpoint of the run, or {} after loading pretrained weights into `model`; and notes.

    train: as in experiment_of. check: as in load_newest. more_epochs: asked for, or recorded, the run may be longer
    than that of the checkpoint, whose step then is the lineage of later ones ("line"). Raises CheckpointError if the
    checkpoint is of another experiment otherwise or none is whole, and UserError for weights that are missing or of
    another network, and for a foreign network whose norms depend on the ranks.
    """
    if plan.virtual_gpus > 1:
        check_norms(model)
    path, state, complaints = load_newest(spec.run_path, bound_of(model), check)
    notes = [f"passed over: {complaint}" for complaint in complaints]
    if path is None:
        if (weights := spec.model.pretrained) is not None:
            try:
                report = load_pretrained(model, weights, None if train is None else train.manifest.classes)
            except UserError as error:
                raise UserError(f"model.pretrained: {error}") from error
            notes.append(f"pretrained: {report}")
        return {}, notes
    own = experiment_of(spec, plan, train, model)
    unknown = own.lists if train is None else ()
    saved = {key: value for key, value in state.get("experiment", {}).items() if key not in unknown}
    differing = experiment_differences(saved, own.values())
    epochs = spec.schedule.epochs
    is_longer = differing.keys() == {"schedule.epochs"} and saved.get("schedule.epochs", epochs) < epochs
    if is_longer and (more_epochs or (last_extension(spec.run_path) or (0, 0))[1] == epochs):
        lr = f"LR continues at {plan.learning_rate(state['step']):.6g}, as in a run of {epochs} epochs"
        notes.append(f"more epochs: {epochs} instead of {saved['schedule.epochs']}; {lr}")
        state = {key: value for key, value in state.items() if not key.startswith("best_")} | {"line": state["step"]}
    elif differing:
        right = f"Give this run another name; to begin it with these weights, set model.pretrained to {spec.run_path}"
        if is_longer:
            right = f"To train it longer: train {spec.run_path} --more-epochs {epochs - saved['schedule.epochs']}"
        raise CheckpointError(f"{path} is of another experiment: {'; '.join(differing.values())}. {right}")
    return state, [*notes, f"resumes from {path}"]


def check_agreement(world: World, spec: Spec, datasets: Mapping[str, Dataset], **arguments: object) -> None:
    """Raise AgreedError on all ranks if one was started with something other than rank 0. Collective.

    The message names the rank, its host and the first key that differs. datasets: by their keys in the spec's `data`.
    arguments: those of the command. The code is read by the first rank of each node, which shares its files, and by
    those that run it from a folder other than rank 0's.
    """
    if world.size == 1:
        return
    package, takes_first = Path(summit_train.__file__).parent, world.local_rank > 0
    mine = arguments | identity(spec, datasets, digest="" if takes_first else code_digest(package)).values()
    who, folder, expected = world.broadcast((world.who, str(package), mine))

    def compare() -> None:
        if takes_first:
            mine[_CODE] = expected[_CODE] if folder == str(package) else code_digest(package)
        for key in expected | mine:
            if (first := expected.get(key)) != (own := mine.get(key)):
                right = "start all ranks with the same spec, lists and code"
                raise UserError(f"{world.who} differs from {who}: {key} must be {first!r}, got {own!r}; {right}")

    world.together(compare)


def identity(spec: Spec, datasets: Mapping[str, Dataset], *, digest: str | None = None) -> Identity:
    """Return what must be equal on all ranks of a run, the most telling first. digest: of the code, where known."""
    lists = dict[str, str | None]()
    for name, dataset in datasets.items():
        lists[f"data.{name} (fingerprint)"] = dataset.manifest.fingerprint()
        lists[f"data.quarantine of data.{name} (fingerprint)"] = dataset.kept.fingerprint()
    with torch.device("meta"):
        network = build_network(spec)
    shapes = repr([(name, tuple(value.shape), value.dtype) for name, value in network.state_dict().items()])
    code = {
        "summit_train (version)": summit_train.__version__,
        "torch (version)": str(torch.__version__),
        _CODE: code_digest(Path(summit_train.__file__).parent) if digest is None else digest,
        **network.sources,
        "network (digest of names and shapes)": hashlib.sha256(shapes.encode()).hexdigest(),
    }
    return Identity(rank_keys(spec), lists, code)


def code_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def choose_device(world: World) -> torch.device:
    """Return a GPU by local rank, or the CPU, and take this rank's share of the cores there.

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


def check_arithmetic(spec: Spec, device: torch.device) -> None:
    """Raise UserError where the gradients of `spec` on `device` would be wrong.

    With torch 2.13.0 on a CPU with AVX-512, oneDNN's weight gradient of a 3D convolution in bf16 is uninitialised
    memory where clips have exactly two frames and the kernel sees three, whatever the picture's size. I3D 3x3x3 with
    16 frames has two in res4.
    """
    if device.type != "cpu" or spec.precision != "bf16" or 2 not in count_network(spec).stages.values():
        return
    if error_of_two_frames() > _WRONG:
        wrong = "this CPU's library computes wrong gradients of 3D convolutions over two frames"
        has = f"a stage of {spec.model.title} has two with data.num_frames {spec.data.num_frames}"
        raise UserError(f"precision bf16: {wrong}, and {has}; take precision=fp32")


def error_of_two_frames() -> float:
    """Return the relative error of a weight gradient in bf16, of a kernel of three frames over two; inf for a NaN."""
    generator = torch.Generator().manual_seed(0)
    clips, grad = (torch.randn(2, 16, 2, 4, 4, generator=generator).bfloat16() for _ in range(2))
    gradients = list[torch.Tensor]()
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.full((16, 16, 3, 1, 1), 0.125, dtype=dtype, requires_grad=True)
        out = functional.conv3d(clips.to(dtype), weight, padding=(1, 0, 0))
        gradients += torch.autograd.grad(out, weight, grad.to(dtype))
    found, right = gradients
    error = float((found.double() - right).norm() / right.norm())
    return error if error < math.inf else math.inf


def stage_sets(inputs: Inputs, world: World, watchdog: Watchdog) -> list[str]:
    """Copy the packed sets of a run to data.stage, on one rank of each node; return the notes for rank 0. Collective.

    A set that does not fit the disk, or a missing disk, gives one warning for all nodes; the set is then
    read from the shared folder. Raises UserError where a set is damaged.
    """
    dest = inputs.spec.data.stage
    if dest is None:
        return []
    if dest == "auto":
        return ["data.stage is auto, but nothing was staged: only a job of `submit` stages, and only packed sets"]
    sets = {manifest.source: manifest.is_packed for manifest in (inputs.val.manifest, inputs.train.manifest)}
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
        where = f"{dest} on {counted(len(nodes), 'node')}"
        notes.append(f"staged to {where}: {copied:,} bytes copied, {present:,} were there")
    warnings = [one.warning for node in nodes for one in node if one.warning]
    if warnings:
        more = f" (and {len(warnings) - 1} more such copies)" if len(warnings) > 1 else ""
        notes.append(f"warning: {warnings[0]}{more}")
    raw = [source for source, is_packed in sets.items() if not is_packed] if world.rank == 0 else []
    return notes + [f"data.stage: {source} is not a packed set; its files are read where they are" for source in raw]


def environment(world: World, device: torch.device, hosts: Sequence[str]) -> dict[str, Any]:
    """Return what a person needs to trust or repeat the run's figures; `hosts`: every rank's host."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "summit_train": summit_train.__version__,
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "kernels": cpu_kernels(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": world.backend,
        "ranks": world.size,
        "hosts": dict(Counter(hosts)),
        "ranks_per_node": world.local_size,  # of rank 0's node, as the launcher sees nodes
    }
