"""A trained network with all that is needed to use it, from a run folder or from a checkpoint alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from summit_train.core import saved
from summit_train.core.errors import UserError
from summit_train.core.run_folder import CheckpointError, best_checkpoint
from summit_train.models import VideoNetwork
from summit_train.models.build import build_network
from summit_train.models.foreign import check_sources, sources_of
from summit_train.models.network import make_ready
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec, load_spec, spec_from_tree, spec_from_values
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import Tree, apply_override


@dataclass(frozen=True)
class Trained:
    """The content of a checkpoint.

    path: the checkpoint. run_path: its run folder, None for a lone file. step: updates so far. classes: the names,
    label 0 first; numbers if the checkpoint lacks them (`has_names`). weights: the state dict, on the CPU.
    passed_over: why newer checkpoints of the run were skipped. experiment: what its run compares to resume.
    """

    path: Path
    run_path: Path | None
    spec: Spec
    step: int
    classes: tuple[str, ...]
    has_names: bool
    weights: dict[str, torch.Tensor]
    passed_over: tuple[str, ...] = ()
    experiment: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Return plain values and tensors for the other ranks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        run_path = None if self.run_path is None else str(self.run_path)
        return values | {"path": str(self.path), "run_path": run_path, "spec": self.spec.model_dump(mode="json")}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> Trained:
        path = message["path"]
        run_path = None if message["run_path"] is None else Path(message["run_path"])
        spec = spec_from_values(message["spec"], path)
        return cls(**{**message, "path": Path(path), "run_path": run_path, "spec": spec})

    def network(self, device: torch.device, *, ready: bool = True) -> VideoNetwork:
        """Build the network on `device`, in evaluation mode, in the type of its weights.

        ready: execute it as fast as the spec asks for; otherwise every layer is a plain torch module. Raises
        CheckpointError if an override made the spec that of another network.
        """
        network = build_network(self.spec).to(device=device, dtype=parameter_type(self.spec.precision))
        if ready:
            make_ready(network, self.spec)
        saved.give_weights(network, self.path, self.weights)
        return network.eval()

    def check_pictures(self, problem: str | None) -> None:
        """Raise UserError for this problem of the network, and for a network that sees optical flow."""
        if problem is None and self.spec.data.modality != "rgb":
            problem = "its network sees optical flow, not RGB frames; try a run with data.modality rgb, or `predict`"
        if problem is not None:
            raise UserError(f"{self.path}: {problem}")

    def check_labels(self, command: str) -> None:
        """Raise UserError for a network of a task that gives no class to a video."""
        if self.spec.task == "detection":
            why = f"{command} is for classifiers, and this network is a detector"
            raise UserError(f"{self.path}: {why}; try `summit-train stream`, or `eval`")


def open_trained(path: str | Path, overrides: Sequence[str] = (), checkpoint: str = "last") -> Trained:
    """Open a run folder or a checkpoint file, with `section.key=value` overrides.

    checkpoint: of a run folder: last (the newest that is intact), best, or the path of one of its files. Raises
    CheckpointError for a missing or unreadable one and for one without its spec, UserError for a bad override and for
    the code of a foreign network if it has changed, or if nothing but the checkpoint names it.
    """

    def spec_in(file: Path, state: dict[str, Any]) -> Spec:
        if not isinstance(state.get("spec"), dict):
            raise CheckpointError(f"{file}: lacks its spec, so its network is not known")
        tree = Tree(state["spec"], {(): str(file)})
        for override in overrides:
            apply_override(tree, override)
        spec = spec_from_tree(tree)
        _check_named(file, spec, run_path, overrides)
        return spec

    def most_bytes(file: Path, state: dict[str, Any]) -> int:
        spec = spec_in(file, state)
        check_sources(file, state, sources_of(spec.model.arch))  # before anything of that code runs
        with torch.device("meta"):
            return saved.bytes_for(build_network(spec))

    path = Path(path)
    run_path = None
    complaints = list[str]()
    if checkpoint != "last":
        path = _checkpoint_of(path, checkpoint)
    if path.is_dir():
        run_path = path
        file, state, complaints = saved.load_newest(path, most_bytes)
        if file is None:
            raise CheckpointError(f"{path}: no checkpoint in this folder; give the folder of a run that trained")
    elif not path.is_file():
        raise CheckpointError(f"{path}: no such run folder or checkpoint")
    elif path.suffix in (".yaml", ".yml"):
        raise CheckpointError(f"{path}: is a spec; its run folder must be given, {load_spec(path).run_path}")
    else:
        run_path = path.parent.parent if path.parent.name == "checkpoints" else None
        file = path
        state = saved.load_checkpoint(path, most_bytes, may_be_alone=True)
    spec = spec_in(file, state)
    names: Any = state.get("classes")
    has_names = isinstance(names, list) and len(names) == spec.model.num_classes
    classes = tuple(map(str, names if has_names else range(spec.model.num_classes)))
    about = tuple(complaints), state.get("experiment", {})
    weights = saved.unmapped(state["model"])
    return Trained(file, run_path, spec, state["step"], classes, has_names, weights, *about)


def _checkpoint_of(run: Path, name: str) -> Path:
    """Return the best checkpoint of a run folder, or the file `name` in it. Raises CheckpointError."""
    if not run.is_dir():
        raise CheckpointError(f"checkpoint must be used with a run folder, got {run}")
    path = best_checkpoint(run) if name == "best" else Path(name)
    if not path.is_file() or path.resolve().parent != (run / "checkpoints").resolve():
        raise CheckpointError(f"checkpoint must be last, best or a file in {run}/checkpoints, got {path}")
    return path


def _check_named(file: Path, spec: Spec, run_path: Path | None, overrides: Sequence[str]) -> None:
    """Raise UserError for a checkpoint whose network is the user's code, if only the checkpoint names it.

    The spec.yaml of its run folder or an override must name it: a file of numbers starts no code.
    """
    if not is_foreign(spec.model.arch) or any(override.startswith("model.arch=") for override in overrides):
        return
    own = None if run_path is None else run_path / "spec.yaml"
    named = load_spec(own, overrides).model if own is not None and own.is_file() else None
    if named is None or (named.arch, named.options) != (spec.model.arch, spec.model.options):
        right = f"give the run folder, or if you trust the code, add model.arch={spec.model.arch}"
        raise UserError(f"{file}: a checkpoint alone does not run its network's code; {right}")
