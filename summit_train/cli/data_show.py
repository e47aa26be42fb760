"""`summit-train data show LIST`: a page of clips, whole or as the network sees them in training or validation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.files import check_output
from summit_train.core.progress import followed
from summit_train.core.result import Result
from summit_train.core.session import check_single
from summit_train.core.text import counted, share, with_unit
from summit_train.data.batches.stores import open_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.reading import check_same_classes
from summit_train.data.packed.format import read_pack
from summit_train.data.video.augment import View, test_frames, test_views
from summit_train.data.video.encode import scaled
from summit_train.data.video.render import Frames
from summit_train.data.video.source import DecodeError
from summit_train.evaluation.fuse import read_run
from summit_train.evaluation.scores import probabilities
from summit_train.plan import make_plan
from summit_train.report.films import Film, Seen, film, seen
from summit_train.report.page import environment, write_page
from summit_train.spec import DataSpec, Spec, run_spec

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes

_LIMITS = {"clips": (1, 2000), "frames": (1, 64), "pixels": (16, 512), "epoch": (0, 10**9)}
_MOST_PIXELS = 1 << 28  # of a page, which then has some 90 MB
_NO_CLASS = "no class"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("manifest", metavar="LIST", help="manifest, folder of class folders, or packed set")
    add("overrides", nargs="*", metavar="key=value", help="keys of SPEC or RUN to override")
    add("--out", metavar="PAGE.html", type=Path, default=Path("clips.html"), help="page to write [%(default)s]")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--spec", metavar="SPEC", help="show clips as training sees them [whole frames]")
    run = "show clips as the validation of a run sees them, the lowest scores of their own classes first"
    how.add_argument("--run", metavar="RUN", help=run)
    add("--epoch", type=int, metavar="N", help="with --spec: show this epoch, counted from 0 [0]")
    add("--root", metavar="DIR", help="where LIST's paths start [its own folder, or data.root]")
    add("--only", nargs="+", metavar="CLASS", help="show only these classes")
    add("--clips", type=int, default=48, metavar="N", help="show at most this many clips [%(default)s]")
    add("--frames", type=int, default=16, metavar="N", help="show at most this many frames of a clip [%(default)s]")
    add("--pixels", type=int, default=128, metavar="N", help="limit the short side of a frame [%(default)s]")


@dataclass(frozen=True)
class _Clips:
    """The clips that may be shown, and what reads one. about: how they are seen, and each one's score, for the page.

    right: how sure the run is of what is right, of clips that are shown in this order.
    """

    manifest: Manifest
    clips: Sequence[int]
    see: Callable[[int], Seen]
    about: Mapping[str, Any]
    right: Mapping[int, float] = field(default_factory=dict)


def run(args: argparse.Namespace) -> Result:
    """Write the page. A clip that cannot be read is on it with the reason."""
    check_single("data show")
    for name, (least, most) in _LIMITS.items():
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            raise UserError(f"--{name} must be {least:,} to {most:,}, got {value:,}")
    if (size := args.clips * args.frames * args.pixels**2) > _MOST_PIXELS:
        wrong = f"clips x frames x pixels^2 must be at most {_MOST_PIXELS:,}, got {size:,}"
        raise UserError(f"{wrong}; try fewer: the defaults are 12,582,912, a page of some 4 MB")
    if not args.spec and (args.epoch is not None or (args.overrides and not args.run)):
        raise UserError("--epoch must be used with --spec, key=value with --spec or --run")
    check_output("--out", args.out, args.out, *filter(None, (args.manifest, args.spec)))
    clips = _in_training(args) if args.spec else _in_validation(args) if args.run else _whole(args)
    manifest = clips.manifest
    names = manifest.class_names
    groups = dict[str, list[dict[str, Any]]]()
    bad = list[str]()
    chosen = _chosen(clips, args.clips, args.only)
    for clip, group in followed(iter(chosen), len(chosen), "clips"):
        try:
            picture = film(_pictures(clips.see(clip), manifest.boxes, args.frames, args.pixels))
        except (DecodeError, OSError) as error:
            picture = Film(reason=str(error))
            bad.append(picture.reason)
        labels = ", ".join(names[label] for label in manifest.labels_of(clip)) or group
        groups.setdefault(group, []).append(
            {"name": str(manifest.clip(clip)), "number": clip, "labels": labels, "film": picture}
        )
    what = f"{len(chosen):,} of {counted(len(clips.clips), 'clip')}"
    what += f", {len(groups.keys() - {_NO_CLASS}):,} of {len(names):,} classes"
    page = {"title": manifest.source, "what": what, "groups": groups, "scores": {}, **clips.about}
    write_page(args.out, environment().get_template("sheet.html.j2").render(page))
    written = with_unit(args.out.stat().st_size, "B")
    return Result([f"{args.out}: {what}, {written}", *(f"cannot be shown: {reason}" for reason in bad)])


# How clips are seen.


def _whole(args: argparse.Namespace) -> _Clips:
    manifest = read_manifest(args.manifest)
    data = DataSpec(train=args.manifest, val=args.manifest, root=args.root, sampling="uniform", flow_length=1)
    if manifest.is_packed:
        packing = read_pack(manifest.source).packing
        data = data.model_copy(update={"modality": packing.modality, "region": packing.region})

    def crop(width: int, height: int) -> list[View]:
        return test_views(min(args.pixels, width, height), "full", width, height)

    sample = partial(test_frames, "uniform", num_frames=args.frames, stride=1, num_clips=1)
    see = partial(seen, open_store(data, manifest), sample, crop)
    return _Clips(manifest, range(len(manifest)), see, {"view": "whole", "modality": data.modality})


def _spec(args: argparse.Namespace, which: str) -> Spec:
    paths = {"root": args.root, which: args.manifest}
    quoted = [f"data.{key}={json.dumps(text, ensure_ascii=False)}" for key, text in paths.items() if text is not None]
    return run_spec(args.spec or args.run, [*args.overrides, *quoted])


def _in_training(args: argparse.Namespace) -> _Clips:
    spec = _spec(args, "train")
    epoch = args.epoch or 0
    if epoch >= spec.schedule.epochs:
        raise UserError(f"--epoch must be below schedule.epochs {spec.schedule.epochs:,}, got {epoch:,}")
    dataset = Dataset.open(spec, "train")
    read, drawn = dataset.training_clips(make_plan(spec, 1, len(dataset)).order(), epoch)

    def see(clip: int) -> Seen:
        views, targets = read.clip(clip, drawn[clip], lambda *_: nullcontext())
        return views[0], targets[0] if targets else None

    augments = [spec.data.built_in_augment, *(part.name for part in dataset.augment)]
    about = {"view": "training", "spec": spec, "path": args.spec, "epoch": epoch, "augments": augments}
    return _Clips(dataset.manifest, sorted(drawn), see, about)


def _in_validation(args: argparse.Namespace) -> _Clips:
    spec = _spec(args, "val")
    if spec.task == "detection":
        raise UserError(f"--run must be of a task that scores classes, got {spec.task}; try --spec {args.run}")
    run = read_run(args.run)
    dataset = Dataset.open(spec, "val")
    check_same_classes(args.manifest, dataset.manifest.classes, run.path, run.class_names)
    hot = run.scores.hot
    shares = probabilities(run.scores.scores, run.scores.kind)
    right = np.where(hot, shares, 1.0 if run.scores.kind == "softmax" else 1 - shares)
    names = run.scores.names(run.class_names)
    places = {clip: place for place, clip in enumerate(run.clips) if run.scores.is_read[place]}
    sure = dict[int, float]()
    scores = dict[int, dict[str, Any]]()
    for clip in range(len(dataset)):
        if (place := places.get(dataset.manifest.clip(clip))) is not None:
            worst = int(right[place].argmin())
            top = int(shares[place].argmax())
            sure[clip] = float(right[place, worst])
            scores[clip] = {
                "class": names[worst],
                "share": share(shares[place, worst]),
                "is_likely": shares[place, worst] >= 0.5,
                "is_own": hot[place, worst],
                "classes": ", ".join(names[label] for label in np.flatnonzero(hot[place])) or _NO_CLASS,
                "top": names[top],
                "top_share": share(shares[place, top]),
            }
    if not scores:
        raise UserError(f"{args.manifest}: must have videos that {args.run} has scored, got none; give its data.val")
    data = spec.data
    sample = partial(test_frames, data.sampling, num_frames=data.num_frames, stride=data.frame_stride, num_clips=1)
    crop = partial(test_views, spec.evaluate.short_side, 1, long_side=data.long_side)
    about = {"view": "validation", "mode": spec.evaluate.mode, "run": args.run, "scored": run.path.name}
    about |= {"kind": run.scores.kind, "scores": scores}
    return _Clips(dataset.manifest, list(scores), partial(seen, dataset.store, sample, crop), about, sure)


# Which clips are shown, and what of them.


def _chosen(clips: _Clips, most: int, only: Sequence[str] | None) -> list[tuple[int, str]]:
    """Return the clips of the lowest scores; without scores as many of each class, spread over the list.

    With each the class that it is shown under.
    """
    names = clips.manifest.class_names
    if unknown := set(only or ()) - set(names):
        raise UserError(f"--only must have classes of {clips.manifest.source}, got {', '.join(sorted(unknown))}")
    shown = range(len(names)) if only is None else {names.index(name) for name in only}
    groups = dict[int, list[int]]()
    for clip in clips.clips:
        label = next((label for label in clips.manifest.labels_of(clip) if label in shown), len(names))
        if label < len(names) or only is None:
            groups.setdefault(label, []).append(clip)
    if clips.right:
        pairs = [(clip, label) for label in sorted(groups) for clip in groups[label]]
        pairs = sorted(pairs, key=lambda pair: clips.right[pair[0]])[:most]
    else:
        labels = [sorted(groups)[place] for place in _spread(len(groups), most)]
        quotas = dict[int, int]()
        for label in sorted(labels, key=lambda label: len(groups[label])):  # what a small class leaves, larger ones get
            share_left = (most - sum(quotas.values())) // (len(labels) - len(quotas))
            quotas[label] = min(len(groups[label]), share_left)
        pairs = [(groups[at][place], at) for at in labels for place in _spread(len(groups[at]), quotas[at])]
    return [(clip, (*names, _NO_CLASS)[label]) for clip, label in pairs]


def _pictures(view: Seen, boxes: Boxes | None, most: int, pixels: int) -> Frames:
    """Return at most `most` frames, evenly spaced, scaled down, with their boxes; of flow one channel."""
    views, targets = view
    frames = views if views.shape[-1] == 3 else np.repeat(views[..., :1], 3, axis=-1)
    places = _spread(len(frames), most)
    small = scaled(frames[places], pixels)
    if boxes is None or targets is None:
        return small
    return boxes.drawn(small, targets, places, small.shape[2] / frames.shape[2])


def _spread(length: int, most: int) -> list[int]:
    """Return at most `most` of 0 .. length - 1, evenly spaced, with both ends."""
    return [int(place) for place in np.unique(np.linspace(0, length - 1, min(most, length)).round())]
