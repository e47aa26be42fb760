"""Train, evaluate and report a run on the ranks of this launch."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from summit_train.cli.evaluate import accuracy_result
from summit_train.cluster.node_check import check_nodes
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import AgreedError, RunFailed, UserError
from summit_train.core.files import write_text
from summit_train.core.result import Result, say, tell
from summit_train.core.run_folder import find_checkpoints
from summit_train.core.session import leave_reason
from summit_train.core.text import duration
from summit_train.core.watch import Stopped, StopRequest, leave_if_asked
from summit_train.data.packed.stage import stage_sets
from summit_train.evaluation.evaluation import Evaluation, build_scorer
from summit_train.evaluation.scores import PREDICTIONS
from summit_train.report.goodput import goodput_values
from summit_train.spec import Spec, load_spec, run_spec
from summit_train.training.agreement import scores_digest
from summit_train.training.checkpoint import current_line, epoch_checkpoints
from summit_train.training.inputs import Inputs, read_inputs
from summit_train.training.loop import train
from summit_train.training.metrics import record_end
from summit_train.training.records import Records
from summit_train.training.run import Run
from summit_train.training.start import begin_log, open_rank
from summit_train.training.state import Extension, Origin
from summit_train.training.trace import traced_steps


def run_pipeline(args: argparse.Namespace, stop: StopRequest) -> Result:
    """Train, evaluate and report a spec, with the arguments of `train`. The status is 85 if it was asked to stop."""
    launch = this_launch()
    inputs = _read(args, launch.size)
    traced = traced_steps(args.trace, inputs.plan.total_steps)
    extends = args.more_epochs is not None
    words = {"command": "train", "trace": args.trace, "more_epochs": extends, "from": args.from_step}
    with open_rank(launch, inputs, **words) as rank:
        rank.world.from_first(lambda: _check_still_asked(inputs.extension, args))
        if (origin := inputs.origin) is not None:
            rank.world.from_first(lambda: origin.check(inputs.spec.run_path))
        check_nodes(rank.world, rank.device, inputs.train, inputs.spec.run_path, rank.watchdog)
        run = Run(inputs, rank)
        manifests = [inputs.val.manifest, inputs.train.manifest]
        run.notes += stage_sets(inputs.spec.data.stage, manifests, rank.world, rank.watchdog)
        began = time.monotonic()
        try:
            with begin_log(run) as log:
                train(run, Records(run, log, traced), stop)
            _evaluate(run, stop)
            report = _report(run, stop)
            stop.leave()  # the run is done, and so is its status
            if run.world.rank == 0:
                _finish(inputs.spec, f"done in {duration(time.monotonic() - began)}; report: {report}")
            return Result()
        except Stopped:
            return _stopped(run, stop)
        except AgreedError as error:
            try:
                run.writer.wait()  # for a checkpoint that is being written: the others wait for this rank
            except RunFailed as failure:
                raise AgreedError(f"{error}; {failure}") from error
            raise
        except UserError as error:
            # The input was checked before training: a file that has disappeared since is not a mistake in it.
            raise RunFailed(*error.args) from error


def _read(args: argparse.Namespace, ranks: int) -> Inputs:
    if args.from_step is not None:
        if args.more_epochs is not None:
            raise UserError("--from must be used without --more-epochs; try schedule.epochs=N")
        if not Path(args.spec).is_dir():
            raise UserError(f"--from must be used with a run folder, got {args.spec}; try runs/NAME")
        source = run_spec(args.spec)
        begin = [f"run_dir={source.run_dir}", f"name={source.name}-from-{args.from_step}"]
        spec = load_spec(Path(args.spec) / "spec.yaml", [*begin, *args.overrides])
        if spec.run_path.absolute() == source.run_path.absolute():
            raise UserError(f"--from must be used with another name, got {spec.name}; try name=OTHER")
        origin = Origin.asked(args.spec, source.run_path, args.from_step, spec.run_path)
        return read_inputs(spec, ranks, origin=origin)
    if args.more_epochs is None:
        return read_inputs(run_spec(args.spec, args.overrides), ranks)
    extension = Extension.asked(args.spec, args.more_epochs)
    overrides = [*args.overrides, f"schedule.epochs={extension.after}"]
    return read_inputs(run_spec(args.spec, overrides), ranks, extension)


def _check_still_asked(extension: Extension | None, args: argparse.Namespace) -> None:
    """Raise UserError unless `--more-epochs` asks for the same under the run's lock as it did before."""
    if extension is not None and (now := Extension.asked(args.spec, args.more_epochs)) != extension:
        length = f"the run went from {extension.before} to {now.before} epochs while this command started"
        raise UserError(f"--more-epochs {args.more_epochs}: {length}; run the command again")


def _evaluate(run: Run, stop: StopRequest) -> None:
    """Evaluate the last checkpoints; reuse the scores of an evaluation that was stopped."""
    spec = run.spec
    world = run.world

    def last() -> tuple[list[str], list[str], dict[str, Any], str]:
        run.writer.wait()
        paths = epoch_checkpoints(spec, run.plan.steps_per_epoch)
        kept, left_out = current_line(_still_there(spec, paths)[-spec.evaluate.last_checkpoints :])
        key = scores_digest(spec, {"train": run.train_set, "val": run.val_set}, run.model)
        return list(map(str, kept)), left_out, goodput_values(spec.run_path), key

    paths, left_out, goodput, key = world.from_first(last)
    if world.rank == 0:
        tell(*(f"left out of the mean: {line}" for line in left_out))
    scorer = build_scorer(spec, run.val_set, world, run.device, stop)
    training = (run.plan, run.train_set) if spec.evaluate.precise_bn else None
    folder = spec.run_path
    measures = run.measures
    evaluation = Evaluation(scorer, run.watchdog, folder, measures, training, resume_key=key, goodput=goodput)
    say(*accuracy_result(evaluation, evaluation.score_checkpoints(run.model, [Path(path) for path in paths])).text)


def _report(run: Run, stop: StopRequest) -> Path:
    """Write the report on rank 0; return its path. Collective. Raises Stopped on request."""

    def write() -> str | None:
        # Imported here: matplotlib takes longer to import than this whole package, and only rank 0 needs it.
        from summit_train.report.page import write_report

        try:
            with stop.interrupting():
                return str(write_report([run.spec.run_path], run.spec.run_path / "report.html"))
        except Stopped:
            return None

    leave_if_asked(run.world, stop)
    path = run.world.from_first(write)
    if path is None:
        raise Stopped
    return Path(path)


def _finish(spec: Spec, line: str) -> None:
    """Leave nothing half done in the folder of a run that is done, and say so. On rank 0."""
    for partial in (spec.run_path / PREDICTIONS).glob("*.partial"):
        partial.unlink(missing_ok=True)
    if (mark := spec.run_path / "job/done").parent.is_dir():
        with suppress(OSError):  # a full disk: the script writes it, too
            mark.touch()  # for the job script: a signal from here on does not make the job fail
    say(f"{spec.name}: {line}")
    record_end(spec.run_path)
    if (last := Extension.read(spec.run_path)) is not None:
        replace(last, is_done=True).write(spec.run_path)  # from here on the command adds epochs again


def _stopped(run: Run, stop: StopRequest) -> Result:
    spec = run.spec
    stop.leave()

    def record() -> None:
        run.writer.wait()
        paths = find_checkpoints(spec.run_path)
        origin = Origin.read(spec.run_path)
        if not paths and origin is not None and Path(origin.checkpoint).exists():
            paths = [Path(origin.checkpoint)]  # before its first own one
        last = _still_there(spec, paths)[-1]
        # For the job script: a launcher that ends all ranks at the first one that leaves may hide their status.
        write_text(spec.run_path / "stopped", f"{last}\n")
        by = stop.signal or "a signal to another rank"
        line = f"stopped by {by}; resumes from {last} when started again"
        say(line)
        leave_reason(line, 85)

    run.world.from_first(record)  # no rank leaves before that is written
    return Result(status=85)


def _still_there(spec: Spec, paths: list[Path]) -> list[Path]:
    """Return the checkpoints of a run that has saved some. Raises RunFailed where there is none."""
    if not paths:
        gone = "its checkpoints are gone: they were removed while this run was using the directory"
        raise RunFailed(f"{spec.run_path}: {gone}")
    return paths
