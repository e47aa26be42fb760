"""`summit-train bench step SPEC`: a spec's own training step by part: seconds, clips/s, utilisation, memory.

Step, optimizer and loader are those of `train`. The LR is 0: all is computed, and no weight diverges.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from statistics import fmean

import torch

from summit_train.bench import measure
from summit_train.bench.measure import Values
from summit_train.bench.peak import Peaks, add_peak, measure_peaks, peak_text
from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.device import environment
from summit_train.core.result import TextTable
from summit_train.core.text import counted, share, with_unit
from summit_train.core.watch import Watchdog
from summit_train.core.workers import READ_AHEAD
from summit_train.data.batches.loader import Batches, MicroBatch
from summit_train.data.dataset import Dataset
from summit_train.models.count import count_network
from summit_train.models.network import cpu_kernels, initial_network
from summit_train.plan import Plan, make_plan
from summit_train.report.tables import machine_text
from summit_train.spec import Spec, load_spec
from summit_train.training.build import build_step
from summit_train.training.timer import StepTimer
from summit_train.training.vote import StepResult

Phases = Mapping[str, float]
_NAMES = {"data_wait": "data wait", "allreduce": "exposed allreduce"}


@dataclass(frozen=True)
class Experiment:
    """A spec that is measured, and its plan for these ranks. dataset None: random clips."""

    spec: Spec
    plan: Plan
    dataset: Dataset | None

    def values(self) -> Values:
        sizes = ("ranks", "virtual_gpus", "accumulation", "clips_per_gpu", "global_batch", "gradient_bytes")
        synthetic = self.dataset is None
        data = self.spec.data
        clips = {"clips": None, "workers": 0} if synthetic else {"clips": data.train, "workers": data.num_workers()}
        plan = {name: getattr(self.plan, name) for name in sizes}
        return network_values(self.spec) | plan | {"synthetic": synthetic} | clips


def experiment_of(spec: Spec, ranks: int, *, synthetic: bool) -> Experiment:
    """Read the training manifest and plan for that many ranks; synthetic clips fill one step. Raises UserError."""
    if synthetic:
        return Experiment(spec, make_plan(spec, ranks, (spec.scale.gpus or ranks) * spec.scale.clips_per_gpu), None)
    dataset = Dataset.open(spec, "train")
    return Experiment(spec, make_plan(spec, ranks, len(dataset)), dataset)


def network_values(spec: Spec) -> Values:
    model = spec.model
    frames, height, width, _ = spec.data.clip_shape
    network = {"name": spec.name, "arch": model.arch, "backbone": model.backbone, "precision": spec.precision}
    return network | {"frames": frames, "height": height, "width": width, "crop": height if height == width else None}


class StepBench:
    """An experiment's network, optimizer and batches on this rank. Random clips are the same in every step."""

    def __init__(self, experiment: Experiment, world: World, device: torch.device, watchdog: Watchdog) -> None:
        self._experiment = experiment
        self._world = world
        self._device = device
        self._watchdog = watchdog
        self._spec = experiment.spec
        self._plan = experiment.plan
        self._step = build_step(self._spec, self._plan, world, initial_network(self._spec, device), device)
        self._last: StepResult | None = None
        self._next_step = 0
        self._batches: Batches[MicroBatch] | None = None
        self._random = [] if experiment.dataset is not None else random_batches(self._spec, self._plan, world)

    def repeat(self, steps: int) -> dict[str, float]:
        """Return the seconds of each phase, the mean over `steps` steps. They begin when all ranks are here."""
        self._world.barrier()
        timers = list[StepTimer]()
        for _ in range(steps):
            self._watchdog.at(f"loading clips to measure {self._spec.name}")
            timers.append(timer := StepTimer(self._device))
            self._step.begin(0.0, timer)
            for batch in self._take():
                timer.lap("data_wait")
                self._watchdog.at(f"in a measured step of {self._spec.name}", waits=self._world.size > 1)
                self._step.accumulate(batch)
            result = self._step.update()
            if self._last is not None:  # as the loop does, one step late
                self._read(self._last)
                timer.lap("allreduce")
            self._last = result
            timer.lap("other")
        return mean_phases([timer.seconds() for timer in timers])

    def turn(self, turns: measure.Turns, alone: bool) -> dict[str, float]:
        """Warm up, measure, and close before another bench's turn, whose votes have the same names.

        alone: without another bench only the first turn warms up, and the loader stays.
        """
        if self._last is None or not alone:
            # Until the loader has used up what it read ahead when it opened.
            ahead = 0 if self._experiment.dataset is None else READ_AHEAD * self._spec.data.num_workers()
            self.repeat(max(turns.warm_up, -(-ahead // (self._plan.virtual_gpus // self._plan.ranks))))
        seconds = self.repeat(turns.steps)
        if not alone:
            self.close()
        return seconds

    def close(self) -> None:
        """Read the last step's vote, and end the loader; the next step opens another one."""
        if self._last is not None:
            self._read(self._last)
            self._last = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _read(self, result: StepResult) -> None:
        result.read(self._plan.global_batch, self._plan.virtual_gpus, self._world.size)

    def _take(self) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches of a step, loaded lazily."""
        dataset = self._experiment.dataset
        world = self._world
        batches = iter(self._random)
        if dataset is not None:
            if self._batches is None:
                # More steps than anyone measures; their keys are made one by one.
                steps = range(self._next_step, self._next_step + 10**9)
                self._batches = dataset.training_batches(self._plan.order(), world.rank, world.size, steps)
            batches = self._batches
            self._next_step += 1
        return islice(batches, len(self._plan.virtual_gpus_of(world.rank)))


def random_batches(spec: Spec, plan: Plan, world: World) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, of random bytes."""
    clips = plan.clips_per_gpu
    generator = torch.Generator().manual_seed(world.rank)
    shape = (clips, *spec.data.clip_shape)
    batches = []
    for virtual_gpu in plan.virtual_gpus_of(world.rank):
        frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
        batch = MicroBatch(0, virtual_gpu, frames, labels, torch.arange(clips))
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def mean_phases(steps: Sequence[Phases]) -> dict[str, float]:
    """Return each phase's mean over the steps of one repeat, or over the ranks."""
    return {phase: fmean(step[phase] for step in steps) for phase in steps[0]}


def step_seconds(ranks: Sequence[Sequence[Phases]]) -> dict[str, list[float]]:
    """Return the seconds of each repeat by part: "step", on the slowest rank, and each phase, the mean over the ranks.

    ranks[r][i]: rank r's phases in repeat i.
    """
    repeats = list(zip(*ranks, strict=True))
    means = [mean_phases(repeat) for repeat in repeats]
    step_s = [max(sum(phases.values()) for phases in repeat) for repeat in repeats]
    return {"step": step_s} | {phase: [mean[phase] for mean in means] for phase in means[0]}


def step_values(ranks: Sequence[Sequence[Phases]], plan: Plan, training_work: int, peak: float | None) -> Values:
    """Return seconds by part, clips and multiply-adds a second, and utilisation (mfu).

    training_work: multiply-adds of one clip, forward and backward. peak: of all ranks, in multiply-adds/s; None leaves
    the utilisation out, which is achieved over peak (the paper, section 3 a).
    """
    phases = step_seconds(ranks)
    clips = plan.global_batch
    step_s = phases.pop("step")
    total = sum(sum(seconds) for seconds in phases.values())
    training = clips * training_work
    rates = [training / seconds for seconds in step_s]
    return {
        "step_s": measure.spread(step_s),
        "clips_per_second": measure.spread([clips / seconds for seconds in step_s]),
        "phases_s": {phase: measure.spread(seconds) for phase, seconds in phases.items()},
        "shares": {phase: sum(seconds) / total for phase, seconds in phases.items()},
        "multiply_adds_per_step": training,
        "multiply_adds_per_second": measure.spread(rates),
        "mfu": None if peak is None else measure.spread([rate / peak for rate in rates]),
        "repeats_s": [list(map(dict, rank)) for rank in ranks],
    }


def step_ratios(first: Values, second: Values) -> dict[str, dict[str, float]]:
    """Return first over second, repeat by repeat: the step, and each phase of at least 1 % of both steps."""
    one, other = (step_seconds(values["repeats_s"]) for values in (first, second))
    shown = [name for name in one if name == "step" or min(v["shares"][name] for v in (first, second)) >= 0.01]
    return {name: measure.spread(measure.pair_ratios(one[name], other[name])) for name in shown}


def measure_steps(
    experiments: Sequence[Experiment], turns: measure.Turns, peaks: Peaks, context: measure.Context
) -> Values | None:
    """Measure training steps; several experiments take turns. Return the values on rank 0, None elsewhere."""
    world = context.world
    device = context.device
    repeats: list[list[dict[str, float]]] = [[] for _ in experiments]
    with Watchdog(world, experiments[0].spec.watch.stall_seconds) as watchdog:
        benches = [StepBench(experiment, world, device, watchdog) for experiment in experiments]
        measurements = {i: partial(bench.turn, turns, alone=len(benches) == 1) for i, bench in enumerate(benches)}
        for i, seconds in measure.in_turn(measurements, turns.repeats):
            repeats[i].append(seconds)
            turn = f"turn {len(repeats[i])} of {turns.repeats}"
            context.tell(f"{experiments[i].spec.name}, {turn}: {sum(seconds.values()):.3f} s a step")
        for bench in benches:
            bench.close()
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        ranks = world.gather((repeats, memory, world.host))
    if ranks is None:
        return None
    specs = []
    for i, experiment in enumerate(experiments):
        peak = peaks.get(experiment.spec.precision, {}).get("multiply_adds_per_second")
        work = measure.training_multiply_adds(count_network(experiment.spec))
        measured = step_values([repeats[i] for repeats, _, _ in ranks], experiment.plan, work, peak)
        specs.append(experiment.values() | measured)
    of = "tensors on the GPU" if device.type == "cuda" else "the whole process, Python and torch with it"
    return {
        "environment": environment(world, device, [host for _, _, host in ranks], cpu_kernels(device)),
        "settings": asdict(turns),
        "peak_memory_bytes": max(memory for _, memory, _ in ranks),
        "peak_memory_of": f"{of}, highest of all ranks" + (", all specs at once" if len(specs) > 1 else ""),
        "peaks": list(peaks.values()),
        "specs": specs,
        "ratios": step_ratios(*specs) if len(specs) == 2 else None,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_spec(parser)
    parser.add_argument("--compare", metavar="SPEC2", help="measure both in turn and print SPEC over SPEC2")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    measure.add_turns(parser)
    add_peak(parser)


def run(args: argparse.Namespace) -> Values | None:
    """Measure one spec, or two in turn, on the ranks of this launch. Raises UserError for a wrong spec or option."""
    specs = [load_spec(path, args.overrides) for path in (args.spec, args.compare) if path is not None]
    experiments = [experiment_of(spec, this_launch().size, synthetic=args.synthetic) for spec in specs]
    with measure.open_context() as context:
        peaks = measure_peaks(specs, args.peak, context)
        return measure_steps(experiments, measure.Turns(args.repeats, args.steps, args.warm_up), peaks, context)


def as_text(values: Values) -> str:
    lines = [f"machine: {machine_text(values['environment'])}"]
    for spec in values["specs"]:
        network = " ".join(filter(None, (spec["arch"], spec["backbone"])))
        clips = counted(spec["clips_per_gpu"], "clip")
        ranks = counted(spec["ranks"], "rank")
        batch = f"{spec['virtual_gpus']} x {clips} a step on {ranks}"
        clips = "RANDOM CLIPS, no loader" if spec["synthetic"] else f"{spec['clips']}, {spec['workers']} workers"
        parts = [("step", measure.spread_text(spec["step_s"]) + " s", "")]
        for name, seconds in spec["phases_s"].items():
            part = share(spec["shares"][name])
            parts.append((f"  {_NAMES.get(name, name)}", measure.spread_text(seconds) + " s", part))
        rates = [("clips/s", measure.spread_text(spec["clips_per_second"]))]
        rates += [("multiply-adds/s", measure.spread_text(spec["multiply_adds_per_second"], ".4g"))]
        if spec["mfu"] is not None:
            rates += [("utilisation (MFU)", measure.spread_text(spec["mfu"], ".1f", 100) + " %")]
        size = f"{spec['frames']} x {spec['height']} x {spec['width']}"
        lines.append(f"\n{spec['name']}: {network}, {size}, {spec['precision']}")
        lines += [f"{batch}; {clips}", *(str(TextTable(rows, indent="  ")) for rows in (parts, rates))]
    lines += ["", *map(peak_text, values["peaks"])]
    lines.append(f"peak memory: {with_unit(values['peak_memory_bytes'], 'B')}, {values['peak_memory_of']}")
    if values["ratios"] is not None:
        first, second = (spec["name"] for spec in values["specs"])
        rows = [(_NAMES.get(name, name), measure.spread_text(ratio)) for name, ratio in values["ratios"].items()]
        over = f"{first} over {second}, median (min .. max) of {values['settings']['repeats']} pairs"
        lines.append(f"\nseconds of {over}:\n{TextTable(rows, indent='  ')}")
    return "\n".join(lines)
