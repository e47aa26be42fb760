"""`summit-train baseline`: the accuracy of a frozen network's features under logistic regression."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from summit_train.cli.evaluate import scoring
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import read_file, write_json
from summit_train.core.progress import watched
from summit_train.core.result import Result, tell, warn
from summit_train.core.text import counted, from_json
from summit_train.data.dataset import Dataset, open_datasets
from summit_train.evaluation.evaluation import RESULT_FILE
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import PartialScores
from summit_train.inference.baseline import Features, FeatureScorer, baseline, parts_within
from summit_train.models import VideoNetwork
from summit_train.models.weights import load_pretrained
from summit_train.spec import Spec, run_spec
from summit_train.training.agreement import scores_digest

FOLDER = "baseline"  # of a run
FILE = "baseline.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC|RUN", help="experiment spec (YAML), or a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override: model.pretrained=RUN")


def run(args: argparse.Namespace) -> Result:
    """Compute the features of both sets once, fit the regression, and write RUN/baseline/baseline.json on rank 0."""
    spec = run_spec(args.spec, args.overrides)
    if spec.loss.base != "softmax" or spec.task != "classification":
        raise UserError(
            f"baseline must have one class per video (loss.kind softmax), got {spec.task}, {spec.loss.kind}"
        )
    if spec.evaluate.mode != "clips":
        raise UserError(f"evaluate.mode must be clips, got {spec.evaluate.mode}; try evaluate.mode=clips")
    datasets = dict(zip(("train", "val"), open_datasets(spec), strict=True))
    folder = spec.run_path / FOLDER
    with scoring(spec, datasets, (), command="baseline") as (scorer, network, watchdog):
        world = scorer.world
        world.from_first(lambda: _load(spec, network, datasets["train"].manifest.classes))
        world.broadcast_tensors(network.state_dict())
        features = Features(network)
        key = _key(spec, datasets, network)
        found: list[Scores] = []
        for which, dataset in datasets.items():
            path = folder / f"{which}.features.npz" if world.rank == 0 else None
            feature_scorer = FeatureScorer(
                spec, dataset, world, scorer.device, keeps_records=False, width=features.width
            )
            with watched(f"{which} videos", f"computing the features of {which} video", world, watchdog) as progress:
                scores = feature_scorer.score(features, progress, earlier=PartialScores(path, f"{key} {which}"))
            if scores is not None:
                found.append(scores)
    if not found:  # not rank 0
        return Result()
    # The other ranks have left, and nothing watches a fit of minutes.
    for which, scores in zip(datasets, found, strict=True):
        bad = np.count_nonzero(~scores.is_read)
        if bad > spec.data.max_bad_fraction * len(scores.is_read):
            most = f"more than data.max_bad_fraction ({spec.data.max_bad_fraction:g})"
            raise RunFailed(f"data.{which}: {bad} of {len(scores.is_read)} videos could not be read, {most}")
    train, val = found
    if len(np.unique(train.labels[train.is_read])) < 2:
        raise UserError(f"data.train must have videos of two classes or more, got one in {spec.data.train}")
    parts = parts_within(datasets["train"].manifest, train.videos[train.is_read], spec.seed)
    values, scores = baseline(train, val, parts, spec.model.num_classes)
    manifest = datasets["val"].manifest
    scores.save(folder / "predictions.npz", [manifest.clip(i) for i in scores.videos.tolist()], manifest.classes or ())
    values |= {"weights": spec.model.pretrained, "run": _own_top1(spec)}
    write_json(folder / FILE, values)
    return Result(_text(values), values=values | {"written": str(folder / FILE)})


def _load(spec: Spec, network: VideoNetwork, classes: Sequence[str] | None) -> None:
    if spec.model.pretrained is None:
        warn("model.pretrained is not set: random features are the baseline of nothing; try a file or a run")
        return
    try:
        tell(f"pretrained: {load_pretrained(network, spec.model.pretrained, classes)}")
    except UserError as error:
        raise UserError(f"model.pretrained: {error}") from error


def _key(spec: Spec, datasets: Mapping[str, Dataset], network: VideoNetwork) -> str:
    """Return a digest of all that features depend on, the weights too."""
    digest = hashlib.sha256(scores_digest(spec, datasets, network).encode())
    for tensor in network.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _own_top1(spec: Spec) -> float | None:
    """Return the top-1 of the spec's run where it has one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(from_json(read_file(spec.run_path / RESULT_FILE))["top1_mean"])
    return None


def _text(values: Mapping[str, Any]) -> list[str]:
    folds = values["folds"]
    how = f"chosen by {folds} folds of the training set" if folds else "not chosen: a class is in fewer than two groups"
    lines = [
        f"baseline: top-1 {values['top1']:.2f} %, logistic regression of {values['features']:,} frozen features",
        "95 % interval of top-1: {:.2f} to {:.2f} %".format(*values["top1_interval"]),
        f"{counted(values['training_videos'], 'training video')}, {counted(values['videos'], 'validation video')}; "
        f"strength C {values['strength']:g}, {how}",
    ]
    if values["run"] is not None:
        lines.append(f"the run's own: top-1 {values['run']:.2f} %")
    return lines
