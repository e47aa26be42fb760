"""Compare what must be equal: on all ranks of a run, and in a run and the checkpoint that it resumes from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import summit_train
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.data.dataset import Dataset
from summit_train.models import VideoNetwork
from summit_train.plan import Plan
from summit_train.spec import Spec, changes_scores, experiment_defaults, experiment_keys, own_parts, rank_keys

_CODE = "summit_train (digest of the code)"


@dataclass(frozen=True)
class Identity:
    """Values that must be equal, by kind: keys of the spec, digests of lists of clips, versions and digests of code.

    The names are for people and files; no meaning is read from their text. The digest None is that of no list.
    """

    keys: Mapping[str, Any]
    lists: Mapping[str, Any]
    code: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """Return all entries, as checkpoints hold them."""
        lists = {name: digest for name, digest in self.lists.items() if digest is not None}
        return {**self.keys, **lists, **self.code}


def check_agreement(
    world: World, spec: Spec, datasets: Mapping[str, Dataset], network: VideoNetwork, **arguments: object
) -> None:
    """Raise AgreedError on all ranks if one was started with something other than rank 0. Collective.

    The message names the rank, its host and the first key that differs. datasets: by their keys in the spec's `data`.
    network: the spec's. arguments: those of the command. Only one rank of a node hashes the code; a rank that runs it
    from another folder than rank 0 hashes its own.
    """
    if world.size == 1:
        return
    package = Path(summit_train.__file__).parent
    takes_digest = world.local_rank > 0
    values = arguments | identity(spec, datasets, network, "" if takes_digest else code_digest(package)).values()
    who, folder, expected = world.broadcast((world.who, str(package), values))

    def compare() -> None:
        if takes_digest:
            values[_CODE] = expected[_CODE] if folder == str(package) else code_digest(package)
        for key in expected | values:
            if expected.get(key) != values.get(key):
                wrong = f"{key} must be {expected.get(key)!r}, got {values.get(key)!r}"
                right = "start all ranks with the same spec, lists and code"
                raise UserError(f"{world.who} differs from {who}: {wrong}; {right}")

    world.together(compare)


def identity(spec: Spec, datasets: Mapping[str, Dataset], network: VideoNetwork, digest: str | None = None) -> Identity:
    """Return values that must be equal on all ranks of a run, the most telling first. digest: of the code, if known."""
    lists = {f"data.{name} (fingerprint)": dataset.manifest.fingerprint() for name, dataset in datasets.items()}
    shapes = repr([(name, tuple(value.shape), value.dtype) for name, value in network.state_dict().items()])
    code = {
        "summit_train (version)": summit_train.__version__,
        "torch (version)": str(torch.__version__),
        _CODE: code_digest(Path(summit_train.__file__).parent) if digest is None else digest,
        **network.sources,
        **own_sources(spec, trains="train" in datasets),
        "network (digest of names and shapes)": hashlib.sha256(shapes.encode()).hexdigest(),
    }
    return Identity(rank_keys(spec), lists, code)


def scores_digest(spec: Spec, datasets: Mapping[str, Dataset], network: VideoNetwork) -> str:
    """Return a digest of what the scores of one checkpoint depend on.

    Another walltime, number of workers or place of the data changes nothing.
    """
    same = identity(spec, datasets, network)
    keys = {key: value for key, value in same.keys.items() if changes_scores(spec, key)}
    return hashlib.sha256(repr((keys, same.lists, same.code)).encode()).hexdigest()


def code_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def experiment_of(spec: Spec, plan: Plan, train: Dataset | None, model: VideoNetwork) -> Identity:
    """Return the values that must be equal for one run to resume from another's checkpoint.

    The number of ranks is not part of it, nor where the data are, nor what only changes the speed. train: None where
    the list of the clips is missing; its fingerprint is then left out.
    """
    lists = {"data.train (fingerprint)": None if train is None else train.manifest.fingerprint()}
    scale = {"scale.gpus": plan.virtual_gpus, "scale.clips_per_gpu": plan.clips_per_gpu}
    return Identity(experiment_keys(spec) | scale, lists, {**model.sources, **own_sources(spec, decides=True)})


def own_sources(spec: Spec, *, trains: bool = True, decides: bool = False) -> dict[str, str]:
    """Return the SHA-256 of each file with a part of the user's own, by its key; names that repeat are numbered.

    trains: those of training, too. decides: of the measures only the one that can end training.
    """
    measures = list(zip(own_parts(spec, "evaluate"), spec.evaluate.own_names, strict=True))
    if decides:
        stop = spec.schedule.early_stop
        measures = [(part, name) for part, name in measures if stop is not None and stop.measure == name]
    parts = [*own_parts(spec, *(("loss", "schedule", "data") if trains else ())), *(part for part, _ in measures)]
    counts = Counter[str]()
    digests = {}
    for part in parts:
        name = f"{part.key} {Path(part.name).name}"
        counts[name] += 1
        number = "" if counts[name] == 1 else f" {counts[name]}"
        digests[f"{name}{number} (SHA-256)"] = part.digest
    return digests


def experiment_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each key in which two experiments differ. A key that an older checkpoint lacks is a default."""
    saved = {**{key: value for key, value in experiment_defaults().items() if key in wanted}, **saved}
    return {
        key: f"{key}: the checkpoint has {saved.get(key)!r}, this run {wanted.get(key)!r}"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    }
