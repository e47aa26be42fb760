"""Load files that torch saved: checkpoints and pretrained weights.

Each must match its SHA-256, hold plain values only, and be no larger than its network can need. Its size is taken from
the directory of its zip, and its shapes are known, before any of its numbers is read. The file is mapped: its numbers
enter the memory where they are used.
"""

from __future__ import annotations

import os
import shlex
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256, read_file, regular
from summit_train.core.run_folder import CheckpointError, digest_path, find_checkpoints, learner_path
from summit_train.core.text import from_json

# Weights, two states of a solver, and the average of the weights; each in double at most.
_BYTES_PER_ELEMENT = 4 * 8
SAFETENSORS = ".safetensors"
SAFETENSORS_KEY = "summit_train"  # of what a checkpoint has besides its weights, in the file's metadata
_MAPS = 16  # times at most that a file is mapped to read all its tensors
_LEAST_OF_A_MAP = 4 << 20  # bytes; opening a map takes longer than reading a few
_BESIDES = 1 << 28  # class names, a classifier of more classes, another network that is refused by its name

# Maps a file and its content without numbers (tensors on the meta device) to the most bytes that it may have.
Bound = Callable[[Path, Any], int]


def bytes_for(network: nn.Module) -> int:
    """Return the most bytes that a file with the weights of `network` may have."""
    elements: int = sum(value.numel() for value in network.state_dict().values())
    return _BESIDES + _BYTES_PER_ELEMENT * elements


def bound_of(network: nn.Module) -> Bound:
    """Return a bound on the files for a network, whatever they say of themselves."""
    return lambda path, content: bytes_for(network)


def check_learners(
    path: Path, digests: list[str], rank: int = 0, size: int = 1, note: Callable[[str], None] = lambda where: None
) -> None:
    """Raise CheckpointError unless the files of the learners of one rank of `size` match their SHA-256."""
    for number in range(rank * len(digests) // size, (rank + 1) * len(digests) // size):
        file = learner_path(path, number)
        note(f"checking {file}")
        try:
            found = file_sha256(file)
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise CheckpointError(f"{path}: {file} {why}") from error
        if found != digests[number]:
            raise CheckpointError(f"{path}: {file} is damaged: its SHA-256 is not that in the checkpoint")


def load_newest(
    run_path: Path, bound: Bound, damaged: Mapping[Path, str] | None = None
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Return the newest checkpoint that is whole: (path, state, complaints about newer ones that are not).

    A checkpoint deleted meanwhile is not a complaint: the run that trains has a newer one. damaged: complaints about
    learner files, by checkpoint, if the caller checks these files; None: they are checked here. Returns (None, {}, [])
    without any checkpoint. Raises CheckpointError if every checkpoint is damaged: starting over would silently discard
    the run.
    """
    complaints = dict(damaged or {})
    gone = ""
    while paths := [path for path in find_checkpoints(run_path) if path not in complaints]:
        path = paths[-1]
        try:
            state = load_checkpoint(path, bound)
            if damaged is None:
                check_learners(path, state.get("learner_digests", []))
            return path, state, list(complaints.values())
        except CheckpointError as error:
            if os.path.lexists(path):
                complaints[path] = str(error)
            else:
                gone = str(error)
    if complaints or gone:
        reasons = "; ".join(complaints.values()) or gone
        raise CheckpointError(f"no checkpoint of {run_path} can be read ({reasons}); move them away to start over")
    return None, {}, []


def load_checkpoint(path: Path, bound: Bound, *, may_be_alone: bool = False, checked: bool = False) -> dict[str, Any]:
    """Check the digest of a checkpoint, unless `checked`, then load it on the CPU.

    may_be_alone: accept a file that was copied without its digest, unchecked.
    Raises CheckpointError if the file is missing, torn, changed, too large, or no checkpoint of plain values.
    """
    if not checked:
        check_digest(path, may_be_alone=may_be_alone)
    return _checked(path, load_saved(path, lambda path, content: bound(path, _checked(path, content))))


def check_digest(path: Path, *, may_be_alone: bool) -> None:
    """Raise CheckpointError unless a file matches its SHA-256 file. may_be_alone: that file may be missing."""
    digest_file = digest_path(path)
    try:
        found = file_sha256(path)
        wanted = found if may_be_alone and not digest_file.exists() else read_file(digest_file).decode().split()[0]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {error.filename} is missing") from error
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if wanted != found:
        raise CheckpointError(f"{path}: the file is damaged: its SHA-256 is not that in {digest_file.name}")


def load_saved(path: Path, bound: Bound) -> Any:
    """Load what torch saved, plain values only, or a .safetensors file, onto the CPU. Raises CheckpointError."""
    if path.suffix == SAFETENSORS:
        return _load_safetensors(path, bound)
    size = _unpacked_size(path)
    most = bound(path, peek(path))
    if size > most:
        raise CheckpointError(f"{path}: unpacks to {size:,} bytes; its network needs {most:,} at most")
    return _load(path, "cpu")


def _load_safetensors(path: Path, bound: Bound) -> dict[str, Any]:
    """Return {"model": tensors} and what else a checkpoint has: JSON in the file's metadata, by earlier versions."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: reading it needs the package safetensors: pip install safetensors") from error
    try:
        with open(path, "rb", opener=regular), safe_open(path, "pt") as file:
            about = from_json((file.metadata() or {}).get(SAFETENSORS_KEY, "{}"))
            if not isinstance(about, dict):
                raise ValueError(f"its {SAFETENSORS_KEY} must hold values by name, got {_kind(about)}")
            size = path.stat().st_size
            most = bound(path, about | {"model": {}})
            if size > most:
                raise CheckpointError(f"{path}: has {size:,} bytes; its network needs {most:,} at most")
            return about | {"model": {name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a safetensors file ({error})") from error


def peek(path: Path) -> Any:
    """Load what torch saved onto the meta device: no number is read, no digest checked. Raises CheckpointError."""
    size = _unpacked_size(path)
    if size > (stored := _stored_size(path)):
        raise CheckpointError(f"{path}: unpacks to {size:,} bytes of {stored:,}; torch never compresses what it saves")
    return _load(path, "meta")


def _unpacked_size(path: Path) -> int:
    """Return the bytes of the file in memory, from its zip directory; older formats are not compressed."""
    try:
        with open(path, "rb", opener=regular) as file:
            if file.read(4) != b"PK\3\4":
                return _stored_size(path)
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path}: cannot be read as a file of torch's ({error})") from error


def _stored_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _load(path: Path, device: str) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # A damaged file can raise almost anything out of the unpickler.
        raise CheckpointError(_why_unreadable(path, str(error).strip() or type(error).__name__)) from error


def _why_unreadable(path: Path, reason: str) -> str:
    is_pickled = False
    with suppress(OSError), open(path, "rb") as file:  # any text reads as a pickle's operands; torch's begin otherwise
        is_pickled = file.read(1) in (b"P", b"\x80")
    if "legacy .tar format" in reason:
        problem = "is in torch's legacy tar format"
    elif is_pickled and any(f"Unsupported {part}" in reason for part in ("global", "class", "operand")):
        problem = "holds pickled objects besides tensors"
    else:
        return f"{path}: cannot be read as a file of torch's ({reason.splitlines()[0]})"
    program = (
        f"import torch; x = torch.load({str(path)!r}, map_location='cpu', weights_only=False); "
        "x = x.get('state_dict', x) if isinstance(x, dict) else x.state_dict(); "
        f"torch.save(x, {str(path) + '.converted'!r})"
    )
    right = f"If you trust where it comes from, convert it once: python -c {shlex.quote(program)}"
    return f"{path} {problem}, which cannot be read without running code from it. {right}"


def _checked(path: Path, state: Any) -> dict[str, Any]:
    """Return the content of a checkpoint. Raises CheckpointError unless it has the parts that every command reads."""
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise CheckpointError(f"{path}: not a checkpoint of a run, which has model, optimizer and step")
    step = state["step"]
    average = state.get("ema", {"model": {}})
    digests = state.get("learner_digests", [])
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: step must be a number of updates, got {step!r}")
    for name, value in (("ema", average), ("experiment", state.get("experiment", {}))):
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: {name} must hold values by name, got {_kind(value)}")
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise CheckpointError(f"{path}: learner_digests must be a list of SHA-256, got {_kind(digests)}")
    for name, weights in (("model", state["model"]), ("ema.model", average.get("model"))):
        if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise CheckpointError(f"{path}: {name} must hold tensors by name, got {_kind(weights)}")
    return state


def give_weights(network: nn.Module, path: Path, weights: Mapping[str, Any]) -> None:
    """Load a checkpoint's weights into a network. Raises CheckpointError, with its path, where they do not fit."""
    check_fit(path, "model", weights, network.state_dict())
    network.load_state_dict(weights)


def check_fit(path: Path, name: str, saved: Any, own: Any) -> None:
    """Raise CheckpointError unless a part of the checkpoint `path` has the structure of this run's own part.

    Tensors must have the same shape, and be floats of any precision or of the same type; mappings the same keys.
    """
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in sorted(own.keys() ^ saved.keys(), key=str):
            raise CheckpointError(f"{path}: does not fit: {name} {'has no' if key in own else 'must not have'} {key}")
        for key, value in own.items():
            check_fit(path, f"{name}.{key}", saved[key], value)
    elif isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        floats = own.is_floating_point() and saved.is_floating_point()
        if own.shape != saved.shape or not (floats or own.dtype == saved.dtype):
            raise CheckpointError(f"{path}: does not fit: {name} must be {_kind(own)}, got {_kind(saved)}")
    elif isinstance(own, Mapping | torch.Tensor) or not isinstance(saved, int | float):
        raise CheckpointError(f"{path}: does not fit: {name} must be {_kind(own)}, got {_kind(saved)}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that all ranks of `world` read together, or one rank alone; its digest has been checked.

    state: its content, equal on all ranks. Large tensors may be on the meta device (`without_numbers`): `fill` reads
    their numbers from the file.
    """

    path: Path
    state: Mapping[str, Any]
    world: World

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the file's tensors into the targets of the same names (`tensors_of`), which must fit. Collective."""
        self.world.from_first(lambda: copy_tensors(self.path, targets))
        self.world.broadcast_tensors(targets)

    def restore(self, network: nn.Module) -> None:
        """Copy the weights into a network. Collective. Raises CheckpointError if they do not fit."""
        own = network.state_dict()
        self.world.together(lambda: check_fit(self.path, "model", self.state.get("model"), own))
        self.fill(tensors_of(own, "model"))


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state, or of its part `name`, by their keys joined by dots."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    if not isinstance(state, Mapping):
        return {}
    parts = (tensors_of(value, f"{name}.{key}" if name else str(key)) for key, value in state.items())
    return {key: tensor for part in parts for key, tensor in part.items()}


def unmapped(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in memory, for weights that are used long after the check: by then the file may be gone."""
    return {name: value.clone() for name, value in weights.items()}


def without_numbers(state: Any) -> Any:
    """Return a state with each tensor on the meta device, which keeps only its type and shape."""
    if isinstance(state, Mapping):
        return {key: without_numbers(value) for key, value in state.items()}
    return state.to("meta") if isinstance(state, torch.Tensor) else state


@torch.no_grad()
def copy_tensors(path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors of a file saved by torch into the targets of the same names, which must fit.

    Map a large file again for each sixteenth of the bytes: closing a map frees the pages read through it.
    """
    left = list(targets)
    most = max(_LEAST_OF_A_MAP, sum(target.nbytes for target in targets.values()) // _MAPS)
    while left:
        found = tensors_of(_load(path, "cpu"))
        copied = 0
        while left and copied <= most:
            target = targets[left[0]]
            target.copy_(found[left.pop(0)])
            copied += target.nbytes


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "values by name" if isinstance(value, Mapping) else type(value).__name__
