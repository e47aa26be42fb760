"""Compare what the ranks were started with before the first step: spec, lists, code and network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import summit_train
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.data.dataset import Dataset
from summit_train.models.network import build_network
from summit_train.spec import Spec, rank_keys


def check_agreement(world: World, spec: Spec, datasets: Mapping[str, Dataset], **arguments: object) -> None:
    """Raise AgreedError on all ranks if one was started with something other than rank 0. Collective.

    The message names the rank, its host and the first key that differs. datasets: by their keys in the spec's `data`.
    arguments: those of the command.
    """
    if world.size == 1:
        return
    mine = arguments | identity(spec, datasets)
    who, expected = world.broadcast((world.who, mine))

    def compare() -> None:
        for key in expected | mine:
            if (first := expected.get(key)) != (own := mine.get(key)):
                raise UserError(
                    f"{world.who} differs from {who}: {key} must be {first!r}, got {own!r}; start all ranks with the "
                    "same spec, lists and code"
                )

    world.together(compare)


def identity(spec: Spec, datasets: Mapping[str, Dataset]) -> dict[str, Any]:
    """Return what must be equal on all ranks of a run, the most telling first, as flat `section.key: value`."""
    same = rank_keys(spec)
    for name, dataset in datasets.items():
        same[f"data.{name} (fingerprint)"] = dataset.manifest.fingerprint()
        same[f"data.quarantine of data.{name} (fingerprint)"] = dataset.kept.fingerprint()
    same["summit_train (version)"] = summit_train.__version__
    same["torch (version)"] = torch.__version__
    same["summit_train (digest of the code)"] = code_digest(Path(summit_train.__file__).parent)
    with torch.device("meta"):
        state = build_network(spec).state_dict()
    shapes = repr([(name, tuple(value.shape), value.dtype) for name, value in state.items()])
    return same | {"network (digest of names and shapes)": hashlib.sha256(shapes.encode()).hexdigest()}


def code_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
