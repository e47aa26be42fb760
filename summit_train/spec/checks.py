"""Read and write specs, and refuse keys that are right one by one and impossible together.

The plan checks what depends on the ranks or the clips.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.core.text import counted
from summit_train.spec.catalog import ARCHITECTURES, BOTTLENECK_BACKBONES, architecture, is_foreign
from summit_train.spec.keys import MAIN_MEASURES, OptimizerSpec, ParallelSpec, ScheduleSpec, Spec
from summit_train.spec.model_data import AUGMENTS, DataSpec, NetworkSpec
from summit_train.spec.source import Tree, read_tree, to_yaml
from summit_train.spec.typed import ReadWith, Section, validated

Problem = tuple[str, str]  # a key of the spec; what is wrong, and what would be right

# Names in the log, eval.json, the index and a sweep's tables, which measures of the user's own cannot have.
RESERVED_NAMES = (
    "top1", "top5", *MAIN_MEASURES.values(), "val_loss", "kind", "time", "time_s", "epoch", "epochs", "planned_epochs",
    "step", "total_steps", "videos", "clips", "seconds", "classes", "num_classes", "path", "bad_videos", "mode",
    "crops", "checkpoints", "name", "state", "run", "runs", "done", "job", "note", "remarks", "machine", "final",
    "ema", "overrides", "goodput", "goodput_in_jobs", "written", "settings", "changes", "curve",
    "fold", "folds", "nodes", "ranks", "node_hours", "virtual_gpus", "accumulation", "global_batch",
    "frames_per_batch", "lr", "peak_lr", "training_top1",
    "noise_scale", "noise_scale_error", "gradient_square", "gradient_variance", "clips_per_second", "started",
    "measure", "last", "best", "mean", "macro", "low", "high", "evaluation", "x", "top1_by_clips", "top1_macro",
    "top1_interval", "top1_macro_f1", "seed", "baseline", "sweep",
)  # fmt: skip
_UNTRAINED = "must be false without model.pretrained, got true; try setting model.pretrained"
_STATISTICS = ("_mean", "_std", "_last", "_best")  # endings of a measure's columns


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec file with what it extends, apply `section.key=value` overrides, check everything.

    Raises UserError; its message has one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    return spec_from_tree(read_tree(path, overrides))


def run_spec(path: str, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec in a file, or that of a run folder, wherever the folder is now. Raises UserError."""
    if not Path(path).is_dir():
        return load_spec(path, overrides)
    file = Path(path) / "spec.yaml"
    if not file.is_file():
        raise UserError(f"{path}: must be a spec or a run folder; no spec.yaml found in it")
    spec = load_spec(file, overrides)
    run = Path(os.path.abspath(path))
    if spec.run_path.exists() and spec.run_path.samefile(run):
        return spec
    return spec.model_copy(update={"run_dir": str(run.parent), "name": run.name})


def spec_from_values(values: dict[str, Any], place: str) -> Spec:
    """Return the spec of plain values, such as those saved in a checkpoint; `place` names their source in an error."""
    return spec_from_tree(Tree(values, {(): place}))


def dump_spec(spec: Spec) -> str:
    """Return the resolved spec as YAML; `load_spec` of it gives an equal spec."""
    return to_yaml(spec.model_dump(mode="json"))


def spec_from_tree(tree: Tree) -> Spec:
    """Return the spec of values that know their places. Raises UserError as load_spec does."""
    spec = validated(Spec, replace(tree, values=_with_detector(tree.values)))
    lines = [f"{tree.place(tuple(key.split('.')))}: {key}: {wrong}" for key, wrong in problems(spec)]
    if lines:
        raise UserError(*lines)
    return spec


def _with_detector(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the keys that task detection implies, where they are not given."""
    model = values.get("model")
    loss = values.get("loss", {})
    if values.get("task") != "detection" or not isinstance(model, dict) or not isinstance(loss, dict):
        return values
    if model.get("detector") is None:
        model = {**model, "detector": {}}
    return {**values, "model": model, "loss": {"kind": "detection", **loss}}


def own_parts(spec: Spec, *sections: str) -> list[OwnPart]:
    """Open the parts of the user's own that these sections name. Raises UserError for one without a file."""
    parts = list[OwnPart]()
    if "loss" in sections and is_foreign(spec.loss.kind):
        parts.append(OwnPart.open("loss.kind", spec.loss.kind, spec.loss.options))
    if "schedule" in sections:
        parts += spec.schedule.open_decay()
    if "data" in sections:
        parts += spec.data.open_augment()
    if "evaluate" in sections:
        parts += [
            OwnPart.open("evaluate.measures", measure.kind, measure.options) for measure in spec.evaluate.measures
        ]
    return parts


def problems(spec: Spec) -> Iterator[Problem]:
    """Yield every combination of keys that is impossible."""
    weights = spec.loss.class_weights
    if isinstance(weights, tuple) and len(weights) != spec.model.num_classes:
        wrong = f"must be one number for each of the {spec.model.num_classes} classes, got {len(weights)}"
        yield "loss.class_weights", wrong
    yield from _data_problems(spec.data, spec.scale.clips_per_gpu)
    yield from _task_problems(spec)
    yield from _solver_problems(spec.optimizer, spec.schedule, spec.parallel)
    yield from _validation_problems(spec)
    yield from network_problems(spec.model, spec.data.num_frames, spec.data.crop)
    tested = None if spec.evaluate.crops == "full" else spec.evaluate.short_side
    yield from size_problems(spec.model, spec.data.crop, tested)
    yield from unread(spec, spec=spec)
    yield from _other_problems(spec)


def unread(section: Section, prefix: str = "", spec: Spec | None = None) -> Iterator[Problem]:
    """Yield each key of a section, and of those below it, that is not read with the other keys, and not its default.

    prefix: "SECTION.", in front of its keys. spec: the whole one; without it marks with keys of others are skipped.
    """
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from unread(value, f"{prefix}{key}.", spec)
        marks = [mark for mark in field.metadata if isinstance(mark, ReadWith)] if value != field.default else []
        for mark in marks:
            is_sibling = mark.key in type(section).model_fields
            holder = section if is_sibling else spec
            if holder is None:
                continue
            word = attrgetter(mark.key)(holder)
            if not isinstance(word, str):
                word = next((item.kind for item in word), "none")
            if not mark.reads(word):
                default = json.dumps(field.default).strip('"')
                name = prefix + mark.key if is_sibling else mark.key
                yield prefix + key, f"must be {default} with {name} {word}: {mark.reader}"
                break


def _task_problems(spec: Spec) -> Iterator[Problem]:
    """Yield the keys that do not fit the task."""
    if spec.task == "detection":
        yield from _detection_problems(spec)
        return
    if spec.loss.base == "detection":
        yield "loss.kind", "must be softmax or binary with task classification, got detection"
    if spec.model.detector is not None:
        yield "model.detector", "must be null with task classification"
    if spec.data.built_in_augment == "whole":
        yield "data.augment", "must not be whole with task classification, whose networks see crops"


def _detection_problems(spec: Spec) -> Iterator[Problem]:
    model = spec.model
    if spec.loss.base != "detection":
        yield "loss.kind", f"must be detection with task detection, got {spec.loss.kind}"
    if model.detector is not None and model.detector.freeze_stem and model.pretrained is None:
        yield "model.detector.freeze_stem", _UNTRAINED
    if model.arch not in ("tsn", "tsm"):
        yield "model.arch", f"must be tsn or tsm with task detection, got {model.arch}"
    if model.arch == "tsm" and model.shift_direction != "past":
        yield "model.shift_direction", "must be past with task detection: each frame is seen without later ones"
    if spec.data.built_in_augment == "rand_augment":
        yield "data.augment", "must not be rand_augment with task detection, whose boxes stay upright; use whole"
    if not isinstance(spec.data.augment, str):
        yield "data.augment", "must have no augmentation of your own with task detection: boxes would not follow it"
    if spec.evaluate.mode != "stream":
        yield "evaluate.mode", f"must be stream with task detection, got {spec.evaluate.mode}"
    if spec.evaluate.crops != "full":
        yield "evaluate.crops", f"must be full with task detection, got {spec.evaluate.crops}"


def _data_problems(data: DataSpec, clips_per_gpu: int) -> Iterator[Problem]:
    if not isinstance(data.augment, str):
        kinds = [augment.kind for augment in data.augment]
        is_first = [kind in AUGMENTS for kind in kinds] == [True, *[False] * (len(kinds) - 1)]
        if not is_first or data.augment[0].options:
            right = f"one of {', '.join(AUGMENTS)}, then augmentations of your own"
            yield "data.augment", f"must be {right}, got {', '.join(kinds) or 'none'}"
            return
    low, high = data.short_side
    if low > high:
        yield "data.short_side", f"must be [low, high], got [{low}, {high}]"
    if data.built_in_augment == "scale_jitter" and data.crop > low:
        yield "data.crop", f"must be at most the lowest data.short_side, {low}, got {data.crop}"
    if data.crop_scales == ():
        yield "data.crop_scales", "must be null or have at least one scale, got []"
    least, most = data.rand_augment_settings.crop_area
    if least > most:
        yield "data.rand_augment.crop_area", f"must be [low, high], got [{least:g}, {most:g}]"
    if data.built_in_augment == "rand_augment" and data.modality == "flow":
        yield "data.augment", "must not be rand_augment with data.modality flow, which has no colours; use scale_jitter"
    if clips_per_gpu % data.repeats:
        yield "data.repeats", f"must divide scale.clips_per_gpu, {clips_per_gpu}, got {data.repeats}"
    if data.mix is not None and not (data.mix.mixup or data.mix.cutmix):
        yield "data.mix", "must have mixup or cutmix above 0; try {mixup: 0.8, cutmix: 1.0}, or null"
    if data.mix is not None and clips_per_gpu // data.repeats < 2:
        clips = f"scale.clips_per_gpu {clips_per_gpu} with data.repeats {data.repeats}"
        yield "data.mix", f"must be null: clips are mixed within a virtual GPU, and {clips} has only one"


def _solver_problems(optimizer: OptimizerSpec, schedule: ScheduleSpec, parallel: ParallelSpec) -> Iterator[Problem]:
    trust = optimizer.trust_ratio
    if trust is not None and trust.kind == "bounded" and trust.lower > trust.upper:
        bounds = f"lower is {trust.lower:g} and upper {trust.upper:g}"
        yield "optimizer.trust_ratio.lower", f"must be at most upper: {bounds}"
    if trust is not None and trust.kind == "lars" and optimizer.name == "lamb":
        right = "must be null with optimizer.name lamb, which already includes a trust ratio"
        yield "optimizer.trust_ratio", f"{right}, got lars"
    for frozen in optimizer.freeze:
        if frozen.until_epoch is not None and frozen.until_epoch >= schedule.epochs:
            right = f"must be below the run's {counted(schedule.epochs, 'epoch')}, got {frozen.until_epoch}"
            yield "optimizer.freeze", f"until_epoch {right}; null freezes for the whole run"
    if schedule.warmup_scaling == "none" and schedule.warmup_epochs > schedule.epochs:
        right = f"must be at most the run's {counted(schedule.epochs, 'epoch')}, got {schedule.warmup_epochs:g}"
        yield "schedule.warmup_epochs", right
    epochs = [0.0, *schedule.milestones, float(schedule.epochs)]
    is_rising = all(before < after for before, after in pairwise(epochs))
    if schedule.decay == "steps" and not (schedule.milestones and is_rising):
        given = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
        rising = f"must be rising epochs between 0 and {schedule.epochs} with schedule.decay steps"
        yield "schedule.milestones", f"{rising}, got [{given}]; try [30, 60, 80]"
    if parallel.method == "averaging" and optimizer.compression != "none":
        right = f"must be none with parallel.method averaging, got {optimizer.compression}"
        yield "optimizer.compression", f"{right}: it sends weights, unrounded"


def _validation_problems(spec: Spec) -> Iterator[Problem]:
    """Yield the keys of measures, of decisions by them, and of checkpoints that do not fit."""
    grow = spec.parallel.grow_batch
    stop = spec.schedule.early_stop
    best = spec.checkpoint.keep_best
    deciding = {"parallel.grow_batch": grow, "checkpoint.keep_best": best, "schedule.early_stop": stop}
    for key, value in deciding.items():
        if value is not None and not spec.evaluate.every_epochs:
            yield key, "must be null if evaluate.every_epochs is 0; try evaluate.every_epochs 1"
    own = spec.evaluate.own_names
    measures = [MAIN_MEASURES[spec.loss.base], *own]
    if best is not None and best not in measures:
        choices = ", ".join(measures)
        yield "checkpoint.keep_best", f"must be {choices} or null with loss.kind {spec.loss.base}, got {best}"
    for name in own:
        if own.count(name) > 1 or name in RESERVED_NAMES or name.endswith(_STATISTICS):
            yield "evaluate.measures", f"must have names that nothing else has, got {name}; try another name"
            break
    if own and spec.task == "detection":
        yield "evaluate.measures", f"must be [] with task {spec.task}: they take a score for each class"
    if spec.task == "classification":
        measures.append("val_loss")
    if stop is not None and stop.measure not in measures:
        right = f"must be {' or '.join(measures)} with loss.kind {spec.loss.base}, got {stop.measure}"
        yield "schedule.early_stop.measure", right
    if grow is not None and grow.max is not None:
        clips = spec.scale.clips_per_gpu
        if grow.max < clips:
            yield "parallel.grow_batch.max", f"must be at least scale.clips_per_gpu, {clips}, got {grow.max}"
        if grow.max % spec.data.repeats:
            multiple = f"must be a multiple of data.repeats, {spec.data.repeats}, got {grow.max}"
            yield "parallel.grow_batch.max", multiple
    last = spec.evaluate.last_checkpoints
    if last > spec.checkpoint.keep:
        yield "evaluate.last_checkpoints", f"must be at most checkpoint.keep, {spec.checkpoint.keep}, got {last}"


def _other_problems(spec: Spec) -> Iterator[Problem]:
    model = spec.model
    if spec.parallel.method == "averaging" and spec.ema.decay is not None:
        right = f"must be null with parallel.method averaging, got {spec.ema.decay:g}"
        yield "ema.decay", f"{right}: each learner has separate weights"
    if model.drop_path and spec.execution.compile:
        yield "execution.compile", "must be false, got true: torch.compile cannot use the generator of drop_path"
    if model.freeze_bn != "none" and model.pretrained is None and not is_foreign(model.arch):
        yield (
            "model.freeze_bn",
            f"must be none without model.pretrained, got {model.freeze_bn}; try setting model.pretrained",
        )
    if model.freeze_trunk and model.pretrained is None:
        yield "model.freeze_trunk", _UNTRAINED
    cannot_stream = stream_problem(model)
    if spec.evaluate.mode == "stream" and cannot_stream is not None:
        yield "evaluate.mode", cannot_stream


def network_problems(network: NetworkSpec, num_frames: int, crop: int | None = None) -> Iterator[Problem]:
    """Yield what cannot be built.

    crop: the side of the picture, where it is known; res4 leaves a sixteenth of it, which non-local blocks halve.
    """
    arch = network.arch
    backbone = network.backbone
    known = architecture(arch)
    least = known.minimum_frames
    most = known.maximum_frames
    step = known.frames_step if network.adapter == "none" else 1  # with an adapter, a vit sees frames, not tubelets
    if num_frames % step:
        yield "data.num_frames", f"must be a multiple of {step} for {arch}, {known.step_reason}, got {num_frames}"
    elif num_frames < least:
        yield "data.num_frames", f"must be at least {least} for {arch}, {known.minimum_reason}, got {num_frames}"
    elif most is not None and num_frames > most:
        yield "data.num_frames", f"must be at most {most} for {arch}, got {num_frames}"
    if backbone not in (known.backbones or (None,)):
        valid = f"must be one of {', '.join(known.backbones)} for {arch}, got {backbone}"
        without = f"must be left out for {arch}, which has no backbone, got {backbone}"
        yield "model.backbone", valid if known.backbones else without
    elif network.non_local and not (known.non_local and backbone in BOTTLENECK_BACKBONES):
        takers = ", ".join(name for name, other in ARCHITECTURES.items() if other.non_local)
        right = f"{takers} take non-local blocks, on one of {', '.join(BOTTLENECK_BACKBONES)}"
        yield "model.non_local", f"must be false for {f'{arch} on {backbone}' if backbone else arch}; {right}"
    elif network.non_local and crop is not None and crop <= 16:
        yield "model.non_local", f"must be false if data.crop is below 17, got true with data.crop {crop}"
    if network.zero_init_residual and not known.norm_ends_branch:
        yield "model.zero_init_residual", f"must be false for {arch}, whose residual branches do not end in a norm"
    if arch == "vit" and network.adapter == "shift" and network.shift_place != "residual":
        yield "model.shift_place", f"must be residual for vit, got {network.shift_place}"


def size_problems(network: NetworkSpec, crop: int, tested: int | None) -> Iterator[Problem]:
    """Yield the sizes of pictures that a vit cannot take.

    crop, tested: sides of the squares in training and in the evaluation, in pixels; None there for whole frames.
    """
    if network.arch != "vit":
        return
    for key, side in (("data.crop", crop), ("evaluate.short_side", tested)):
        if side is not None and side % 16:
            yield key, f"must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got {side}"
    if network.adapter == "none" and network.positions == "index" and tested != crop:
        # The number of a patch in a grid of another width is that of another place.
        numbered = "for a vit that numbers the patches of its grid (model.positions index)"
        if tested is None:
            yield "evaluate.crops", f"must be 1 or 3 {numbered}, got full"
        else:
            yield "evaluate.short_side", f"must be data.crop, {crop}, {numbered}, got {tested}"


def stream_problem(network: NetworkSpec) -> str | None:
    """Return why a network cannot see a video frame by frame, and what can; None where it can."""
    arch = network.arch
    shifts = arch == "tsm" or network.adapter == "shift"
    if not (architecture(arch).frame_by_frame or shifts):
        past = "a tsm, or a vit with model.adapter shift, with model.shift_direction past"
        return f"{arch} cannot stream: it sees whole clips; a tsn can, and {past}"
    if network.non_local:
        return "non-local blocks attend to all frames of a clip, so the network cannot stream; it can without them"
    if shifts and network.shift_direction != "past":
        return f"this {arch} cannot stream: its shift needs the next frame; train one with model.shift_direction past"
    return None
