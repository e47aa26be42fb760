"""A trained network with all that is needed to use it, from a run directory or from a checkpoint alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from summit_train.core.errors import UserError
from summit_train.core.saved import CheckpointError, bytes_for, give_weights, load_checkpoint, load_newest
from summit_train.data.manifest import read_classes
from summit_train.models import VideoNetwork
from summit_train.models.network import build_network, make_ready
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec, load_spec, spec_from_tree
from summit_train.spec.source import Tree, apply_override


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds for those who use the network.

    path: the checkpoint. run_path: its run directory, None for a file of its own. step: updates so far. classes: the
    names, label 0 first; numbers where the checkpoint has none, as `has_names` says. weights: the state dict, on the
    CPU. passed_over: why newer checkpoints of the run were skipped.
    """

    path: Path
    run_path: Path | None
    spec: Spec
    step: int
    classes: tuple[str, ...]
    has_names: bool
    weights: dict[str, torch.Tensor]
    passed_over: tuple[str, ...] = ()

    def network(self, device: torch.device, *, ready: bool = True) -> VideoNetwork:
        """Build the network on `device`, in evaluation mode, in the type of its weights.

        ready: let it run as fast as the spec asks for; else every layer is a plain torch module. Raises CheckpointError
        where an override made the spec that of another network.
        """
        network = build_network(self.spec).to(device=device, dtype=parameter_type(self.spec.precision))
        if ready:
            make_ready(network, self.spec)
        give_weights(network, self.path, self.weights)
        return network.eval()


def open_trained(path: str | Path, overrides: Sequence[str] = ()) -> Trained:
    """Open a run directory (its newest whole checkpoint) or a checkpoint file, with `section.key=value` overrides.

    Raises CheckpointError where there is none, it cannot be read, or it lacks its spec, and UserError for an override
    that is wrong.
    """
    path = Path(path)
    complaints: Sequence[str] = ()
    run_path: Path | None
    if path.is_dir():
        run_path = path
        file, state, complaints = load_newest(path, _most_bytes)
        if file is None:
            raise CheckpointError(f"{path}: there is no checkpoint in it; give the folder of a run that trained")
    elif not path.is_file():
        raise CheckpointError(f"{path}: no such run directory or checkpoint")
    elif path.suffix in (".yaml", ".yml"):
        raise CheckpointError(f"{path}: is a spec; the directory of its run must be given, {load_spec(path).run_path}")
    else:
        run_path = path.parent.parent if path.parent.name == "checkpoints" else None
        file, state = path, load_checkpoint(path, _most_bytes, may_be_alone=True)
    spec = _spec_in(file, state, overrides)
    names: Any = state.get("classes")
    has_names = isinstance(names, list) and len(names) == spec.model.num_classes
    classes = tuple(map(str, names if has_names else range(spec.model.num_classes)))
    return Trained(file, run_path, spec, state["step"], classes, has_names, state["model"], tuple(complaints))


def flow_problem(spec: Spec, reason: str) -> str | None:
    """Return that a network sees no pictures, for a command that needs them for this reason; None where it does."""
    if spec.data.modality == "rgb":
        return None
    return f"its network sees optical flow, and {reason}; take a run with data.modality rgb, or classify by `predict`"


def named(trained: Trained, names_file: str | None) -> Trained:
    """Return the trained network with the names in a file, one a line, label 0 first; as it is without a file."""
    if names_file is None:
        return trained
    names, num_classes = read_classes(names_file), trained.spec.model.num_classes
    if names is None or len(names) != num_classes:
        found = f"has {len(names or ())} names" if os.path.exists(names_file) else "there is no such file"
        raise UserError(f"{names_file}: {found}; it must name the {num_classes} classes of {trained.path}, one a line")
    return replace(trained, classes=names, has_names=True)


def _most_bytes(file: Path, state: dict[str, Any]) -> int:
    """Return the most bytes that a checkpoint may have, according to its own spec."""
    with torch.device("meta"):
        return bytes_for(build_network(_spec_in(file, state, ())))


def _spec_in(file: Path, state: dict[str, Any], overrides: Sequence[str]) -> Spec:
    if not isinstance(state.get("spec"), dict):
        raise CheckpointError(f"{file}: does not hold its spec, so its network is not known")
    tree = Tree(state["spec"], {(): str(file)})
    for override in overrides:
        apply_override(tree, override)
    return spec_from_tree(tree)
