"""Weights from a file into a network, with an account of every key that did not fit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from summit_train.errors import UserError

# Keys that wrap a state dict in the files people have: our checkpoints ("model") and others' ("state_dict").
_WRAPPERS: tuple[str, ...] = ("model", "state_dict")
# Name prefixes that DistributedDataParallel and torch.compile leave behind.
_PREFIXES: tuple[str, ...] = ("module.", "_orig_mod.")
# BatchNorm's step counter: absent in old files, and read by no norm that has a momentum.
_COUNTER = "num_batches_tracked"


class WeightsError(UserError):
    """A file of weights that cannot be read, or that does not fit the network."""


@dataclass(frozen=True)
class Mismatch:
    """A key that is there on both sides with different shapes; the network's own value stays."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (the model has {self.expected}, the file {self.found})"


@dataclass(frozen=True)
class LoadReport:
    """What became of each key: `loaded`; `missing` in the file; `unexpected` by the model; `mismatched`."""

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    def __str__(self) -> str:
        wanted = len(self.loaded) + len(self.missing) + len(self.mismatched)
        parts = [f"{self.path}: {len(self.loaded)} of the model's {wanted} tensors loaded"]
        if self.missing:
            parts.append(f"not in the file, left as initialised: {', '.join(self.missing)}")
        if self.mismatched:
            parts.append(f"of another shape, left as initialised: {', '.join(map(str, self.mismatched))}")
        if self.unexpected:
            parts.append(f"not in the model, ignored: {', '.join(self.unexpected)}")
        return "; ".join(parts)


def load_pretrained(model: nn.Module, path: str | Path) -> LoadReport:
    """Copy into `model` every tensor of `path` that fits by name and shape; the rest stays as it is.

    `path` is a file of ResNet weights under torchvision's names, one of our checkpoints, or a run directory
    (its newest checkpoint). A 2D kernel is inflated for a 3D convolution (see `inflate`). A classifier for
    another number of classes is left as initialised and reported. Raises WeightsError, with the path, when
    there is no such file, it cannot be read, or nothing in it fits; the model is unchanged then.
    """
    file = weights_file(path)
    found = read_state_dict(file)
    targets = model.state_dict()
    fitting: dict[str, torch.Tensor] = {}
    mismatched: list[Mismatch] = []
    for name in targets.keys() & found.keys():
        value = _fitted(found[name], targets[name])
        if value is None:
            mismatched.append(Mismatch(name, tuple(targets[name].shape), tuple(found[name].shape)))
        else:
            fitting[name] = value
    report = LoadReport(
        path=str(file),
        loaded=_reported(name for name in targets if name in fitting),
        missing=_reported(name for name in targets if name not in found),
        unexpected=_reported(name for name in found if name not in targets),
        mismatched=tuple(sorted(mismatched, key=lambda mismatch: list(targets).index(mismatch.name))),
    )
    if not report.loaded:
        raise WeightsError(f"{file}: no tensor fits this model. {_first_names(found, targets)}")
    with torch.no_grad():
        for name, value in fitting.items():
            targets[name].copy_(value)
    return report


def inflate(kernel: torch.Tensor, length: int) -> torch.Tensor:
    """Inflate a 2D kernel (O, I, h, w) to (O, I, length, h, w): repeat it over time and divide by `length`.

    On an image repeated in time the inflated convolution then returns what the 2D one does (Carreira and
    Zisserman, "Quo vadis", Section 2.4.1), away from the clip's ends where it sees its zero padding.
    """
    return kernel.unsqueeze(2).repeat(1, 1, length, 1, 1) / length


def weights_file(path: str | Path) -> Path:
    """Return the file that `path` stands for: itself, or the newest checkpoints/step_*.pt of a run directory."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise WeightsError(f"{path}: no such file or run directory")
    checkpoints = [file for file in path.glob("checkpoints/step_*.pt") if file.stem[5:].isdigit()]
    if not checkpoints:
        raise WeightsError(f"{path}: this directory has no checkpoints/step_*.pt")
    return max(checkpoints, key=lambda file: int(file.stem[5:]))


def read_state_dict(file: Path) -> dict[str, torch.Tensor]:
    """Read tensors by name, onto the CPU, without wrappers and prefixes. Raises WeightsError when unreadable."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged file can raise almost anything out of the unpickler.
        raise WeightsError(_why_unreadable(file, str(error).strip() or type(error).__name__)) from error
    while isinstance(content, Mapping):
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping):
        raise WeightsError(f"{file}: holds a {type(content).__name__}, not tensors by name")
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise WeightsError(f"{file}: holds no tensors by name")
    return _without_prefixes(tensors)


def _why_unreadable(file: Path, reason: str) -> str:
    if "legacy .tar format" in reason:
        problem = "is in torch's legacy tar format"
    elif "Unsupported global" in reason or "Unsupported class" in reason or "Unsupported operand" in reason:
        problem = "holds pickled objects besides tensors"
    else:
        return f"{file}: not readable as weights ({reason.splitlines()[0]})"
    program = (
        f"import torch; x = torch.load({str(file)!r}, map_location='cpu', weights_only=False); "
        f"torch.save(getattr(x, 'state_dict', lambda: x)(), {str(file) + '.converted'!r})"
    )
    return (
        f"{file} {problem}, which cannot be read without running what stands in it. If you trust where it comes from, "
        f"convert it once: python -c {shlex.quote(program)}"
    )


def _without_prefixes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            return _without_prefixes({name[len(prefix) :]: value for name, value in tensors.items()})
    return tensors


def _fitted(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """`found` in the shape of `target`, or None where there is no honest way to it."""
    if found.shape == target.shape:
        return found
    if found.dim() == 4 and target.dim() == 5 and found.shape == target.shape[:2] + target.shape[3:]:
        return inflate(found, target.shape[2])
    return None


def _reported(names: Any) -> tuple[str, ...]:
    return tuple(name for name in names if not name.endswith(_COUNTER))


def _first_names(found: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    return f"The file starts with {', '.join(list(found)[:3])}; the model with {', '.join(list(targets)[:3])}"
