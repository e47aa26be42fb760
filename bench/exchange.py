"""What the exchange of gradients costs: ours, the one before it, and torch's DistributedDataParallel, in turn.

    OMP_NUM_THREADS=1 python bench/exchange.py --before OLD     two ranks of this machine, fp32 and bf16
    python bench/exchange.py --rounds 3 --json data.crop=64     keys of the spec to override; one JSON object

OLD is a worktree of commit b4c1848, the last one with hvd.DistributedOptimizer: one message a gradient, which Horovod
packs. Horovod reads its settings once, so each measurement has its own processes: every round starts the ranks of each
exchange, which warm up and time some steps. All have the same weights, clips, loss and solver:

horovod, torch   our step; its exchange over Horovod, over torch.distributed (gloo)
before           our step as OLD has it
ddp              our step, with DistributedDataParallel in place of the exchange
ddp loop         the plain loop that DistributedDataParallel is made for: no vote, no gradient norm, and rank 0's BN
                 statistics in place of their mean
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from summit_train.bench.commands.arguments import experiment_of
from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.bench.steps import Experiment, mean_phases, peak_memory, random_batches
from summit_train.core.comm import World, open_world
from summit_train.core.processes import answer, find_mpirun, mpi_environment, mpirun_command
from summit_train.core.text import table
from summit_train.data.batches.loader import MicroBatch
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.optim.sgd import parameter_groups, set_learning_rate
from summit_train.optim.solvers import build_solver
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec
from summit_train.training.environment import environment
from summit_train.training.run import build_step, fresh_model
from summit_train.training.start import choose_device
from summit_train.training.stopwatch import Recorder

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("horovod", "before", "torch", "ddp", "ddp loop")
PAIRS = (
    ("horovod", "before"),
    ("torch", "before"),
    ("torch", "ddp"),
    ("torch", "ddp loop"),
    ("horovod", "ddp"),
    ("horovod", "ddp loop"),
    ("torch", "horovod"),
)
PARTS = {"step": ".3f", "waits": ".3f", "cpu": ".3f", "peak_bytes": ".4g"}  # as they are printed
RATIOS = ("step", "cpu", "peak_bytes")
PATIENCE_S = 600.0
Measured = dict[str, Any]


def main() -> int:
    """Measure and print; or measure as one rank of an exchange."""
    args = arguments()
    if args.as_rank is not None:
        return rank(args)
    # Not before the ranks have left: what this process would ask of torch keeps threads of a core that they use.
    results = {precision: measure(precision, args) for precision in args.precision}
    here = environment(World(), torch.device("cpu"), [World().host])
    values = {"environment": here, "settings": vars(args), "results": results}
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the spec")
    parser.add_argument("--spec", default=str(ROOT / "configs" / "kinetics" / "tsm_r50_8f.yaml"))
    parser.add_argument("--batch", type=int, default=2, help="clips of a rank [2]")
    parser.add_argument("--size", type=int, default=112, help="side of a frame [112]")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--before", metavar="OLD", help="worktree of the exchange before; without it, that is left out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="exchanges to measure [all]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each exchange [9]")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a measurement [6]")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them [4]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--as-rank", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(precision: str, args: argparse.Namespace) -> Measured:
    """Measure every exchange once a round; return each one's measurements, their spreads, and the ratios of PAIRS."""
    kinds = [kind for kind in KINDS if kind in args.kinds and (kind != "before" or args.before is not None)]
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for kind, measured in in_turn({kind: partial(on_ranks, kind, precision, args) for kind in kinds}, args.rounds):
        found[kind].append(measured)
        load = os.getloadavg()[0]
        said = ", ".join(f"{part} {measured[part]:{form}}" for part, form in PARTS.items())
        print(f"{precision} {kind}: {said}; load {load:.1f}", file=sys.stderr, flush=True)
    check_same(found)
    return {
        "exchanges": {
            kind: {"messages": rounds[0]["messages"], "bytes": rounds[0]["bytes"]}
            | {part: spread([measured[part] for measured in rounds]) for part in PARTS}
            for kind, rounds in found.items()
        },
        "ratios": {
            f"{a} / {b}": {
                part: spread(pair_ratios(*([measured[part] for measured in found[kind]] for kind in (a, b))))
                for part in RATIOS
            }
            for a, b in PAIRS
            if a in kinds and b in kinds
        },
        "rounds": found,
    }


def check_same(found: dict[str, list[Measured]]) -> None:
    """End unless all exchanges left the same gradient: what is faster must not be other work."""
    norms = {kind: rounds[0]["gradient_norm"] for kind, rounds in found.items()}
    first = next(iter(norms.values()))
    if not all(math.isclose(norm, first, rel_tol=1e-3) for norm in norms.values()):
        sys.exit(f"the exchanges must leave the same gradient, got norms of {norms}")


def on_ranks(kind: str, precision: str, args: argparse.Namespace) -> Measured:
    """Start the ranks of one exchange; return what rank 0 prints."""
    mpirun = find_mpirun()
    if mpirun is None:
        sys.exit("mpirun must be installed; `make setup` installs it")
    own = {"SUMMIT_TRAIN_COMM": "horovod" if kind in ("horovod", "before") else "torch"}
    own["PYTHONPATH"] = str(Path(args.before).resolve() if kind == "before" else ROOT)
    keys = ["scale.gpus=null", f"scale.clips_per_gpu={args.batch}", f"data.crop={args.size}", f"precision={precision}"]
    words = [__file__, "--as-rank", kind, "--spec", args.spec, "--steps", str(args.steps), "--warm-up"]
    command = [*mpirun_command(mpirun, args.ranks), sys.executable, *words, str(args.warm_up), *keys, *args.overrides]
    return answer(command, PATIENCE_S, mpi_environment(os.environ) | own)


def rank(args: argparse.Namespace) -> int:
    """Measure as one rank; rank 0 prints the slowest rank's seconds and the largest one's memory."""
    by_horovod = args.as_rank in ("horovod", "before")  # by its class, as OLD's open_world takes another argument
    world = importlib.import_module("summit_train.core.comm").HorovodWorld() if by_horovod else open_world()
    device = choose_device(world)
    experiment = experiment_of(load_spec(args.spec, args.overrides), world.size, synthetic=True)
    model, recorder = fresh_model(experiment.spec, device), Recorder(device)
    step: Any
    if args.as_rank.startswith("ddp"):
        step = DdpStep(experiment, world, model, recorder, plain=args.as_rank == "ddp loop")
    else:
        step = OwnStep(experiment, world, model, recorder)
    batches, cpu_s = random_batches(experiment.spec, experiment.plan, world), 0.0
    for number in range(args.warm_up + args.steps):
        if number == args.warm_up:
            recorder.read()
        world.barrier()
        recorder.begin_step()
        began = time.process_time()
        step(batches)
        recorder.lap("other")
        cpu_s += 0.0 if number < args.warm_up else (time.process_time() - began) / args.steps
    phases = mean_phases(recorder.read())
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    ranks = world.gather((phases, cpu_s, peak_memory(device)))
    if ranks is not None:
        slowest = max((seconds for seconds, *_ in ranks), key=lambda seconds: sum(seconds.values()))
        values = {"step": sum(slowest.values()), "waits": slowest["allreduce"], "phases": slowest}
        values |= {"cpu": fmean(cpu for _, cpu, _ in ranks), "peak_bytes": max(peak for *_, peak in ranks)}
        values |= {"gradient_norm": norm}
        values |= {"messages": step.messages(), "bytes": experiment.plan.gradient_bytes}
        print(json.dumps(values), flush=True)
    # DistributedDataParallel holds the group of ranks, whose threads must end before Python does.
    del step, model
    gc.collect()
    world.close()
    return 0


class OwnStep:
    """The step of `train`, with the exchange that it has in this package."""

    def __init__(self, experiment: Experiment, world: World, model: Any, recorder: Recorder) -> None:
        self._step: Any = build_step(experiment.spec, experiment.plan, world, model, torch.device("cpu"))
        self._recorder, self._gradients = recorder, sum(1 for _ in model.parameters())

    def __call__(self, batches: Sequence[MicroBatch]) -> None:
        self._step(batches, 0.0, end_phase=self._recorder.lap)

    def messages(self) -> int:
        """Return the number of buckets; before there were any, that of gradients, which Horovod packed."""
        return len(self._step._exchange.buckets) if hasattr(self._step, "_exchange") else self._gradients


class NoExchange:
    """What a step has for its exchange where DistributedDataParallel averages within the backward pass."""

    def __init__(self, parameters: Iterable[nn.Parameter], *_: object) -> None:
        self._parameters = list(parameters)

    def begin_step(self) -> None:
        """Forget the gradients, as `zero_grad` does."""
        for parameter in self._parameters:
            parameter.grad = None

    def begin_last_pass(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class DdpStep:
    """DistributedDataParallel: in the step of `train`, or (plain) in the loop that its pages show."""

    def __init__(self, experiment: Experiment, world: World, model: Any, recorder: Recorder, *, plain: bool) -> None:
        self._spec, self._model, self._recorder = experiment.spec, model, recorder
        # The backward pass comes to the first layer last. What it takes from there on is the wait for the other ranks.
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: recorder.lap("backward"))
        solver = self._spec.optimizer
        self._dtype = parameter_type(self._spec.precision)
        self._prepare = Normalise(self._dtype, torch.device("cpu"))
        self._step: Any = None
        if plain:
            self._optimizer = build_solver(solver, parameter_groups(model, solver.weight_decay, {}))
        else:
            vars(importlib.import_module("summit_train.training.step"))["Exchange"] = NoExchange
            self._step = build_step(experiment.spec, experiment.plan, world, model, torch.device("cpu"))
        # In the loop, rank 0's statistics of BN go to all before each forward pass; our step averages them itself.
        self._ddp: Any = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=plain)
        self._ddp.reseed = model.reseed
        if not plain:
            self._step.model = self._ddp

    def __call__(self, batches: Sequence[MicroBatch]) -> None:
        if self._step is None:
            self._loop(*batches)
        else:
            self._step(batches, 0.0, end_phase=self._lap)

    def messages(self) -> int:
        """Return the number of buckets, as they are once the order of the gradients is known."""
        return len(str(self._ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))

    def _lap(self, phase: str) -> None:
        self._recorder.lap("allreduce" if phase == "backward" else phase)

    def _loop(self, batch: MicroBatch) -> None:
        self._optimizer.zero_grad()
        clips = self._prepare(batch.clips)
        self._lap("other")
        with mixed_precision(self._spec.precision, torch.device("cpu")):
            logits = self._ddp(clips)
        smoothing = self._spec.loss.label_smoothing
        loss = functional.cross_entropy(logits.to(self._dtype), batch.labels, label_smoothing=smoothing)
        self._lap("forward")
        torch.autograd.backward(loss)
        self._lap("backward")
        set_learning_rate(self._optimizer, 0.0)
        self._optimizer.step()
        self._lap("update")


def as_text(values: dict[str, Any]) -> str:
    """Write seconds, messages, memory and ratios for people."""
    settings = values["settings"]
    clips = f"{settings['ranks']} ranks of {settings['batch']} clips, {settings['size']}^2"
    rounds = f"median (min .. max) of {settings['rounds']} rounds of {settings['steps']} steps"
    lines = [f"machine: {machine_text(values['environment'])}", f"{settings['spec']}: {clips}; {rounds}"]
    for precision, result in values["results"].items():
        rows = [("", "step, s", "of it waits, s", "of a core, s", "peak memory of a rank, B", "messages", "MB")]
        for kind, found in result["exchanges"].items():
            spreads = [spread_text(found[part], form) for part, form in PARTS.items()]
            rows.append((kind, *spreads, f"{found['messages']}", f"{found['bytes'] / 1e6:.1f}"))
        ratios = [("", "step", "of a core", "peak memory")]
        ratios += [(pair, *(spread_text(found[part]) for part in RATIOS)) for pair, found in result["ratios"].items()]
        lines.append(f"\n{precision}:\n{table(rows)}\n\n{table(ratios)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
