"""One rank of bench/exchange.py: KIND SPEC STEPS WARM_UP [key=value ...]. Rank 0 prints a JSON object.

It also runs with the package of commit b4c1848, which has some modules elsewhere.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from summit_train.data.batches.loader import MicroBatch
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.training.run import build_step, fresh_model
from summit_train.training.stopwatch import Recorder

CPU = torch.device("cpu")


def main(kind: str, spec_path: str, steps: int, warm_up: int, overrides: Sequence[str]) -> None:
    """Print the slowest rank's seconds and the largest one's memory."""
    is_old = importlib.util.find_spec("summit_train.core") is None
    comm: Any = importlib.import_module("summit_train.comm" if is_old else "summit_train.core.comm")
    world = comm.HorovodWorld() if kind in ("horovod", "before") else comm.open_world()
    start: Any = importlib.import_module(f"summit_train.{'commands' if is_old else 'training'}.start")
    start.choose_device(world)  # sets the memory that a process keeps, as `train` does
    spec = load_spec(spec_path, overrides)
    plan = make_plan(spec, world.size, world.size * spec.scale.clips_per_gpu)
    model, recorder = fresh_model(spec, CPU), Recorder(CPU)
    step: Any
    if kind == "ddp loop":
        step = DdpLoop(spec, model, recorder)
    else:
        step = OwnStep(spec, plan, world, model, recorder, ddp=kind == "ddp")
    batches, cpu_s = [random_batch(spec, world.rank)], 0.0
    for number in range(warm_up + steps):
        if number == warm_up:
            recorder.read()
        world.barrier()
        recorder.begin_step()
        began = time.process_time()
        step(batches)
        recorder.lap("other")
        cpu_s += 0.0 if number < warm_up else (time.process_time() - began) / steps
    laps = recorder.read()
    phases = {phase: fmean(lap[phase] for lap in laps) for phase in laps[0]}
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    ranks = world.gather((phases, cpu_s, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    if ranks is not None:
        slowest = max((seconds for seconds, *_ in ranks), key=lambda seconds: sum(seconds.values()))
        values = {"step": sum(slowest.values()), "waits": slowest["allreduce"], "phases": slowest}
        values |= {"cpu": fmean(cpu for _, cpu, _ in ranks), "peak_bytes": max(peak for *_, peak in ranks)}
        values |= {"gradient_norm": norm, "messages": step.messages(), "bytes": plan.gradient_bytes}
        print(json.dumps(values), flush=True)
    # DistributedDataParallel holds the group of ranks, whose threads must end before Python does.
    del step, model
    gc.collect()
    world.close()


def random_batch(spec: Spec, rank: int) -> MicroBatch:
    """Return random clips for a rank's virtual GPU."""
    generator, clips = torch.Generator().manual_seed(rank), spec.scale.clips_per_gpu
    shape = (clips, *spec.data.input.clip_shape(spec.data.num_frames, spec.data.crop))
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
    return MicroBatch(0, rank, frames, labels, torch.arange(clips))


class OwnStep:
    """The step of `train`, with the exchange of its package or with DistributedDataParallel's."""

    def __init__(self, spec: Spec, plan: Any, world: Any, model: Any, recorder: Recorder, *, ddp: bool) -> None:
        if ddp:
            importlib.import_module("summit_train.training.step").Exchange = NoExchange  # type: ignore[attr-defined]
        self.step: Any = build_step(spec, plan, world, model, CPU)
        self.parameters, self.ddp, self.lap = list(model.parameters()), None, recorder.lap
        if ddp:
            self.step.model = self.ddp = wrapped(model, recorder, sync_statistics=False)
            self.lap = partial(ddp_lap, recorder)

    def __call__(self, batches: Sequence[Any]) -> None:
        here = "end_phase" in inspect.signature(type(self.step).__call__).parameters
        self.step(batches, 0.0, **{"end_phase" if here else "lap": self.lap})

    def messages(self) -> int:
        """Return the number of buckets; before there were any, that of gradients, which Horovod packed."""
        if self.ddp is not None:
            return buckets(self.ddp)
        exchange = getattr(self.step, "_exchange", None)
        return len(self.parameters if exchange is None else exchange.buckets)


class NoExchange:
    """What a step has for its exchange where DistributedDataParallel averages within the backward pass."""

    def __init__(self, parameters: Iterable[nn.Parameter], *_: object) -> None:
        self.parameters = list(parameters)

    def begin_step(self) -> None:
        """Forget the gradients, as `zero_grad` does."""
        for parameter in self.parameters:
            parameter.grad = None

    def begin_last_pass(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class DdpLoop:
    """DistributedDataParallel in the loop that its pages show."""

    def __init__(self, spec: Spec, model: Any, recorder: Recorder) -> None:
        from summit_train.models.precision import Normalise, parameter_type
        from summit_train.optim.sgd import parameter_groups
        from summit_train.optim.solvers import build_solver

        self.spec, self.recorder, self.dtype = spec, recorder, parameter_type(spec.precision)
        self.prepare = Normalise(self.dtype, CPU)
        self.optimizer = build_solver(spec.optimizer, parameter_groups(model, spec.optimizer.weight_decay, {}))
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.ddp = wrapped(model, recorder, sync_statistics=True)

    def __call__(self, batches: Sequence[Any]) -> None:
        from summit_train.models.precision import mixed_precision

        (batch,) = batches
        self.optimizer.zero_grad()
        clips = self.prepare(batch.clips)
        self.recorder.lap("other")
        with mixed_precision(self.spec.precision, CPU):
            logits = self.ddp(clips)
        smoothing = self.spec.loss.label_smoothing
        loss = functional.cross_entropy(logits.to(self.dtype), batch.labels, label_smoothing=smoothing)
        self.recorder.lap("forward")
        torch.autograd.backward(loss)
        ddp_lap(self.recorder, "backward")
        self.optimizer.step()
        self.recorder.lap("update")

    def messages(self) -> int:
        """Return the number of buckets."""
        return buckets(self.ddp)


def wrapped(model: Any, recorder: Recorder, *, sync_statistics: bool) -> Any:
    """Return the model in DistributedDataParallel. sync_statistics: rank 0's BN statistics go to all ranks.

    The backward pass comes to the first layer last. What it takes from there on is the wait for the other ranks.
    """
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: recorder.lap("backward"))
    ddp: Any = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=sync_statistics)
    ddp.reseed = model.reseed
    return ddp


def ddp_lap(recorder: Recorder, phase: str) -> None:
    """End a phase; DistributedDataParallel's backward pass ends with the wait for the other ranks."""
    recorder.lap("allreduce" if phase == "backward" else phase)


def buckets(ddp: Any) -> int:
    """Return the number of messages, as it is once the order of the gradients is known."""
    return len(str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
