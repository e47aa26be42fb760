"""`summit-train init`: a spec for a folder of videos, by what the folder holds, and the commands to run next."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from summit_train.cli.configs import ShippedFile
from summit_train.core.errors import UserError
from summit_train.core.files import replacing
from summit_train.core.result import Result
from summit_train.core.text import counted
from summit_train.data.dataset import Dataset, open_datasets
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.reading import PACK_FILE, check_classes, check_same_classes, read_rows
from summit_train.data.manifest.split import parts_of
from summit_train.data.manifest.tables import is_video, skipped_text
from summit_train.spec import spec_from_tree
from summit_train.spec.source import SHIPPED, Tree, read_tree, to_yaml

_BASE = "tsm_finetune"
_SETS = [(f"train{end}", f"{val}{end}") for end in (".csv", ".txt", "") for val in ("val", "validation", "valid")]
_PARTS = ("train", "training", "test", "testing", "val", "validation", "valid", "eval")  # no classes, where several
_GPUS = 2
_SHORT_EPOCH = 5_000  # clips; it is validated each time
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/usr/lib/wsl/lib/libcuda.so.1")  # of GPUs; the last in WSL2
# What a CPU trains in minutes: a tenth of ResNet-50's multiply-adds, on a quarter of the pixels.
_FOR_A_CPU: dict[str, dict[str, Any]] = {
    "model": {"backbone": "mobilenet_v2"},
    "data": {"short_side": [128, 128], "crop": 112},
    "evaluate": {"short_side": 128},
}
_CLIPS_PER_GPU = 8  # for one rank or two; fewer clips where the set has less than a batch of them
_COMMENT = """\
# Written by `summit-train init`. `summit-train configs shipped:NAME` prints what it extends, `schema` every key.
# A small set needs pretrained weights: set model.pretrained to a run or to a file, such as torchvision's:
#   python -c "import torch, torchvision as t; torch.save(t.models.BACKBONE(weights='DEFAULT').state_dict(), 'w.pth')"
# Then delete freeze_bn. To train from random weights, set a higher LR: optimizer: {base_lr: 0.00125}.
# Set data.flip to false if a class means left or right. `data split --group` keeps clips of one person on one side.
"""


class _Found(NamedTuple):
    """Content of a folder.

    clips: of data.train. skipped: other files in class folders. folds: of `data split`, which has yet to write both
    lists.
    """

    manifest: Manifest
    train: str
    val: str
    clips: int
    skipped: Counter[str]
    folds: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    held = "your videos: a folder for each class; or train and val of such folders, lists or packed sets; or one list"
    add("folder", metavar="DIR", help=held)
    base = f"shipped spec or preset that the spec extends, see `summit-train configs` [{_BASE}]"
    add("--from", dest="base", metavar="NAME", help=base)
    add("--out", metavar="FILE", type=Path, help="spec to write, a new file [DIR's name, here]")


def run(args: argparse.Namespace) -> Result:
    folder = _no_option(args.folder.rstrip("/") or "/")
    base = (args.base or _BASE).removeprefix(SHIPPED)
    if (kind := ShippedFile.read(base).kind) not in ("spec", "preset"):
        raise UserError(f"--from must be a spec or a preset, got the {kind} {base}; try {_BASE}, as without --from")
    # A preset without a network is laid over the usual base.
    has_network = "arch" in read_tree(SHIPPED + base).values.get("model", {})
    bases = [SHIPPED + base] if has_network else [SHIPPED + _BASE, SHIPPED + base]
    stem = args.out.stem if args.out else Path(os.path.abspath(folder)).name
    name = re.sub(r"[^\w.-]+", "_", stem).strip("._-") or "mine"
    out = args.out or Path(f"{name}.yaml")
    exists = f"{out}: already exists; try another file with --out"
    if os.path.lexists(out):
        raise UserError(exists)
    found = _found(folder, folds := _no_option(f"{out.parent / name}_folds"))
    if found.folds and Path(os.path.realpath(folder)) in Path(os.path.realpath(out)).parents:
        raise UserError(f"{out}: must not be in {folder}, among the videos; run init in another folder, or give --out")
    values = _values(folder, found)
    is_small = args.base is None and not any(map(os.path.exists, _DRIVERS))
    if is_small:
        for section, keys in _FOR_A_CPU.items():
            values[section] = {**values.get(section, {}), **keys}
    _check(bases, {"name": name, **values}, found)
    try:
        with replacing(out, new=True) as file:
            comment = _COMMENT.replace("BACKBONE", "mobilenet_v2" if is_small else "resnet50")
            file.write((comment + to_yaml({"name": name, "extends": bases, **values})).encode())
    except OSError as error:
        wrong = f"{out}: cannot be written: {error.strerror}; try another folder with --out"
        raise UserError(exists if os.path.lexists(out) else wrong) from error
    source, spec = (_no_option(str(path)) for path in (found.manifest.source, out))
    commands = [["plan", spec], ["train", spec], ["predict", f"runs/{name}", found.val]]
    if found.folds:
        commands = [["data", "split", source, folds, "--folds", str(found.folds)], *commands[:2]]
    what = f"{source}: {counted(len(found.manifest), 'clip')} of {len(found.manifest.class_names)} classes"
    small = "no GPU here: a small network on small frames, MobileNetV2 on 112 pixels"
    size = [f"{small}; for a machine with one: --from {_BASE}"] if is_small else []
    text = [what, *skipped_text(found.skipped), *size, f"wrote {out}; next:"]
    return Result([*text, *(f"  summit-train {shlex.join(words)}" for words in commands)])


def _no_option(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path


def _found(folder: str, folds_folder: str) -> _Found:
    """List the folder. Raises UserError for what cannot be trained on, with what would be right."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; give the folder that holds your videos")
    if "$" in folder or folder.startswith("~") or not folder.isprintable():
        raise UserError(f"{folder}: a spec cannot name this folder; rename it, or give a symbolic link to it")
    for pair in _SETS:
        train, val = (os.path.join(folder, name) for name in pair)
        if os.path.exists(train) and os.path.exists(val):
            manifest = read_manifest(train)
            _check_clips(folder, manifest)
            other = read_manifest(val)
            check_same_classes(val, other.classes, train, manifest.classes)
            return _Found(manifest, train, val, len(manifest), manifest.skipped + other.skipped)
    names = sorted(os.listdir(folder))
    wrong = ""
    lists = [name for name in names if name.endswith(".csv") and not name.endswith(".left_out.csv")]
    sets = [name for name in names if name.lower() in _PARTS and os.path.isdir(os.path.join(folder, name))]
    if PACK_FILE in names:
        wrong = (
            "is one packed set; split its list with `data split`, and pack the parts into train and val of one folder"
        )
    elif len(lists) > 1:
        wrong = f"has {', '.join(lists)}; name two of them train.csv and val.csv, or leave one"
    elif not lists and len(sets) > 1:
        wrong = f"has {' and '.join(sets)}, which are sets of clips and not classes; rename them to train and val"
    elif not lists and any(map(is_video, names)):
        wrong = "has videos outside class folders; move those of each class into a folder of its own, or list them"
    if wrong:
        raise UserError(f"{folder}: {wrong}")
    manifest, rows = read_rows(os.path.join(folder, *lists))
    _check_clips(folder, manifest)
    check_classes(manifest.source, manifest.classes or ())  # `data split` writes them
    wrong = ""
    for folds in (5, 4, 3, 2):
        try:
            parts = parts_of(rows, manifest.class_names, folds)
        except UserError as error:
            wrong = str(error)
            continue
        clips = len(parts) - parts.count(0)
        fold = f"{folds_folder}/fold1"
        return _Found(manifest, f"{fold}/train.csv", f"{fold}/val.csv", clips, manifest.skipped, folds)
    right = "each class needs at least two clips, in at least two groups of the list's column group"
    raise UserError(f"{manifest.source}: cannot be split into training and validation clips; {right}: {wrong}")


def _check_clips(folder: str, manifest: Manifest) -> None:
    """Raise UserError for less than two classes, and for videos that are not there."""
    source = manifest.source
    names = manifest.class_names
    first = manifest.path(0)
    if len(names) < 2:
        right = "give the folder that has a folder for each class, or a list of several classes"
        raise UserError(f"{source}: must have at least two classes, got one, {names[0]}; {right}")
    empty = np.flatnonzero(np.bincount(manifest.label_pairs()[1], minlength=len(names)) == 0)
    if manifest.folder and len(empty):
        raise UserError(f"{source}/{names[empty[0]]}: holds no video; move this folder out of {source}")
    if not manifest.is_packed and not os.path.exists(os.path.join(folder, first)):
        raise UserError(f"{manifest.place(0)}: {first} is not in {folder}; move the list to where its paths start")


def _values(folder: str, found: _Found) -> dict[str, Any]:
    """Return the keys that follow from the videos, and those of a base that a first run must not have."""
    several = found.manifest.boxes is None and found.manifest.not_single() is not None
    return {
        "model": {"num_classes": len(found.manifest.class_names), "pretrained": None, "freeze_bn": "none"},
        "data": {"train": found.train, "val": found.val, "root": folder, "workers": None},
        "scale": {"gpus": _GPUS, "clips_per_gpu": max(1, min(_CLIPS_PER_GPU, found.clips // _GPUS))},
        **({"loss": {"kind": "binary"}} if several else {}),
        **({"evaluate": {"every_epochs": 1}} if found.clips <= _SHORT_EPOCH else {}),
        "run_dir": "runs",
    }


def _check(bases: list[str], values: dict[str, Any], found: _Found) -> None:
    """Raise UserError where `plan` would refuse the values, laid over the bases, or the lists."""
    tree = Tree({})
    for base in bases:
        tree.lay(read_tree(base))
    tree.lay(Tree(values, {(): "init"}))
    spec = spec_from_tree(tree)
    if found.folds:
        data = spec.data.model_copy(update={"train": found.manifest.source})
        Dataset.open(spec.model_copy(update={"data": data}), "train")
    else:
        open_datasets(spec)
