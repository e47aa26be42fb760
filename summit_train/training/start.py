"""Start a run: join the ranks, lock the run folder, and write its spec, plan and environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from summit_train.core.comm.launch import Launch
from summit_train.core.device import choose_device, environment
from summit_train.core.files import read_file, write_json, write_text
from summit_train.core.machine import warn_untested
from summit_train.core.processes import seconds_alive
from summit_train.core.result import warn
from summit_train.core.run_folder import RunLock, remove_half_written, script_began, wait_for_lock
from summit_train.core.run_log import MoreEpochsRecord, StartRecord
from summit_train.core.session import session
from summit_train.core.text import from_json
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import leaks
from summit_train.data.manifest.overlap import class_warnings
from summit_train.evaluation.evaluation import EVALS, RESULT_FILE
from summit_train.evaluation.scores import PREDICTIONS
from summit_train.models.network import cpu_kernels, initial_network
from summit_train.spec import dump_spec
from summit_train.training.agreement import check_agreement
from summit_train.training.inputs import Inputs
from summit_train.training.metrics import RunLog
from summit_train.training.run import Rank, Run
from summit_train.training.state import EXTENSION_FILE, Extension


@contextmanager
def open_rank(launch: Launch, inputs: Inputs, **arguments: object) -> Iterator[Rank]:
    """Join the ranks, check that their inputs agree, and hold the run folder's lock during the block. Collective.

    arguments: the command's, which must be the same on all ranks.
    """
    spec = inputs.spec
    with (
        session(launch) as world,
        Watchdog(world, world.broadcast(spec.watch.stall_seconds)) as watchdog,
        ExitStack() as held,
    ):
        arguments["schedule.decay (digest of its LRs)"] = inputs.plan.schedule.check()
        if world.rank == 0:
            warn_untested(torch.__version__)
        device = choose_device(world)
        network = world.together(lambda: initial_network(spec, device))
        check_agreement(world, spec, inputs.datasets, network, **arguments)
        if world.rank == 0:
            wait_for_lock(spec.run_path, lambda: watchdog.at("waiting for the lock of a lost rank"))
        world.wait(lambda: watchdog.at("waiting for rank 0's lock of the run folder", waits=True))
        lock = world.together(lambda: None if world.rank else held.enter_context(RunLock(spec.run_path)))
        world.from_first(lambda: remove_half_written(spec.run_path))
        yield Rank(world, device, network, watchdog, lock)


@contextmanager
def begin_log(run: Run) -> Iterator[RunLog | None]:
    """Write the run's spec, plan and environment, and open its log, on rank 0; yield None on the others. Collective.

    An extension of the run is written before anything that it changes.
    """
    world = run.world
    nodes = world.gather((world.host, cpu_kernels(run.device)))
    if nodes is None:
        yield None
        return
    spec = run.spec
    folder = spec.run_path
    (folder / "stopped").unlink(missing_ok=True)
    extension = _begin_extension(run)
    if run.origin is not None:
        run.origin.write(folder)
    write_text(folder / "spec.yaml", dump_spec(spec))
    _write_plan(run)
    _write_environment(run, dict(nodes), [host for host, _ in nodes])
    with RunLog(folder, spec.name, run.start_step, run.plan.total_steps) as log:
        if extension is not None and run.start_step == run.decisions.line:
            log.write(MoreEpochsRecord(before=extension.before, after=extension.after, step=run.start_step))
        since = seconds_alive()
        log.write(StartRecord(step=run.start_step, ranks=world.size, startup_s=since, job=script_began()))
        for note in run.notes:
            log.say(note)
        yield log


def _begin_extension(run: Run) -> Extension | None:
    """Write what --more-epochs asks for; return it or, without that, the extension that the run already has."""
    folder = run.spec.run_path
    wanted = run.inputs.extension
    former = Extension.read(folder)
    if wanted is None:
        if run.start_step == 0:  # the former one is of a run whose checkpoints were moved away
            (folder / EXTENSION_FILE).unlink(missing_ok=True)
            return None
        return former
    if wanted == former:
        change = f"{wanted.before} to {wanted.after} epochs"
        run.notes.append(f"more epochs: finishes the extension from {change}, which an earlier start began")
    wanted.write(folder)
    _keep_result(folder, wanted.before, wanted.before * run.plan.steps_per_epoch)
    return wanted


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


def _write_plan(run: Run) -> None:
    """Write plan.json, and warn of classes without clips and of clips in both lists."""
    train = run.train_set.manifest
    val = run.val_set.manifest
    leaked = leaks(run.train_set, run.val_set)
    for warning in (*class_warnings(train, val), *leaked.warnings(val)):
        warn(warning)
    counts = {"train": train.clips_per_class, "val": val.clips_per_class}
    values = run.plan.values() | {"clips_per_class": counts, "val_fingerprint": val.fingerprint(), **leaked.values()}
    write_json(run.spec.run_path / "plan.json", values)


def _write_environment(run: Run, kernels: dict[str, str], hosts: list[str]) -> None:
    """Write environment.json; warn of nodes with other kernels than rank 0's. kernels: by host. hosts: every rank's."""
    first = kernels[run.world.host]
    machine = environment(run.world, run.device, hosts, first) | {"network": run.model.execution}
    others = {host: level for host, level in kernels.items() if level != first}
    if others:
        machine["other_kernels"] = others
        host, other = next(iter(others.items()))
        warn(f"C++ kernels: rank 0 has {first}, but {host} has {other}; all ranks wait for the slowest")
    write_json(run.spec.run_path / "environment.json", machine)
