"""`summit-train init`: a spec for a folder of videos, by what the folder holds, and the commands to run next."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.cli.configs import ShippedFile
from summit_train.core.errors import UserError
from summit_train.core.result import Result
from summit_train.core.text import counted
from summit_train.data.dataset import Dataset, open_datasets
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.manifest.split import split_manifest
from summit_train.data.manifest.tables import is_video
from summit_train.spec import spec_from_tree
from summit_train.spec.source import SHIPPED, Tree, locate, parse_mapping, read_tree, to_yaml

_BASE = "tsm_finetune"
_SETS = [(f"train{end}", f"{val}{end}") for end in (".csv", ".txt", "") for val in ("val", "validation", "valid")]
_MOST_FOLDS = 5
_GPUS, _CLIPS_PER_GPU = 2, 8  # one rank or two; fewer clips where the set has less than a batch of them


@dataclass(frozen=True)
class _Found:
    """What a folder holds. clips: those of data.train. folds: of `data split`, which writes the lists; 0: are there.

    manifest: the training list, or, with folds, that of all clips.
    """

    manifest: Manifest
    train: str
    val: str
    root: str
    clips: int
    folds: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    held = "your videos: a folder for each class; or train and val of such folders, lists or packed sets; or one list"
    add("folder", metavar="DIR", help=held)
    base = f"shipped spec or preset that the spec extends, see `summit-train configs` [{_BASE}]"
    add("--from", dest="base", metavar="NAME", default=_BASE, help=base)
    add("--out", metavar="FILE", type=Path, help="spec to write, a new file [DIR's name, here]")


def run(args: argparse.Namespace) -> Result:
    folder, (bases, tree) = args.folder.rstrip("/") or "/", _extended(args.base.removeprefix(SHIPPED))
    name = re.sub(r"[^\w.-]+", "_", Path(os.path.abspath(folder)).name).strip("._-") or "mine"
    out = args.out or Path(f"{name}.yaml")
    if os.path.lexists(out):
        raise UserError(f"{out}: exists, and init changes no file; try another one with --out")
    found = _found(folder, out.with_name(f"{name}_folds"))
    values = {"name": name, "extends": bases[0] if len(bases) == 1 else bases, **_values(found, tree)}
    text = f"{_comment(found, tree, args.base)}{to_yaml(values)}"
    _check(text, out, tree, found)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}; try another folder with --out") from error
    commands = [["plan", str(out)], ["train", str(out)], ["predict", f"runs/{name}", found.val]]
    if found.folds:
        split = ["data", "split", found.manifest.source, os.path.dirname(os.path.dirname(found.val))]
        commands = [[*split, "--folds", str(found.folds)], *commands[:2]]
    what = f"{counted(len(found.manifest), 'clip')} of {len(found.manifest.class_names)} classes"
    lines = (f"  {shlex.join(['summit-train', *words])}" for words in commands)
    return Result([f"{found.manifest.source}: {what}", f"wrote {out}; next:", *lines])


def _extended(name: str) -> tuple[list[str], Tree]:
    """Return what the spec extends, and its keys: a preset without a network is laid over the usual base."""
    locate(SHIPPED + name)
    if (kind := ShippedFile.read(name).kind) not in ("spec", "preset"):
        raise UserError(f"--from must be a spec or a preset, got the {kind} {name}; try {_BASE}, as without --from")
    tree = read_tree(SHIPPED + name)
    if "arch" in tree.values.get("model", {}):
        return [SHIPPED + name], tree
    below = read_tree(SHIPPED + _BASE)
    below.lay(tree)
    return [SHIPPED + _BASE, SHIPPED + name], below


def _found(folder: str, folds_folder: Path) -> _Found:
    """Return what the folder holds. Raises UserError for what cannot be trained on, with what would be right."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; give the one that holds your videos")
    if "$" in folder or folder.startswith("~") or not folder.isprintable():
        raise UserError(f"{folder}: a spec cannot name this folder; rename it, or give a symbolic link to it")
    for pair in _SETS:
        train, val = (os.path.join(folder, name) for name in pair)
        if os.path.exists(train) and os.path.exists(val):
            manifest = _checked(read_manifest(train))
            return _Found(manifest, train, val, _root(folder, manifest), len(manifest))
    files = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    lists = [name for name in files if name.endswith(".csv") and not name.endswith(".left_out.csv")]
    if PACK_FILE in files:
        right = "split its list first (`data split`), and pack both parts, into DIR/train and DIR/val"
        raise UserError(f"{folder}: is one packed set, and nothing is left to validate on; {right}")
    if len(lists) > 1:
        raise UserError(f"{folder}: has {', '.join(lists)}; name two of them train.csv and val.csv, or leave one")
    if not lists and (loose := [name for name in files if is_video(name)]):
        right = f"move those of each class into a folder of its own, or list all in {folder}/list.csv (path,label)"
        raise UserError(f"{folder}: {counted(len(loose), 'video')} without a class, such as {loose[0]}; {right}")
    manifest = _checked(read_manifest(os.path.join(folder, *lists)))
    folds, clips = _split(manifest.source)
    train, val = (str(folds_folder / "fold1" / f"{side}.csv") for side in ("train", "val"))
    return _Found(manifest, train, val, _root(folder, manifest), clips, folds)


def _checked(manifest: Manifest) -> Manifest:
    """Return a manifest of two classes or more, each class folder with a video. Raises UserError for another one."""
    names, source = manifest.class_names, manifest.source
    if len(names) < 2:
        right = "give the folder that has a folder for each class, or a list of several classes"
        raise UserError(f"{source}: has one class, {names[0]}, and a network needs two to tell apart; {right}")
    empty = np.flatnonzero(np.bincount(manifest.label_pairs()[1], minlength=len(names)) == 0)
    if manifest.folder and len(empty):
        raise UserError(f"{source}/{names[empty[0]]}: holds no video; move this folder out of {source}")
    return manifest


def _root(folder: str, manifest: Manifest) -> str:
    """Return the folder where the paths of a manifest start."""
    if manifest.is_packed:
        return folder
    roots, first = (folder, os.path.join(folder, "videos")), manifest.path(0)
    if found := next((root for root in roots if os.path.exists(os.path.join(root, first))), None):
        return found
    right = "move the list into the folder where its paths start"
    raise UserError(f"{manifest.place(0)}: {first} is neither in {roots[0]} nor in {roots[1]}; {right}")


def _split(source: str) -> tuple[int, int]:
    """Return into how many folds a list can be split, and the clips to train on in the first. Raises UserError."""
    for folds in range(_MOST_FOLDS, 1, -1):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                return folds, split_manifest(source, scratch, folds)[0].clips[0]
            except UserError as error:
                wrong = error
    raise UserError(f"{source}: cannot be split into clips to train and to validate on: {wrong}") from wrong


def _values(found: _Found, tree: Tree) -> dict[str, Any]:
    """Return the keys that depend on the videos, and those of the base that a first run must not have."""
    model: dict[str, Any] = {"num_classes": len(found.manifest.class_names), "pretrained": None}
    if tree.values["model"].get("freeze_bn", "none") != "none":
        model["freeze_bn"] = "none"
    clips = max(1, min(_CLIPS_PER_GPU, found.clips // _GPUS))
    values: dict[str, Any] = {
        "model": model,
        "data": {"train": found.train, "val": found.val, "root": found.root, "workers": None},
        "scale": {"gpus": _GPUS, "clips_per_gpu": clips},
        "run_dir": "runs",
    }
    has_several = found.manifest.annotation is None and found.manifest.not_single() is not None
    return values | {"loss": {"kind": "binary"}} if has_several else values


def _comment(found: _Found, tree: Tree, base: str) -> str:
    backbone = tree.values["model"].get("backbone", "")
    lines = [
        "Written by `summit-train init`. `summit-train schema` has every key; `summit-train configs NAME` prints NAME.",
        "It starts from random weights. A small set needs trained ones: set model.pretrained to a file or a run.",
    ]
    if backbone.startswith(("resnet", "mobilenet")):
        save = f"torch.save(torchvision.models.{backbone}(weights='DEFAULT').state_dict(), '{backbone}.pth')"
        lines += [
            "Weights of ImageNet, by the package torchvision:",
            f'  python -c "import torch, torchvision; {save}"',
        ]
    if tree.values["model"].get("freeze_bn", "none") != "none":
        lines.append("With trained weights, delete freeze_bn: the base keeps their normalisations.")
    if base == _BASE:
        lines.append("With random ones, learn faster: optimizer: {base_lr: 0.00125}, ten times that of the base.")
    if found.folds:
        lines.append("Clips of one person or scene must stay on one side: see `summit-train data split --group`.")
    lines.append("Set data.flip to false if a class means left or right.")
    return "".join(f"# {line}\n" for line in lines)


def _check(text: str, out: Path, tree: Tree, found: _Found) -> None:
    """Raise UserError where the spec, or its lists, would be refused by `plan`."""
    own = parse_mapping(text, str(out))
    del own.values["extends"]
    tree.lay(own)
    spec = spec_from_tree(tree)
    if found.folds:
        data = spec.data.model_copy(update={"train": found.manifest.source})
        Dataset.open(spec.model_copy(update={"data": data}), "train")
    else:
        open_datasets(spec)
