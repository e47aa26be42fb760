"""`summit-train eval`: the accuracy of a run's checkpoints, every video once, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from summit_train.commands.observed import check_alone, run_observed
from summit_train.commands.ranks import session, this_launch
from summit_train.commands.start import choose_device, read_inputs, tell_overrides
from summit_train.models import VideoNetwork
from summit_train.saved import CheckpointError
from summit_train.text import counted
from summit_train.training.agreement import check_agreement
from summit_train.training.checkpoint import epoch_checkpoints
from summit_train.training.evaluation import Evaluation, show_accuracy
from summit_train.training.precise_bn import preparation
from summit_train.training.run import Inputs, fresh_model
from summit_train.training.scoring import Progress
from summit_train.training.watch import Watchdog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        metavar="last:N|PATH",
        help="the run's N newest checkpoints of whole epochs, or files (default: last:evaluate.last_checkpoints)",
    )
    parser.add_argument(
        "--observed",
        nargs="?",
        const="",
        metavar="R,R,...",
        help="early recognition: accuracy when these fractions of each video are seen (0.1,0.2,...,1); one checkpoint, "
        "the newest by default",
    )
    parser.add_argument("--out", metavar="FILE", help="with --observed: draw the curves")
    parser.add_argument("--beside", nargs="+", metavar="RUN", help="with --out: and those of other runs' directories")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> int:
    """Evaluate; rank 0 writes predictions and eval.json into the run directory and prints the accuracy."""
    launch = this_launch()
    chosen, more = tell_overrides(args.checkpoints or [])
    args.beside, words = (None, []) if args.beside is None else tell_overrides(args.beside)
    overrides = [*args.overrides, *more, *words]
    if "=" in (args.observed or ""):  # --observed alone, before an override
        args.observed, overrides = "", [*overrides, args.observed]
    check_alone(args)
    if args.observed is not None:
        return run_observed(args, chosen, overrides)
    inputs = read_inputs(args.spec, overrides, launch.size)
    paths = _paths(inputs, chosen)
    with session(launch) as world, ExitStack() as held:
        check_agreement(world, inputs, command="eval", checkpoints=list(map(str, paths)))
        watchdog = held.enter_context(Watchdog(world, inputs.spec.watch.stall_seconds))
        device = choose_device(world)
        model = fresh_model(inputs.spec, device)
        evaluation = Evaluation(
            inputs.spec, inputs.val_manifest, world, device, preparation(inputs, world, device, watchdog)
        )
        result = evaluate_paths(model, evaluation, paths, watchdog, quiet=args.json)
    if result is not None and args.json:
        print(json.dumps(result))
    return 0


def evaluate_paths(
    model: VideoNetwork, evaluation: Evaluation, paths: Sequence[Path], watchdog: Watchdog, *, quiet: bool
) -> dict[str, Any] | None:
    """Evaluate checkpoints on all ranks. Rank 0 prints the accuracy and returns the content of eval.json."""

    def progress(path: Path) -> Progress:
        return lambda done, total: watchdog.at(f"evaluating video {done} of {total} with {path}", waits=done == total)

    result = evaluation.score_checkpoints(model, paths, progress)
    if result is not None and not quiet:
        print(_sentence(result, evaluation.spec.model.num_classes))
        if "ema" in result:
            print(f"average of the weights: {_sentence(result['ema'], evaluation.spec.model.num_classes)}")
    return result


def _sentence(result: dict[str, Any], num_classes: int) -> str:
    clips = "all frames streamed" if result["mode"] == "stream" else f"{result['clips']} clips"
    views = f"{clips} x {result['crops']} crops"
    if "precise_bn" in result:
        views += f", BN's statistics of {counted(result['precise_bn'], 'training step')}"
    bad = max((checkpoint.get("bad_videos", 0) for checkpoint in result["checkpoints"]), default=0)
    wrong = f", {bad} of them could not be read and count as wrong" if bad else ""
    accuracy = show_accuracy(f"{result['top1_mean']:.2f} +- {result['top1_std']:.2f}", result["top5_mean"], num_classes)
    return f"{accuracy}  ({result['videos']} videos{wrong}, {views}, {len(result['checkpoints'])} checkpoints)"


def _paths(inputs: Inputs, chosen: Sequence[str]) -> list[Path]:
    """Return the checkpoint files that are meant. Raises CheckpointError if there is none."""
    spec = inputs.spec
    paths: list[Path] = []
    for text in chosen or [f"last:{spec.evaluate.last_checkpoints}"]:
        last = re.fullmatch(r"last:([1-9]\d*)", text)
        found = epoch_checkpoints(spec.run_path, inputs.plan.steps_per_epoch)
        paths += found[-int(last.group(1)) :] if last else [Path(text)]
        if last and not found:
            raise CheckpointError(f"{spec.run_path}: there is no checkpoint of a whole epoch to evaluate")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"there is no checkpoint {', '.join(missing)}; a file or last:N is wanted")
    return paths
