"""Load weights from a file into a network, and report every key that did not fit and every one that was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from summit_train.core.checkpoints import find_checkpoints
from summit_train.core.errors import UserError
from summit_train.core.saved import bound_of, check_digest, load_newest, load_saved
from summit_train.models.names import is_mmactions_resnet, our_names
from summit_train.models.non_local import NonLocal
from summit_train.models.shift import num_shifted_channels, shift_step
from summit_train.models.video import VideoNetwork
from summit_train.spec.catalog import ShiftDirection

Tensors = Mapping[str, torch.Tensor]
# The temporal shift in front of a convolution: the fraction of the channels in each direction, 0 for none.
Shift = tuple[float, ShiftDirection]
# A tensor of a file in the shape that a model needs, and how it was made; "" where the numbers are the file's.
Fitted = tuple[torch.Tensor, str]
# Keys that wrap a state dict in the files people have: our checkpoints ("model"), others' ("state_dict"), VideoMAE's of
# DeepSpeed ("module"), and V-JEPA's ("target_encoder", the one that its authors evaluate).
_WRAPPERS = ("model", "state_dict", "module", "target_encoder")
# BatchNorm's step counter: absent in old files, and read by no norm that has a momentum.
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class LoadReport:
    """What became of each key: `loaded`; `missing` in the file; `unexpected` by the model; `mismatched` in its shape.

    Names are the model's, but those of `unexpected`, which are the file's. made: name -> how a loaded tensor was made
    that is not the file's own. fresh: the classifier's tensors if it is for other classes, as many as the model's.
    classes: how the classes compare, "" if the file has no such classifier. passed_over: why newer checkpoints of a run
    were not read. pool1: the model's, if the file's network may have a different one.
    """

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    made: Mapping[str, str]
    fresh: tuple[str, ...] = ()
    classes: str = ""
    passed_over: tuple[str, ...] = ()
    pool1: str | None = None

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched) + len(self.fresh)
        parts = [f"{self.path}: {len(self.loaded)} of the model's {total} tensors loaded"]
        for how in dict.fromkeys(self.made.values()):
            parts.append(f"{how}: {', '.join(name for name, made in self.made.items() if made == how)}")
        if self.fresh:
            parts.append(f"classifier left as initialised, {self.classes}: {', '.join(self.fresh)}")
        elif self.classes:
            parts.append(f"classifier kept, {self.classes}")
        if self.missing:
            parts.append(f"not in the file, left as initialised: {', '.join(self.missing)}")
        if self.mismatched:
            parts.append(f"different shape, left as initialised: {', '.join(self.mismatched)}")
        parts += [f"passed over: {complaint}" for complaint in self.passed_over]
        if self.unexpected:
            parts.append(f"not in the model, ignored: {', '.join(self.unexpected)}")
        if self.pool1:
            parts.append(f"the file does not say its pool1; taken as {self.pool1}, see model.pool1")
        return "; ".join(parts)


class Content(NamedTuple):
    """A file's tensors by its own names; in a checkpoint of ours the spec's `model` section and the class names."""

    tensors: dict[str, torch.Tensor]
    spec: Mapping[str, Any]
    classes: tuple[str, ...] | None


def load_pretrained(model: VideoNetwork, path: str | Path, classes: Sequence[str] | None = None) -> LoadReport:
    """Copy into `model` every tensor of `path` that fits by name and shape; the rest stays as it is.

    `path` is a file under torchvision's names, the TSM authors' or mmaction2's, one of our checkpoints, or a run
    directory (its newest whole checkpoint). A 2D kernel is inflated for a 3D convolution, or made of the shift where
    the file is a TSM's; the first one is averaged for clips of other channels (see _fitted). A classifier for
    another number of classes, or for classes of other names, is left as initialised and reported. classes: the names of
    the model's, if they are known. Raises UserError, with the path, and leaves the model unchanged if the file is
    missing, cannot be read, or is of another network.
    """
    file, content, passed_over = _read(Path(path), model)
    targets = model.state_dict()
    head = [name for name in targets if model.head and name.startswith(f"{model.head}.")]
    last = next((name for name in reversed(head) if name.endswith(".weight")), "")
    classifier = "fc" if "fc.weight" in targets else last.removesuffix(".weight")
    # By the rules of published files, or without them: a foreign network's own names may look like published ones.
    ways = our_names(content.tensors, classifier), our_names(content.tensors, classifier, {})
    names = max(ways, key=lambda way: len(targets.keys() & set(way.values())))
    theirs: dict[str, str] = {}
    for name, ours in names.items():
        if theirs.setdefault(ours, name) != name:
            raise UserError(f"{file}: {theirs[ours]} and {name} are both {ours} in this model; remove one of them")
    named = {ours: content.tensors[name] for ours, name in theirs.items()}
    try:
        found = model.fitted(named)
    except ValueError as error:
        raise UserError(f"{file}: weights of another network: {error}") from error
    for name in found.keys() & targets.keys():
        if targets[name].is_floating_point() and not found[name].is_floating_point():
            raise UserError(f"{file}: {name} must be {targets[name].dtype}, got {found[name].dtype}")
    fitting, mismatched = _fitting(found, targets, model, _shifts(content, names, model))
    # The tensors of a fitting classifier that have a row for each class.
    rows = tuple(n for n in head if n in fitting and last in fitting and len(targets[n]) == len(targets[last]))
    fresh = () if classes is None or content.classes is None or tuple(classes) == content.classes else rows
    fitting = {name: tensor for name, tensor in fitting.items() if name not in fresh}
    known = [name for name in targets if not name.endswith(_COUNTER)]
    unknown = (name for name, ours in names.items() if ours in found and ours not in targets)
    report = LoadReport(
        path=str(file),
        loaded=tuple(name for name in known if name in fitting),
        missing=tuple(name for name in known if name not in found and name not in fitting),
        unexpected=tuple(name for name in unknown if not name.endswith(_COUNTER)),
        mismatched=tuple(mismatched),
        made={name: made for name, (_, made) in fitting.items() if made},
        fresh=fresh,
        classes=_compared(content.classes, classes) if rows else "",
        passed_over=passed_over,
        pool1=model.pool1_form if _pool1(content, found) == "" else None,
    )
    reason = _other_network(model, targets, found, mismatched) or _other_settings(model, content, found)
    if not report.loaded and (reason is None or not mismatched):
        raise UserError(f"{file}: no tensor fits this model. {_first_names(found, targets)}")
    if reason is not None:
        raise UserError(f"{file}: weights of another network: {reason}")
    with torch.no_grad():
        for name, (value, _) in fitting.items():
            targets[name].copy_(value)
    return report


def _read(path: Path, model: VideoNetwork) -> tuple[Path, Content, tuple[str, ...]]:
    """Return (file, content, why newer checkpoints were passed over): a run folder's newest whole checkpoint."""
    if path.is_dir() and not find_checkpoints(path):
        raise UserError(f"{path}: this directory has no checkpoints/step_*.pt")
    if not path.exists():
        raise UserError(f"{path}: no such file or run folder")
    bound = bound_of(model)
    if path.is_dir():
        file, content, passed_over = load_newest(path, bound)
        assert file is not None
        return file, _content(file, content), tuple(passed_over)
    check_digest(path, may_be_alone=True)
    return path, _content(path, load_saved(path, bound)), ()


def _content(file: Path, content: Any) -> Content:
    """Remove the wrappers. Raises UserError without tensors by name."""
    spec: Any = {}
    classes: Any = None
    while isinstance(content, Mapping):
        spec, classes = content.get("spec", spec), content.get("classes", classes)
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping):
        raise UserError(f"{file}: must contain tensors by name, got a {type(content).__name__}")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"{file}: must contain tensors by name, got none")
    section = spec.get("model") if isinstance(spec, Mapping) else None
    known = tuple(map(str, classes)) if isinstance(classes, list) else None
    return Content(tensors, section if isinstance(section, Mapping) else {}, known)


def _compared(theirs: Sequence[str] | None, ours: Sequence[str] | None) -> str:
    if theirs is None or ours is None:
        return "for as many classes, whose names are not known on both sides"
    pairs = enumerate(zip(theirs, ours, strict=True))
    differing = [f"label {label} is {their!r} there and {our!r} here" for label, (their, our) in pairs if their != our]
    return f"for other classes ({differing[0]})" if differing else f"for the same {len(ours)} classes"


def _shifts(content: Content, names: Mapping[str, str], model: VideoNetwork) -> dict[str, Shift]:
    """Return the shifts in front of the file's convolutions, by our names; none where it is of no TSM."""
    authors: Shift = (0.125, "both")
    shifts = {ours: authors for name, ours in names.items() if name.endswith(".net.weight")}
    spec = content.spec
    if model.sequences and spec.get("arch") == "tsm" and spec.get("shift_place", "residual") == "residual":
        shift = spec.get("shift_fraction", 0.125), spec.get("shift_direction", "both")
        stages = {name: len(list(model.get_submodule(name).children())) for name in model.sequences}
        step = shift_step(stages.values(), "residual")
        for stage, num_blocks in stages.items():
            shifts |= {f"{stage}.{number}.conv1.weight": shift for number in range(0, num_blocks, step)}
    return shifts


def _other_settings(model: VideoNetwork, content: Content, found: Tensors) -> str | None:
    """Return a known difference of the file's network that no tensor shows, or None."""
    forms = {module.form for module in model.modules() if isinstance(module, NonLocal)}
    if "original" in forms and is_mmactions_resnet(content.tensors) and any(".nl." in name for name in found):
        return "mmaction2's non-local blocks pool after phi and g and do not scale, unlike model.non_local=original"
    theirs = _pool1(content, found)
    if model.pool1_form and theirs and theirs != model.pool1_form:
        return f"its pool1 is {theirs} and here {model.pool1_form}, which no tensor shows; set model.pool1={theirs}"
    return None


def _pool1(content: Content, found: Tensors) -> str | None:
    """Return the pool1 of the file's I3D: "" if the file does not say, None if its network is 2D."""
    first = found.get("conv1.weight")
    if first is None or first.dim() < 5:
        return None
    if content.spec:
        return str(content.spec.get("pool1", "2x3x3"))
    return "1x3x3" if is_mmactions_resnet(content.tensors) else ""


def _fitting(
    found: Tensors, targets: Tensors, model: VideoNetwork, shifts: dict[str, Shift]
) -> tuple[dict[str, Fitted], list[str]]:
    fitting, mismatched = dict[str, Fitted](), list[str]()
    stem = {f"{layer}.weight" for layer in model.stem}
    no_shift: Shift = (0.0, "both")  # in a TSM, a convolution without a shift sees its own frame alone
    for name, target in targets.items():
        if name in found:
            shift = shifts.get(name, no_shift) if shifts else None
            value, made = _fitted(found[name], target.shape, shift, sees_clip=name in stem)
            if value.shape == target.shape:
                fitting[name] = value, made
            else:
                mismatched.append(f"{name} (the model has {tuple(target.shape)}, the file {tuple(found[name].shape)})")
        elif name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in fitting:
            # As W of mmaction2's non-local blocks.
            fitting[name] = torch.zeros_like(target), "0, since the file's layer has no bias"
    return fitting, mismatched


def _fitted(value: torch.Tensor, shape: torch.Size, shift: Shift | None, *, sees_clip: bool) -> Fitted:
    """Return `value` as near to `shape` as published methods lead.

    shift: that of the file's network in front of this convolution; None where the file is of a network without shifts.
    sees_clip: the convolution's input is the clip, so that it may be averaged for one of other channels.
    """
    made = []
    if value.dim() == 5 and len(shape) == 4 and value.shape[2] == 1:
        value = value.squeeze(2)  # 1x1x1 in published non-local blocks, 1x1 on frames
    if sees_clip and value.dim() >= 4 and value.shape[1] != shape[1]:
        made.append(f"averaged over {value.shape[1]} input channels")
        # Wang et al., "Temporal segment networks", section 3.2, cross-modality initialisation.
        value = value.mean(1, keepdim=True).repeat_interleave(shape[1], 1)
    if value.dim() == 4 and len(shape) == 5:
        if shift is not None and shape[2:] == (3, 1, 1) and value.shape[2:] == (1, 1):
            made.append("the shift as taps in time")
            value = shift_taps(value, *shift)
        else:
            made += [f"inflated over {shape[2]} frames"] if shape[2] > 1 else []
            # On an image repeated in time this does what the 2D convolution does, away from the clip's ends, where it
            # sees its zero padding (Carreira and Zisserman, "Quo vadis", section 2.4.1).
            value = value.unsqueeze(2).repeat(1, 1, shape[2], 1, 1) / shape[2]
    return value, ", ".join(made)


def shift_taps(kernel: torch.Tensor, fraction: float, direction: ShiftDirection = "both") -> torch.Tensor:
    """Return the 3x1x1 kernel (O, I, 3, 1, 1) that does what a shift and the 1x1 `kernel` (O, I, 1, 1) behind it do.

    Channels that the shift takes from frame t+1 have the last tap alone, those from t-1 the first, all others the
    middle one. Zero padding is what the shift reads outside of the clip.
    """
    fold = num_shifted_channels(kernel.shape[1], fraction)
    from_next = fold if direction == "both" else 0
    taps = kernel.new_zeros(*kernel.shape[:2], 3, 1, 1)
    taps[:, :from_next, 2] = kernel[:, :from_next]
    taps[:, from_next : from_next + fold, 0] = kernel[:, from_next : from_next + fold]
    taps[:, from_next + fold :, 1] = kernel[:, from_next + fold :]
    return taps


def _other_network(model: VideoNetwork, targets: Tensors, found: Tensors, mismatched: Iterable[str]) -> str | None:
    """Return what shows that the file is of another network; None where its blocks are the model's.

    Non-local blocks may be on one side only: other networks start theirs from one without.
    """
    for stage in model.sequences:
        depth = stage.count(".") + 1
        inside_stage = ([name for name in names if name.startswith(f"{stage}.")] for names in (targets, found))
        ours, theirs = ({name.split(".")[depth] for name in names} for names in inside_stage)
        if theirs and ours != theirs:
            return f"{stage} has {len(theirs)} blocks there and {len(ours)} in this model"
    inside = tuple(f"{stage}." for stage in model.sequences)
    if inside and not any(name.startswith(inside) for name in found if name in targets):
        return f"it has nothing of {', '.join(model.sequences)}. {_first_names(found, targets)}"
    for mismatch in mismatched:
        if mismatch.startswith(inside):
            return mismatch
    ours, theirs = ({name.partition(".nl.")[0] for name in names if ".nl." in name} for names in (targets, found))
    if ours and theirs and ours != theirs:
        places = " and ".join(", ".join(sorted(blocks)) for blocks in (theirs, ours))
        return f"non-local blocks are after {places} here: the other form; see model.non_local"
    for name in found:
        if name.startswith(inside) and name not in targets and ".nl." not in name and not name.endswith(_COUNTER):
            return f"it has {name}, which this model does not have"
    return None


def _first_names(found: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    return f"The file starts with {', '.join(list(found)[:3])}; the model with {', '.join(list(targets)[:3])}"
