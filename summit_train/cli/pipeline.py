"""Train, evaluate and report a run on the ranks of this launch."""

from __future__ import annotations

import argparse
import hashlib
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from summit_train.cli.evaluate import accuracy_result
from summit_train.cluster.node_check import check_nodes
from summit_train.core.bad_nodes import script_began
from summit_train.core.checkpoints import find_checkpoints, remove_half_written
from summit_train.core.comm.launch import this_launch
from summit_train.core.device import choose_device, environment
from summit_train.core.errors import AgreedError, RunFailed, UserError
from summit_train.core.files import read_file, write_json, write_text
from summit_train.core.processes import seconds_alive
from summit_train.core.result import Result, say, tell, warn
from summit_train.core.run_lock import RunLock, wait_for_lock
from summit_train.core.session import leave_reason, session
from summit_train.core.tested import warn_untested
from summit_train.core.text import duration, from_json
from summit_train.core.watch import Stopped, StopRequest, Watchdog, leave_if_asked
from summit_train.data.dataset import leaks
from summit_train.data.manifest.overlap import class_warnings
from summit_train.data.packed.stage import stage_sets
from summit_train.evaluation.evaluation import EVALS, RESULT_FILE, Evaluation, build_scorer
from summit_train.evaluation.scores import PREDICTIONS
from summit_train.models.network import cpu_kernels, initial_network
from summit_train.report.goodput import goodput_values
from summit_train.spec import Spec, changes_scores, dump_spec, run_spec
from summit_train.training.agreement import check_agreement, identity
from summit_train.training.checkpoint import current_line, epoch_checkpoints
from summit_train.training.loop import train
from summit_train.training.metrics import RunLog, record_end
from summit_train.training.records import Records
from summit_train.training.run import Run, check_room, read_inputs
from summit_train.training.state import EXTENSION_FILE, Extension
from summit_train.training.trace import traced_steps


def run_pipeline(args: argparse.Namespace, stop: StopRequest) -> Result:
    """Train, evaluate and report a spec, with the arguments of `train`. The status is 85 if it was asked to stop."""
    launch = this_launch()
    extension = None if args.more_epochs is None else Extension.asked(args.spec, args.more_epochs)
    longer = [] if extension is None else [f"schedule.epochs={extension.after}"]
    inputs = read_inputs(run_spec(args.spec, [*args.overrides, *longer]), launch.size)
    traced = traced_steps(args.trace, inputs.plan.total_steps)
    with (
        session(launch) as world,
        Watchdog(world, world.broadcast(inputs.spec.watch.stall_seconds)) as watchdog,
        ExitStack() as held,
    ):
        arguments = {"command": "train", "trace": args.trace, "more_epochs": args.more_epochs is not None}
        arguments["schedule.decay (digest of its LRs)"] = inputs.plan.schedule.check()
        if world.rank == 0:
            warn_untested(torch.__version__)
        world.together(lambda: check_room(inputs.spec, world.local_size))
        device = choose_device(world)
        network = world.together(lambda: initial_network(inputs.spec, device))
        check_agreement(world, inputs.spec, inputs.datasets, network, **arguments)
        if world.rank == 0:
            wait_for_lock(inputs.spec.run_path, lambda: watchdog.at("waiting for the lock of a lost rank"))
        world.wait(lambda: watchdog.at("waiting for rank 0's lock of the run folder", waits=True))
        lock = world.together(lambda: None if world.rank else held.enter_context(RunLock(inputs.spec.run_path)))
        world.from_first(lambda: remove_half_written(inputs.spec.run_path))
        if extension is not None:
            world.from_first(lambda: _check_still_asked(extension, args))
        check_nodes(world, device, inputs.train, inputs.spec.run_path, watchdog)
        run = Run(inputs, network, world, device, lock, watchdog, extension=extension)
        manifests = [inputs.val.manifest, inputs.train.manifest]
        run.notes += stage_sets(inputs.spec.data.stage, manifests, world, watchdog)
        try:
            return _run(run, stop, traced, extension)
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


def _check_still_asked(extension: Extension, args: argparse.Namespace) -> None:
    """Raise UserError unless `--more-epochs` asks for the same under the run's lock as it did before."""
    if (now := Extension.asked(args.spec, args.more_epochs)) != extension:
        length = f"the run went from {extension.before} to {now.before} epochs while this command started"
        raise UserError(f"--more-epochs {args.more_epochs}: {length}; run the command again")


def _keep_result(run_path: Path, epochs: int, last_step: int) -> None:
    """Move the run's result after `epochs` epochs, `last_step` updates, to where `eval schedule.epochs=N` writes it."""
    file = run_path / RESULT_FILE
    kept = run_path / EVALS / f"epochs-{epochs}"
    if not file.exists() or (kept / RESULT_FILE).exists():
        return
    result = from_json(read_file(file))
    if result["checkpoints"][-1]["step"] > last_step:
        return  # of the longer run, which was stopped after it
    kept.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        (run_path / PREDICTIONS).rename(kept / PREDICTIONS)
    write_json(kept / RESULT_FILE, result | {"overrides": {"schedule.epochs": epochs}})
    file.unlink()


def _run(run: Run, stop: StopRequest, traced: range, extension: Extension | None) -> Result:
    began = time.monotonic()
    spec = run.spec
    world = run.world
    _train(run, stop, traced, extension)
    _evaluate(run, stop)
    leave_if_asked(world, stop)
    report = world.from_first(lambda: _report(spec, stop))
    if report is None:
        raise Stopped
    stop.leave()  # the run is done, and so is its status
    if world.rank:
        return Result()
    for partial in (spec.run_path / PREDICTIONS).glob("*.partial"):
        partial.unlink(missing_ok=True)
    if (mark := spec.run_path / "job/done").parent.is_dir():
        with suppress(OSError):  # a full disk: the script writes it, too
            mark.touch()  # for the job script: a signal from here on does not make the job fail
    say(f"{spec.name}: done in {duration(time.monotonic() - began)}; report: {report}")
    record_end(spec.run_path)
    if (last := Extension.read(spec.run_path)) is not None:
        replace(last, is_done=True).write(spec.run_path)  # from here on the command adds epochs again
    return Result()


def _evaluate(run: Run, stop: StopRequest) -> None:
    """Evaluate the last checkpoints; reuse the scores of an evaluation that was stopped."""
    spec = run.spec
    world = run.world

    def last() -> tuple[list[Path], list[str], dict[str, Any], str]:
        run.writer.wait()
        paths = epoch_checkpoints(spec, run.plan.steps_per_epoch)
        current = current_line(_still_there(spec, paths)[-spec.evaluate.last_checkpoints :])
        # What scores depend on: another walltime, number of workers or place of the data loses none of them.
        same = identity(spec, {"train": run.train_set, "val": run.val_set}, run.model)
        keys = {key: value for key, value in same.keys.items() if changes_scores(spec, key)}
        key = hashlib.sha256(repr((keys, same.lists, same.code)).encode()).hexdigest()
        return *current, goodput_values(spec.run_path), key

    paths, left_out, goodput, key = world.from_first(last)
    if world.rank == 0:
        tell(*(f"left out of the mean: {line}" for line in left_out))
    scorer = build_scorer(spec, run.val_set, world, run.device, stop)
    training = (run.plan, run.train_set) if spec.evaluate.precise_bn else None
    folder = spec.run_path
    measures = run.measures
    evaluation = Evaluation(scorer, run.watchdog, folder, measures, training, resume_key=key, goodput=goodput)
    say(*accuracy_result(evaluation, evaluation.score_checkpoints(run.model, paths)).text)


def _report(spec: Spec, stop: StopRequest) -> Path | None:
    """Write the report; return None if a request to stop came first."""
    # Imported here: matplotlib takes longer to import than this whole package, and the other ranks do not need it.
    from summit_train.report.page import write_report

    try:
        with stop.interrupting():
            return write_report([spec.run_path], spec.run_path / "report.html")
    except Stopped:
        return None


def _stopped(run: Run, stop: StopRequest) -> Result:
    spec = run.spec
    stop.leave()

    def record() -> None:
        run.writer.wait()
        last = _still_there(spec, find_checkpoints(spec.run_path))[-1]
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


def _train(run: Run, stop: StopRequest, traced: range, extension: Extension | None) -> None:
    """Train; rank 0 writes the run's records, its `extension` before anything that it changes."""
    spec = run.spec
    plan = run.plan
    world = run.world
    places = world.gather((world.host, cpu_kernels(run.device)))
    if world.rank != 0 or places is None:
        train(run, Records(run, None, traced), stop)
        return
    (spec.run_path / "stopped").unlink(missing_ok=True)
    former = Extension.read(spec.run_path)
    if extension is not None:
        if extension == former:
            change = f"{extension.before} to {extension.after} epochs"
            run.notes.append(f"more epochs: finishes the extension from {change}, which an earlier start began")
        extension.write(spec.run_path)
        _keep_result(spec.run_path, extension.before, extension.before * plan.steps_per_epoch)
    elif run.start_step == 0:
        former = None  # of a run whose checkpoints were moved away
        (spec.run_path / EXTENSION_FILE).unlink(missing_ok=True)
    write_text(spec.run_path / "spec.yaml", dump_spec(spec))
    leaked = leaks(run.train_set, run.val_set)
    lists = run.train_set.manifest, run.val_set.manifest
    for line in [*class_warnings(*lists), *leaked.warnings(run.val_set.manifest)]:
        warn(line)
    datasets = {"train": run.train_set, "val": run.val_set}
    counts = {name: dataset.manifest.clips_per_class() for name, dataset in datasets.items()}
    about = {"clips_per_class": counts, "val_fingerprint": run.val_set.manifest.fingerprint(), **leaked.values()}
    write_json(spec.run_path / "plan.json", plan.values() | about)
    kernels = places[0][1]
    machine = environment(world, run.device, [host for host, _ in places], kernels) | {"network": run.model.execution}
    if others := {host: other for host, other in places if other != kernels}:
        machine["other_kernels"] = others
        (host, other), *_ = others.items()
        warn(f"C++ kernels: rank 0 has {kernels}, but {host} has {other}; all ranks wait for the slowest")
    write_json(spec.run_path / "environment.json", machine)
    with RunLog(spec.run_path, spec.name, run.start_step, plan.total_steps) as log:
        begun = extension or former
        if begun is not None and run.start_step == run.decisions.line:
            log.write("more_epochs", **{"from": begun.before, "to": begun.after}, step=run.start_step)
        log.write("start", step=run.start_step, ranks=world.size, startup_s=seconds_alive(), job=script_began())
        for note in run.notes:
            log.say(note)
        train(run, Records(run, log, traced), stop)
