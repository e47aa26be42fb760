"""The measurements of `bench step`, `table1` and `fig3`: training steps and forward passes in turn, and the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from summit_train.modality import RGB
from summit_train.network import count_network
from summit_train.scaling.measure import Turns, in_turn, pair_ratios, spread, training_multiply_adds
from summit_train.scaling.peak import measure_peak, network_shapes
from summit_train.scaling.published import SLOWEST, label_of, table_1_row
from summit_train.scaling.steps import Experiment, Place, StepBench, StepTimes, network_values, peak_memory, step_values
from summit_train.spec import Spec
from summit_train.training.environment import environment
from summit_train.training.run import fresh_model
from summit_train.training.step import AUTOCAST, parameter_type
from summit_train.training.stopwatch import Mark
from summit_train.training.watch import Watchdog

Peaks = Mapping[str, dict[str, Any]]  # by precision; empty where nobody asks for utilisation


def measure_peaks(specs: Sequence[Spec], given: float | None, place: Place) -> Peaks:
    """Measure the peak of all ranks together for each precision, with the threads that training has.

    given: multiply-adds/s of each rank, in place of a measurement; 0 gives no peaks.
    """
    peaks: dict[str, dict[str, Any]] = {}
    for precision, spec in {} if given == 0 else {spec.precision: spec for spec in specs}.items():
        rate, shape, tried = given, None, []
        if rate is None:
            place.tell(f"measuring the peak of matrix products in {precision}")
            place.world.barrier()
            shapes = network_shapes(count_network(spec), spec.scale.clips_per_gpu)
            tried = [asdict(product) for product in measure_peak(precision, place.device, shapes)]
            rate, shape = max((product["multiply_adds_per_second"], product["shape"]) for product in tried)
        total = sum(place.world.gather(rate) or [])
        peaks[precision] = {
            "precision": precision, "multiply_adds_per_second": total, "shape": shape, "tried": tried,
        }  # fmt: skip
    return peaks


def measure_steps(
    experiments: Sequence[Experiment], turns: Turns, peaks: Peaks, place: Place, watchdog: Watchdog
) -> dict[str, Any] | None:
    """Measure training steps; several experiments take turns. Return the JSON values on rank 0, None elsewhere."""
    world, device = place.world, place.device
    benches = [StepBench(experiment, world, device, watchdog) for experiment in experiments]
    repeats: list[list[dict[str, float]]] = [[] for _ in benches]
    for i, seconds in _turns(benches, turns):
        repeats[i].append(seconds)
        turn = f"turn {len(repeats[i])} of {turns.repeats}"
        place.tell(f"{experiments[i].spec.name}, {turn}: {sum(seconds.values()):.3f} s a step")
    ranks = world.gather((repeats, [bench.activation_bytes for bench in benches], peak_memory(device), world.host))
    if ranks is None:
        return None
    specs, times = [], []
    for i, experiment in enumerate(experiments):
        times.append(StepTimes(tuple(tuple(repeats[i]) for repeats, *_ in ranks)))
        peak = peaks.get(experiment.spec.precision, {}).get("multiply_adds_per_second")
        work = training_multiply_adds(count_network(experiment.spec))
        activations = {"activation_bytes": max(activations[i] for _, activations, *_ in ranks)}
        specs.append(experiment.values() | step_values(times[i], experiment.plan, work, peak) | activations)
    of = "tensors on the GPU" if device.type == "cuda" else "the whole process, Python and torch with it"
    return {
        "bench": "step",
        "environment": environment(world, device, [host for *_, host in ranks]),
        "settings": asdict(turns),
        "peak_memory_bytes": max(memory for *_, memory, _ in ranks),
        "peak_memory_of": f"{of}, highest of all ranks" + (", all specs at once" if len(specs) > 1 else ""),
        "peaks": list(peaks.values()),
        "specs": specs,
        "ratios": times[0].ratios(times[1]) if len(times) == 2 else None,
    }


def _turns(benches: Sequence[StepBench], turns: Turns) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield which bench was measured and its seconds. A bench alone warms up once and keeps its loader."""
    if len(benches) > 1:
        yield from in_turn({i: partial(bench.turn, turns) for i, bench in enumerate(benches)}, turns.repeats)
        return
    benches[0].warm_up(turns.warm_up)
    for _ in range(turns.repeats):
        yield 0, benches[0].repeat(turns.steps)
    benches[0].close()


def forward_passes(spec: Spec, device: torch.device) -> Callable[[int], float]:
    """Return a function of a number of forward passes that returns their mean seconds.

    The network has random weights; the passes share one batch of the spec's clips_per_gpu random clips.
    """
    model, autocast = fresh_model(spec, device).eval(), AUTOCAST.get(spec.precision)
    shape = (spec.scale.clips_per_gpu, *RGB.clip_shape(spec.data.num_frames, spec.data.crop))
    pixels = torch.randn(shape, device=device, dtype=parameter_type(spec.precision))
    clips = pixels.permute(0, 1, 4, 2, 3)  # channels-last in memory, as from the loader

    def seconds(passes: int) -> float:
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            start = Mark(device)
            for _ in range(passes):
                model(clips)
            return start.seconds_to(Mark(device)) / passes

    return seconds


def measure_inference(specs: Sequence[Spec], turns: Turns, peaks: Peaks, place: Place) -> dict[str, Any]:
    """Measure the forward passes of networks in turn: the paper's Table 1 and Figure 3a, as JSON values."""
    batch = specs[0].scale.clips_per_gpu
    benches = [forward_passes(spec, place.device) for spec in specs]
    for bench in benches:
        bench(turns.warm_up)
    seconds: list[list[float]] = [[] for _ in specs]
    for i, found in in_turn({i: partial(bench, turns.steps) for i, bench in enumerate(benches)}, turns.repeats):
        seconds[i].append(found)
        place.tell(f"{label_of(specs[i])}: {found:.3f} s a forward pass of {batch} clips")
    rows = [_inference_row(spec, times, peaks.get(spec.precision)) for spec, times in zip(specs, seconds, strict=True)]
    _relate(rows, seconds)
    return {
        "environment": environment(place.world, place.device, [place.world.host]),
        "settings": {"batch": batch} | asdict(turns),
        "peaks": list(peaks.values()),
        "rows": rows,
    }


def _inference_row(spec: Spec, seconds: Sequence[float], peak: dict[str, Any] | None) -> dict[str, Any]:
    network, batch = count_network(spec), spec.scale.clips_per_gpu
    rates = [batch * network.multiply_adds / s for s in seconds]
    counts = ("parameters", "multiply_adds", "input_bytes", "compute_io")
    return {"label": label_of(spec), **network_values(spec)} | {
        **{name: getattr(network, name) for name in counts},
        "pass_s": spread(seconds),
        "clips_per_second": spread([batch / s for s in seconds]),
        "multiply_adds_per_second": spread(rates),
        "utilisation": None if peak is None else spread([rate / peak["multiply_adds_per_second"] for rate in rates]),
        "published": table_1_row(spec),
    }


def _relate(rows: Sequence[dict[str, Any]], seconds: Sequence[Sequence[float]]) -> None:
    """Add throughput and multiply-adds/s in multiples of I3D 3x1x1's, else of the last network's."""
    base = next((i for i, row in enumerate(rows) if row["arch"] == SLOWEST), len(rows) - 1)
    for row, times in zip(rows, seconds, strict=True):
        faster = pair_ratios(seconds[base], times)
        work = row["multiply_adds"] / rows[base]["multiply_adds"]
        row["relative_to"] = rows[base]["label"]
        row["relative_throughput"] = spread(faster)
        row["relative_utilisation"] = spread([work * ratio for ratio in faster])
