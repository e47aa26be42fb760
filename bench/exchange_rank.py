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
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from summit_train.data.batches.loader import MicroBatch
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.training.run import build_step, fresh_model
from summit_train.training.stopwatch import Recorder

CPU = torch.device("cpu")


class NoExchange:
    """The exchange of a step whose gradients DistributedDataParallel averages within the backward pass."""

    def __init__(self, parameters: Iterable[nn.Parameter], *_: object) -> None:
        self.parameters = list(parameters)

    def begin_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def begin_last_pass(self) -> None: ...

    def finish(self) -> None: ...


def main(kind: str, spec_path: str, steps: int, warm_up: int, overrides: Sequence[str]) -> None:
    """Print the slowest rank's seconds and the largest one's memory."""
    is_old = importlib.util.find_spec("summit_train.commands") is not None  # the installed package may lend it a core
    comm: Any = importlib.import_module("summit_train.comm" if is_old else "summit_train.core.comm")
    world = comm.open_world() if kind in ("torch", "ddp") else comm.HorovodWorld()
    start: Any = importlib.import_module(f"summit_train.{'commands' if is_old else 'training'}.start")
    start.choose_device(world)  # sets the memory that a process keeps, as `train` does
    if kind == "ddp":
        importlib.import_module("summit_train.training.step").Exchange = NoExchange  # type: ignore[attr-defined]
    spec = load_spec(spec_path, overrides)
    plan = make_plan(spec, world.size, world.size * spec.scale.clips_per_gpu)
    model, recorder = fresh_model(spec, CPU), Recorder(CPU)
    step: Any = build_step(spec, plan, world, model, CPU)
    if kind == "ddp":
        # The backward pass comes to the first layer last. What it takes from there on is the wait for the other ranks.
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: recorder.lap("backward"))
        step.model = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        step.model.reseed = model.reseed

    def lap(phase: str) -> None:
        recorder.lap("allreduce" if kind == "ddp" and phase == "backward" else phase)

    keyword = "end_phase" if "end_phase" in inspect.signature(type(step).__call__).parameters else "lap"
    generator, clips = torch.Generator().manual_seed(world.rank), spec.scale.clips_per_gpu
    shape = (clips, *spec.data.input.clip_shape(spec.data.num_frames, spec.data.crop))
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
    batches, cpu_s = [MicroBatch(0, world.rank, frames, labels, torch.arange(clips))], 0.0
    for number in range(warm_up + steps):
        if number == warm_up:
            recorder.read()
        world.barrier()
        recorder.begin_step()
        began = time.process_time()
        step(batches, 0.0, **{keyword: lap})
        recorder.lap("other")
        cpu_s += 0.0 if number < warm_up else (time.process_time() - began) / steps
    laps = recorder.read()
    phases = {phase: fmean(lap[phase] for lap in laps) for phase in laps[0]}
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    # Before there were buckets, each gradient was a message, which Horovod packed.
    messages = len(getattr(getattr(step, "_exchange", None), "buckets", list(model.parameters())))
    if kind == "ddp":
        messages = len(str(step.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))
    ranks = world.gather((phases, cpu_s, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    if ranks is not None:
        slowest = max((seconds for seconds, *_ in ranks), key=lambda seconds: sum(seconds.values()))
        values = {"step": sum(slowest.values()), "waits": slowest["allreduce"], "phases": slowest}
        values |= {"cpu": fmean(cpu for _, cpu, _ in ranks), "peak_bytes": max(peak for *_, peak in ranks)}
        values |= {"gradient_norm": norm, "messages": messages, "bytes": plan.gradient_bytes}
        print(json.dumps(values), flush=True)
    # DistributedDataParallel holds the group of ranks, whose threads must end before Python does.
    del step, model
    gc.collect()
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
