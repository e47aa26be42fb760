"""The measurements of `bench step`, `table1` and `fig3`: training steps and forward passes in turn, and the peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from typing import Any

import torch

from summit_train.bench.measure import Turns, in_turn, pair_ratios, spread, training_multiply_adds
from summit_train.bench.steps import Experiment, Place, StepBench, StepTimes, network_values, peak_memory, step_values
from summit_train.core.watch import Watchdog
from summit_train.models import VideoNetwork
from summit_train.models.count import Count
from summit_train.models.network import count_network
from summit_train.models.precision import AUTOCAST, mixed_precision, parameter_type
from summit_train.plan import make_plan
from summit_train.scaling.published import SLOWEST, label_of, table_1_row
from summit_train.spec import Spec
from summit_train.training.environment import environment
from summit_train.training.run import fresh_model
from summit_train.training.stopwatch import Mark

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
RUNS = 5
_MOST_ELEMENTS = 2**26  # of one matrix, 256 MB in fp32
Shape = tuple[int, int, int]
Peaks = Mapping[str, dict[str, Any]]  # by precision; empty where nobody asks for utilisation


def measure_peaks(specs: Sequence[Spec], given: float | None, place: Place) -> Peaks:
    """Measure the peak of all ranks together for each precision, with the threads that training has.

    given: multiply-adds/s of each rank, in place of a measurement; 0 gives no peaks.
    """
    peaks: dict[str, dict[str, Any]] = {}
    for precision, spec in {} if given == 0 else {spec.precision: spec for spec in specs}.items():
        rate, shape, tried = given, None, {}
        if rate is None:
            place.tell(f"measuring the peak of matrix products in {precision}")
            place.world.barrier()
            shapes = network_shapes(count_network(spec), spec.scale.clips_per_gpu)
            tried = measure_peak(precision, place.device, shapes)
            rate, shape = max((rate, shape) for shape, rate in tried.items())
        peaks[precision] = {
            "precision": precision,
            "multiply_adds_per_second": sum(place.world.gather(rate) or []),
            "shape": shape,
            "tried": [{"shape": shape, "multiply_adds_per_second": rate} for shape, rate in tried.items()],
        }
    return peaks


def measure_peak(
    precision: str, device: torch.device, shapes: Sequence[Shape] = (), seconds: float = 1.0
) -> dict[Shape, float]:
    """Measure large square products and products of `shapes`: multiply-adds/s of each, the best of five runs.

    Squares grow until one run takes more than `seconds`. The threads are the process's, and a GPU uses TF32 where
    convolutions do, so the peak is that of the training's arithmetic.
    """
    tried: dict[Shape, float] = {}
    before, rate = torch.get_float32_matmul_precision(), 0.0
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:  # torch's default allows it for convolutions alone
        torch.set_float32_matmul_precision("high")
    try:
        for side in SQUARES:
            rate = tried[side, side, side] = _product_rate((side, side, side), precision, device)
            if (2 * side) ** 3 / rate > seconds:
                break
        for shape in shapes:
            if prod(shape) / rate <= 10 * seconds:
                rate = tried[shape] = _product_rate(shape, precision, device)
    finally:
        torch.set_float32_matmul_precision(before)
    return tried


def network_shapes(network: Count, clips: int, most: int = 6) -> list[Shape]:
    """Return the heaviest convolutions on `clips` clips as matrix products: (pixels, inputs x kernel, outputs).

    Those of one shape count together. Rows are cut so that no matrix has more than 2^26 elements.
    """
    weights: dict[Shape, int] = {}
    for layer in network.layers[:-1]:  # without the classifier
        pixels, inner, columns = layer.product
        shape = (min(clips * pixels, _MOST_ELEMENTS // max(inner, columns)), inner, columns)
        weights[shape] = weights.get(shape, 0) + layer.multiply_adds
    return sorted(weights, key=lambda shape: -weights[shape])[:most]


def _product_rate(shape: Shape, precision: str, device: torch.device) -> float:
    """Return the multiply-adds/s of (rows, inner) times (inner, columns) in the best run."""
    rows, inner, columns = shape
    dtype = AUTOCAST.get(precision, parameter_type(precision))
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    out = torch.mm(left, right)  # brings the memory and the library's code in
    seconds = []
    for _ in range(RUNS):
        start = Mark(device)
        torch.mm(left, right, out=out)
        seconds.append(start.seconds_to(Mark(device)))
    return prod(shape) / min(seconds)


def measure_steps(
    experiments: Sequence[Experiment], turns: Turns, peaks: Peaks, place: Place, watchdog: Watchdog
) -> dict[str, Any] | None:
    """Measure training steps; several experiments take turns. Return the JSON values on rank 0, None elsewhere."""
    world, device = place.world, place.device
    benches = [StepBench(experiment, world, device, watchdog) for experiment in experiments]
    repeats: list[list[dict[str, float]]] = [[] for _ in benches]
    measurements = {i: partial(bench.turn, turns, alone=len(benches) == 1) for i, bench in enumerate(benches)}
    for i, seconds in in_turn(measurements, turns.repeats):
        repeats[i].append(seconds)
        turn = f"turn {len(repeats[i])} of {turns.repeats}"
        place.tell(f"{experiments[i].spec.name}, {turn}: {sum(seconds.values()):.3f} s a step")
    for bench in benches:
        bench.close()
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


def network_rate(spec: Spec, turns: Turns, place: Place) -> float:
    """Measure the training step of one virtual GPU, alone and without a loader: clips a second of the fastest turn."""
    scale = spec.scale.model_copy(update={"gpus": 1})
    alone = spec.model_copy(update={"scale": scale})
    experiment = Experiment(alone, make_plan(alone, 1, scale.clips_per_gpu), None)
    with Watchdog(place.world, spec.watch.stall_seconds) as watchdog:
        values = measure_steps([experiment], turns, {}, place, watchdog)
    assert values is not None, "one rank"
    rate: float = values["specs"][0]["clips_per_second"]["max"]
    return rate


def evaluated_network(spec: Spec, device: torch.device) -> tuple[VideoNetwork, torch.Tensor]:
    """Return the spec's network as evaluation runs it, with random weights, and clips_per_gpu random clips for it."""
    model = fresh_model(spec, device).eval()
    shape = (spec.scale.clips_per_gpu, *spec.data.input.clip_shape(spec.data.num_frames, spec.data.crop))
    pixels = torch.randn(shape, device=device, dtype=parameter_type(spec.precision))
    return model, pixels.permute(0, 1, 4, 2, 3)  # channels-last in memory, as from the loader


def forward_passes(spec: Spec, device: torch.device) -> Callable[[int], float]:
    """Return a function of a number of forward passes that returns their mean seconds.

    The network has random weights; the passes share one batch of the spec's clips_per_gpu random clips.
    """
    model, clips = evaluated_network(spec, device)

    def seconds(passes: int) -> float:
        with torch.inference_mode(), mixed_precision(spec.precision, device):
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
    return {
        "environment": environment(place.world, place.device, [place.world.host]),
        "settings": {"batch": batch} | asdict(turns),
        "peaks": list(peaks.values()),
        "rows": _inference_rows(specs, seconds, peaks),
    }


def _inference_rows(specs: Sequence[Spec], seconds: Sequence[Sequence[float]], peaks: Peaks) -> list[dict[str, Any]]:
    """Return a row a network, with throughput and multiply-adds/s also in multiples of I3D 3x1x1's, or the last's."""
    base = next((i for i, spec in enumerate(specs) if spec.model.arch == SLOWEST), len(specs) - 1)
    base_work, rows = count_network(specs[base]).multiply_adds, []
    for spec, times in zip(specs, seconds, strict=True):
        network, peak = count_network(spec), peaks.get(spec.precision)
        rates = [spec.scale.clips_per_gpu * network.multiply_adds / s for s in times]
        faster = pair_ratios(seconds[base], times)
        rows.append({
            "label": label_of(spec),
            **network_values(spec),
            **{name: getattr(network, name) for name in ("parameters", "multiply_adds", "input_bytes", "compute_io")},
            "pass_s": spread(times),
            "clips_per_second": spread([spec.scale.clips_per_gpu / s for s in times]),
            "multiply_adds_per_second": spread(rates),
            "utilisation": peak and spread([rate / peak["multiply_adds_per_second"] for rate in rates]),
            "published": table_1_row(spec),
            "relative_to": label_of(specs[base]),
            "relative_throughput": spread(faster),
            "relative_utilisation": spread([network.multiply_adds / base_work * ratio for ratio in faster]),
        })  # fmt: skip
    return rows
