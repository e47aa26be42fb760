"""`summit-train eval`: the accuracy of a run's checkpoints, of whole videos or, with --observed, of their first parts.

Every video is scored once, on any number of ranks. With precise BN, whose batches are those of training, there are at
most as many ranks as virtual GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from summit_train.core.comm.launch import this_launch
from summit_train.core.device import choose_device
from summit_train.core.errors import UserError
from summit_train.core.files import check_output, figure_path, read_file, write_json
from summit_train.core.machine import warn_untested
from summit_train.core.progress import watched
from summit_train.core.result import Result, tell
from summit_train.core.run_folder import CheckpointError, best_checkpoint
from summit_train.core.saved import peek
from summit_train.core.session import session
from summit_train.core.text import counted, from_json
from summit_train.core.watch import StopRequest, Watchdog
from summit_train.data.dataset import Dataset
from summit_train.evaluation.evaluation import EVALS, RESULT_FILE, Evaluation, accuracy_text, build_scorer
from summit_train.evaluation.measures import open_measures
from summit_train.evaluation.observed import TENTHS, curves_text, parse_fractions, score_observed
from summit_train.evaluation.scores import Scored
from summit_train.evaluation.scoring import VideoScorer
from summit_train.models import VideoNetwork
from summit_train.models.foreign import check_sources, sources_of
from summit_train.models.network import initial_network
from summit_train.report.goodput import goodput_values
from summit_train.spec import Spec, changes_scores, flat_keys, folder_name, load_spec, run_spec
from summit_train.spec.source import split_overrides
from summit_train.sweep.grid import joined_name
from summit_train.training.agreement import check_agreement
from summit_train.training.checkpoint import current_line, epoch_checkpoints, steps_per_epoch
from summit_train.training.inputs import read_inputs

_CHOOSE = ("checkpoints", "checkpoint.every_epochs", "schedule.epochs")  # keys that change which checkpoints count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", metavar="SPEC|RUN", help="experiment spec (YAML), or a run folder")
    which = "the N newest checkpoints of whole epochs, the best, or files [last:evaluate.last_checkpoints]"
    add("--checkpoints", nargs="+", metavar="last:N|best|PATH", help=which)
    early = "early recognition: accuracy when these fractions of each video are seen (0.1,0.2,...,1); one checkpoint"
    add("--observed", nargs="?", const="", metavar="R,R,...", help=f"{early}, by default the newest of a whole epoch")
    add("--name", help="write to evals/NAME in the run folder [a name made from the changed keys]")
    add("--out", metavar="FILE", help="with --observed: draw the curves")
    add("--beside", nargs="+", metavar="RUN", help="with --out: and those of other run folders")
    add("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    """Evaluate; rank 0 writes predictions and eval.json into the run folder.

    If an override changes scores, they stay as they are and the result goes to a folder of its own, evals/NAME.
    """
    chosen, more = split_overrides(args.checkpoints or [])
    beside, words = split_overrides(args.beside or [])
    overrides = [*args.overrides, *more, *words]
    if "=" in (args.observed or ""):  # --observed alone, before an override
        overrides.append(args.observed)
        args.observed = ""
    if args.observed is None and (args.out is not None or beside):
        raise UserError("--out and --beside must be used with --observed: they draw its figure")
    if beside and args.out is None:
        raise UserError("--beside must be used with --out FILE.png: it draws other runs' curves")
    if args.observed is not None:
        return _run_observed(args, chosen, beside, overrides)
    spec = run_spec(args.spec, overrides)
    # Only precise BN needs the training data and the plan.
    inputs = read_inputs(spec, this_launch().size) if spec.evaluate.precise_bn else None
    datasets = {"val": Dataset.open(spec, "val")} if inputs is None else inputs.datasets
    paths, left_out = _paths(spec, chosen)
    measures = open_measures(spec)
    changed = _changed_keys(spec, chosen, spec.evaluate.last_checkpoints)
    if key := next((key for key in ("loss.kind", "loss.like") if key in changed), None):
        raise UserError(f"{key} must be the run's own, as it sets the measures; train another run")
    folder = _result_folder(spec, args.name, changed, RESULT_FILE)
    with scoring(spec, datasets, paths, command="eval", checkpoints=list(map(str, paths))) as opened:
        scorer, network, watchdog = opened
        training = None if inputs is None else (inputs.plan, inputs.train)
        goodput = scorer.world.from_first(lambda: goodput_values(spec.run_path))
        evaluation = Evaluation(scorer, watchdog, folder, measures, training, changed, goodput=goodput)
        if scorer.world.rank == 0:
            tell(*(f"left out of the mean: {line}" for line in left_out))
        return accuracy_result(evaluation, evaluation.score_checkpoints(network, paths))


@contextmanager
def scoring(
    spec: Spec, datasets: Mapping[str, Dataset], paths: Sequence[Path], **arguments: object
) -> Iterator[tuple[VideoScorer[Scored], VideoNetwork, Watchdog]]:
    """Open the ranks, compare what they were started with, and yield what scores the validation set, and the network.

    A foreign network's code is compared with that of the checkpoints `paths` before it runs.
    """

    def compare_code() -> None:
        sources = sources_of(spec.model.arch)
        for path in paths if sources else []:
            if isinstance(state := peek(path), dict):  # loading refuses anything else
                check_sources(path, state, sources)

    with session(this_launch()) as world, Watchdog(world, world.broadcast(spec.watch.stall_seconds)) as watchdog:
        if world.rank == 0:
            warn_untested(torch.__version__)
        world.from_first(compare_code)
        device = choose_device(world)
        network = world.together(lambda: initial_network(spec, device))
        check_agreement(world, spec, datasets, network, **arguments)
        yield build_scorer(spec, datasets["val"], world, device, StopRequest()), network, watchdog


def accuracy_result(evaluation: Evaluation, values: dict[str, Any] | None) -> Result:
    """Return eval.json and where it is as the command's result, on rank 0."""
    if values is None:
        return Result()
    spec = evaluation.scorer.spec
    text = accuracy_text(values, evaluation.measures)
    file = evaluation.folder / RESULT_FILE
    last = spec.evaluate.last_checkpoints
    if evaluation.folder != spec.run_path:
        changed = ", ".join(f"{key}={value}" for key, value in evaluation.overrides.items())
        text.append(f"not the run's own result ({changed or 'the same keys'}): written to {file}")
    elif (found := len(values["checkpoints"])) < last:
        text.append(f"{counted(found, 'checkpoint')}, fewer than evaluate.last_checkpoints, {last}")
    return Result(text, values=values | {"written": str(file)})


def _changed_keys(spec: Spec, chosen: Sequence[str], usual: int) -> dict[str, Any]:
    """Return the keys of `spec`, with their values, that differ from the spec that its run was trained with.

    chosen: the checkpoints as they were named. Where they are not the `usual` last ones they become the key
    `checkpoints`. Nothing differs from a run that is not there.
    """
    file = spec.run_path / "spec.yaml"
    if not file.is_file():
        return {}
    asked, trained = (flat_keys(one) for one in (spec, load_spec(file)))
    keys = [key for key in trained | asked if asked.get(key) != trained.get(key) and key not in ("name", "run_dir")]
    changed = {key: asked.get(key) for key in keys}
    if chosen and chosen != [f"last:{usual}"]:
        changed["checkpoints"] = [os.path.abspath(word) if os.path.isfile(word) else word for word in chosen]
    return changed


def _result_folder(spec: Spec, name: str | None, changed: Mapping[str, Any], file: str) -> Path:
    """Choose the folder of the result `file`: the run's, or evals/NAME for other checkpoints, keys or by `name`.

    Raises UserError where a folder cannot have the name, or where it has a result with other values of keys.
    """

    def telling(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in keys.items() if key in _CHOOSE or changes_scores(spec, key)}

    wanted = telling(changed)
    if not wanted and name is None:
        return spec.run_path
    try:
        stems = {"checkpoints": [Path(word).stem for word in wanted["checkpoints"]]} if "checkpoints" in wanted else {}
        made = joined_name(list({**wanted, **stems}.items()))
        folder = spec.run_path / EVALS / (made if name is None else folder_name(name))
    except ValueError as error:
        raise UserError(f"--name: {error}, got {name!r}") from error
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing is there, or half of it
        found = telling(from_json(read_file(folder / file))["overrides"])
        if found != wanted:
            keys = ", ".join(f"{key}={value}" for key, value in found.items()) or "the run's own"
            raise UserError(f"{folder / file}: is a result with other keys ({keys}); try another --name")
    return folder


def _paths(spec: Spec, chosen: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the checkpoint files to evaluate, and which last ones are left out and why. Raises CheckpointError."""
    paths = list[Path]()
    left_out = list[str]()
    for text in chosen or [f"last:{spec.evaluate.last_checkpoints}"]:
        last = re.fullmatch(r"last:([1-9]\d*)", text)
        if last is None:
            paths.append(best_checkpoint(spec.run_path) if text == "best" else Path(text))
            continue
        kept, others = _last(spec, int(last.group(1)))
        paths += kept
        left_out += others
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {', '.join(missing)} not found; must be a file, best or last:N")
    return paths, left_out


def _last(spec: Spec, number: int) -> tuple[list[Path], list[str]]:
    """Return the last checkpoints of whole epochs, as `current_line` does, though a run that trains may delete one."""
    while True:
        found = epoch_checkpoints(spec, steps_per_epoch(spec.run_path))[-number:] if spec.run_path.exists() else []
        if not found:
            raise CheckpointError(f"{spec.run_path}: no checkpoint of a whole epoch to evaluate")
        try:
            return current_line(found)
        except CheckpointError:
            if all(map(os.path.lexists, found)):
                raise


def _run_observed(
    args: argparse.Namespace, chosen: Sequence[str], others: Sequence[str], overrides: Sequence[str]
) -> Result:
    """Score one checkpoint after parts of the videos; rank 0 writes observed.json and draws."""
    # Imported here because it needs matplotlib: training imports this module on all ranks, and only one draws.
    from summit_train.report.observed import draw_observed
    from summit_train.report.results import OBSERVED_FILE, Observed, read_observed

    fractions = parse_fractions(args.observed) if args.observed else TENTHS
    out = None if args.out is None else figure_path(args.out)
    beside = [read_observed(Path(run)) for run in others]
    spec = run_spec(args.spec, overrides)
    if spec.data.modality == "flow":
        why = "a frame of flow (data.modality) stacks the fields after it, so that the network would see more"
        raise UserError(f"--observed: {why} than the observed part; take an rgb run")
    if spec.loss.base != "softmax":
        raise UserError(f"--observed: must be used with loss.kind softmax, got {spec.loss.base}")
    datasets = {"val": Dataset.open(spec, "val")}
    paths, _ = _paths(spec, chosen or ["last:1"])
    changed = _changed_keys(spec, chosen, 1)
    folder = _result_folder(spec, args.name, changed, OBSERVED_FILE)
    if len(paths) != 1:
        raise CheckpointError(f"--observed takes one checkpoint, not {' '.join(chosen)}; by default the newest")
    path = paths[0]
    arguments = {"checkpoint": str(path), "fractions": [str(fraction) for fraction in fractions]}
    with (
        scoring(spec, datasets, paths, command="eval --observed", **arguments) as (scorer, network, watchdog),
        watched("videos", "evaluating video", scorer.world, watchdog) as progress,
    ):
        if out is not None:
            scorer.world.from_first(lambda: check_output("--out", out, out))
        result = score_observed(scorer, network, path, fractions, progress)
        if result is None:
            return Result()
        result |= {"overrides": changed}
        file = folder / OBSERVED_FILE
        write_json(file, result)
        if out is not None:
            draw_observed(out, [Observed.model_validate(result), *beside])
        text = curves_text(result, spec)
        if folder != spec.run_path:
            text.append(f"written to {file}")
        return Result(text, values=result | {"written": str(file)})
