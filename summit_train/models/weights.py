"""Load weights from a file into a network, and report every key that did not fit and every one that was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from summit_train.core.errors import UserError
from summit_train.core.run_folder import find_checkpoints
from summit_train.core.saved import bound_of, check_digest, load_newest, load_saved
from summit_train.models.names import is_mmactions_resnet, our_names
from summit_train.models.non_local import NonLocal
from summit_train.models.shift import num_shifted_channels, shift_step
from summit_train.models.video import VideoNetwork
from summit_train.spec.catalog import ShiftDirection

Tensors = Mapping[str, Tensor]
# The temporal shift in front of a convolution: the fraction of the channels in each direction, 0 for none.
Shift = tuple[float, ShiftDirection]
# Keys that wrap a state dict in the files people have: our checkpoints ("model"), others' ("state_dict"), VideoMAE's of
# DeepSpeed ("module"), and V-JEPA's ("target_encoder", the one that its authors evaluate).
_WRAPPERS = ("model", "state_dict", "module", "target_encoder")
# BatchNorm's step counter: absent in old files, and read by no norm that has a momentum.
_COUNTER = "num_batches_tracked"


class TensorRow(NamedTuple):
    """A tensor of the model, or an unexpected one of the file, and its fate.

    "fresh": of a classifier for other classes, as many as the model's; it stays as initialised. "counter": of a batch
    normalisation; not reported. value: what is loaded. note: how that was made, if it is not the file's own, or both
    shapes of a mismatch.
    """

    name: str
    fate: Literal["loaded", "counter", "fresh", "missing", "mismatched", "unexpected"]
    value: Tensor | None = None
    note: str = ""


@dataclass(frozen=True)
class LoadReport:
    """The fate of each tensor.

    classes: how the classes compare, "" if the file has no such classifier. passed_over: why newer checkpoints of a run
    were not read. pool1: the model's, if the file's network may have a different one.
    """

    path: str
    rows: tuple[TensorRow, ...]
    classes: str = ""
    passed_over: tuple[str, ...] = ()
    pool1: str | None = None

    def names(self, fate: str) -> tuple[str, ...]:
        """Return the names of the tensors with a fate: the model's, but of unexpected ones the file's."""
        return tuple(row.name for row in self.rows if row.fate == fate)

    def __str__(self) -> str:
        total = sum(row.fate not in ("counter", "unexpected") for row in self.rows)
        parts = [f"{self.path}: {len(self.names('loaded'))} of the model's {total} tensors loaded"]
        for note in dict.fromkeys(row.note for row in self.rows if row.fate == "loaded" and row.note):
            parts.append(f"{note}: {', '.join(row.name for row in self.rows if row.note == note)}")
        if fresh := self.names("fresh"):
            parts.append(f"classifier left as initialised, {self.classes}: {', '.join(fresh)}")
        elif self.classes:
            parts.append(f"classifier kept, {self.classes}")
        if missing := self.names("missing"):
            parts.append(f"not in the file, left as initialised: {', '.join(missing)}")
        if mismatched := [f"{row.name} {row.note}" for row in self.rows if row.fate == "mismatched"]:
            parts.append(f"different shape, left as initialised: {', '.join(mismatched)}")
        parts += [f"passed over: {complaint}" for complaint in self.passed_over]
        if unexpected := self.names("unexpected"):
            parts.append(f"not in the model, ignored: {', '.join(unexpected)}")
        if self.pool1:
            parts.append(f"the file does not say its pool1; taken as {self.pool1}, see model.pool1")
        return "; ".join(parts)


class Content(NamedTuple):
    """A file's tensors by its own names; in a checkpoint of ours the spec's `model` section and the class names."""

    tensors: Tensors
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
    try:
        found = model.fitted({ours: content.tensors[name] for ours, name in theirs.items()})
    except ValueError as error:
        raise UserError(f"{file}: weights of another network: {error}") from error
    for name in found.keys() & targets.keys():
        if targets[name].is_floating_point() and not found[name].is_floating_point():
            raise UserError(f"{file}: {name} must be {targets[name].dtype}, got {found[name].dtype}")
    rows = list(_rows(model, targets, found, names, _shifts(content, names, model)))
    loaded = {row.name for row in rows if row.fate == "loaded"}
    # The tensors of a fitting classifier that have a row for each class.
    per_class = [name for name in head if {name, last} <= loaded and len(targets[name]) == len(targets[last])]
    if classes is not None and content.classes is not None and tuple(classes) != content.classes:
        rows = [TensorRow(row.name, "fresh") if row.name in per_class else row for row in rows]
    report = LoadReport(
        str(file),
        tuple(rows),
        classes=_compared(content.classes, classes) if per_class else "",
        passed_over=passed_over,
        pool1=model.pool1_form if _pool1(content, found) == "" else None,
    )
    reason = next(_differences(model, content, targets, found, rows), None)
    if not report.names("loaded") and (reason is None or not report.names("mismatched")):
        raise UserError(f"{file}: no tensor fits this model. {_first_names(found, targets)}")
    if reason is not None:
        raise UserError(f"{file}: weights of another network: {reason}")
    with torch.no_grad():
        for row in rows:
            if row.value is not None:
                targets[row.name].copy_(row.value)
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
    """Return the tensors inside the wrappers. Raises UserError without tensors by name."""
    spec: Any = {}
    classes: Any = None
    while isinstance(content, Mapping):
        spec = content.get("spec", spec)
        classes = content.get("classes", classes)
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping):
        raise UserError(f"{file}: must contain tensors by name, got a {type(content).__name__}")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
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


def _rows(
    model: VideoNetwork, targets: Tensors, found: Tensors, names: Mapping[str, str], shifts: Mapping[str, Shift]
) -> Iterator[TensorRow]:
    """Yield the fate of each tensor. names: ours, by the file's. shifts: as _shifts returns them."""
    stem = {f"{layer}.weight" for layer in model.stem}
    no_shift: Shift = (0.0, "both")  # in a TSM, a convolution without a shift sees its own frame alone
    fitting = set[str]()
    for name, target in targets.items():
        is_counter = name.endswith(_COUNTER)
        if name in found:
            shift = shifts.get(name, no_shift) if shifts else None
            value, note = _fitted(found[name], target.shape, shift, sees_clip=name in stem)
            if value.shape == target.shape:
                fitting.add(name)
                yield TensorRow(name, "counter" if is_counter else "loaded", value, note)
            else:
                note = f"(the model has {tuple(target.shape)}, the file {tuple(found[name].shape)})"
                yield TensorRow(name, "mismatched", note=note)
        elif name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in fitting:
            # As W of mmaction2's non-local blocks.
            yield TensorRow(name, "loaded", torch.zeros_like(target), "0, since the file's layer has no bias")
        elif not is_counter:
            yield TensorRow(name, "missing")
    for name, ours in names.items():
        if ours in found and ours not in targets and not name.endswith(_COUNTER):
            yield TensorRow(name, "unexpected")


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


def _fitted(value: Tensor, shape: torch.Size, shift: Shift | None, *, sees_clip: bool) -> tuple[Tensor, str]:
    """Return `value` as near to `shape` as published methods lead, and how it was made.

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
            if shape[2] > 1:
                made.append(f"inflated over {shape[2]} frames")
            # On an image repeated in time this does what the 2D convolution does, away from the clip's ends, where it
            # sees its zero padding (Carreira and Zisserman, "Quo vadis", section 2.4.1).
            value = value.unsqueeze(2).repeat(1, 1, shape[2], 1, 1) / shape[2]
    return value, ", ".join(made)


def shift_taps(kernel: Tensor, fraction: float, direction: ShiftDirection = "both") -> Tensor:
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


def _differences(
    model: VideoNetwork, content: Content, targets: Tensors, found: Tensors, rows: Sequence[TensorRow]
) -> Iterator[str]:
    """Yield each sign that the file is of another network: in its tensors, then in settings that no tensor shows.

    Non-local blocks may be on one side only: other networks start theirs from one without.
    """
    inside = tuple(f"{stage}." for stage in model.sequences)
    for stage in model.sequences:
        depth = stage.count(".") + 1
        inside_stage = ([name for name in names if name.startswith(f"{stage}.")] for names in (targets, found))
        ours, theirs = ({name.split(".")[depth] for name in names} for names in inside_stage)
        if theirs and ours != theirs:
            yield f"{stage} has {len(theirs)} blocks there and {len(ours)} in this model"
    if inside and not any(name.startswith(inside) for name in found if name in targets):
        yield f"it has nothing of {', '.join(model.sequences)}. {_first_names(found, targets)}"
    for row in rows:
        if row.fate == "mismatched" and row.name.startswith(inside):
            yield f"{row.name} {row.note}"
    ours, theirs = ({name.partition(".nl.")[0] for name in names if ".nl." in name} for names in (targets, found))
    if ours and theirs and ours != theirs:
        blocks = " and ".join(", ".join(sorted(names)) for names in (theirs, ours))
        yield f"non-local blocks are after {blocks} here: the other form; see model.non_local"
    for name in found:
        if name.startswith(inside) and name not in targets and ".nl." not in name and not name.endswith(_COUNTER):
            yield f"it has {name}, which this model does not have"
    is_original = any(isinstance(module, NonLocal) and module.form == "original" for module in model.modules())
    if is_original and theirs and is_mmactions_resnet(content.tensors):
        yield "mmaction2's non-local blocks pool after phi and g and do not scale, unlike model.non_local=original"
    pool1 = _pool1(content, found)
    if model.pool1_form and pool1 and pool1 != model.pool1_form:
        yield f"its pool1 is {pool1} and here {model.pool1_form}, which no tensor shows; set model.pool1={pool1}"


def _pool1(content: Content, found: Tensors) -> str | None:
    """Return the pool1 of the file's I3D: "" if the file does not say, None if its network is 2D."""
    first = found.get("conv1.weight")
    if first is None or first.dim() < 5:
        return None
    if content.spec:
        return str(content.spec.get("pool1", "2x3x3"))
    return "1x3x3" if is_mmactions_resnet(content.tensors) else ""


def _first_names(found: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    return f"The file starts with {', '.join(list(found)[:3])}; the model with {', '.join(list(targets)[:3])}"
