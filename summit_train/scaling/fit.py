"""The constants of Summit that no document gives, from at most three rows of the paper's Table 3.

Three numbers are fitted to three times: seconds a clip, seconds a pass besides, and a rank's deviation. The network is
not fitted: at these sizes its exposed part is milliseconds and the rows cannot tell it from stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from summit_train.scaling import published
from summit_train.scaling.cost import Job, expected_maximum, forecast, step_time, steps_per_epoch
from summit_train.scaling.machines import Compute, Machine, Rate, Storage
from summit_train.spec import Spec

Vector = list[float]

_ROUNDS = 6  # of communication and constants in turn


class FitError(RuntimeError):
    """The rows do not determine the constants."""


@dataclass(frozen=True)
class Fit:
    """The fitted constants and the rows (nodes) that they came from."""

    rows: tuple[int, ...]
    seconds_per_clip: float
    step_overhead_s: float
    straggler_cv: float


@dataclass(frozen=True)
class Comparison:
    """One row of Table 3, predicted and published, in seconds; `fitted`: the constants came from it."""

    nodes: int
    published_s: float
    predicted_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative: 0.01 is 1 % too long."""
        return self.predicted_s / self.published_s - 1


def fit_table_3(machine: Machine, spec: Spec, rows: Sequence[published.Row]) -> Fit:
    """The constants with the least squared relative errors on `rows`, by Gauss-Newton.

    Raises FitError where the rows leave the constants open: all with one batch a GPU, or fewer than three.
    """
    if len(rows) < 3 or len({row.clips_per_gpu for row in rows}) < 2:
        raise FitError("three rows with two numbers of clips a GPU are wanted, to tell clips and passes apart")

    nodes = tuple(row.nodes for row in rows)
    slowest = [expected_maximum(row.gpus) for row in rows]
    point, found = [0.04, 0.05, 0.05], []
    for _ in range(_ROUNDS):
        # Communication is worked out with the constants so far: it jumps by up to a cycle where a gradient just misses
        # one, and nothing that jumps can be fitted by slopes. So the last round is not always the best either.
        tried = with_constants(machine, Fit(nodes, *point))
        exposed = [step_time(_row_job(tried, spec, row)).communication_s for row in rows]
        errors = partial(_errors, rows, exposed, slowest)
        found.append((sum(error**2 for error in errors(point)), point))
        point = gauss_newton(errors, point)
    return Fit(nodes, *min(found)[1])


def _errors(
    rows: Sequence[published.Row], exposed: Sequence[float], slowest: Sequence[float], constants: Vector
) -> Vector:
    """Relative errors of the rows' steps, with what is exposed of the communication given.

    `slowest`: how many deviations the slowest rank lies behind.
    """
    clip_s, overhead_s, cv = constants
    errors = []
    for row, exposed_s, deviations in zip(rows, exposed, slowest, strict=True):
        pass_s = overhead_s + row.clips_per_gpu * clip_s
        predicted = pass_s * (1 + cv * deviations) + exposed_s
        errors.append(predicted / published_step_seconds(row) - 1)
    return errors


def published_step_seconds(row: published.Row) -> float:
    """Seconds of one step of a timed row, the last, partial batch of an epoch counted as a step."""
    steps = steps_per_epoch(published.TRAINING_VIDEOS, row.global_batch, "keep")
    return (row.seconds or 0) / (published.EPOCHS * steps)


def with_constants(machine: Machine, fit: Fit) -> Machine:
    """The machine with the fitted constants; the I3Ds' rates stand to TSM's as their throughputs in Table 1 do."""
    tsm = 1 / fit.seconds_per_clip
    rates = [_rate("tsn", 8, tsm, "as tsm: the shift is taken to cost nothing")]
    for arch, (frames, throughput) in published.THROUGHPUT.items():
        by_ratio = "tsm's times the ratio of throughputs in Table 1 (P100, inference)"
        source = "fitted to Table 3" if arch == "tsm" else by_ratio
        rates.append(_rate(arch, frames, tsm * throughput / published.THROUGHPUT["tsm"][1], source))
    compute = Compute(
        step_overhead_s=fit.step_overhead_s,
        straggler_cv=fit.straggler_cv,
        rates=tuple(rates),
        source=f"fitted to the rows of {', '.join(map(str, fit.rows))} nodes of Table 3",
    )
    return machine.model_copy(update={"compute": compute, "last_batch": "keep"})


def with_storage(machine: Machine, specs: dict[str, Spec], arch: str) -> Machine:
    """The machine whose shared file system makes `arch` train as much slower than TSM as the paper says at 256 nodes.

    Frames of a step of one node over the seconds that such a step then takes.
    """
    spec, ratio, nodes = specs[arch], published.SPEED_RATIO[arch], published.RATIO_NODES
    step_s = ratio * forecast(job_of(machine, specs["tsm"], nodes)).step_s
    frames = machine.gpus_per_node * spec.scale.clips_per_gpu * spec.data.num_frames
    source = f"fitted: {arch} is {ratio} times as slow as TSM at {nodes} nodes (section 4.2)"
    return machine.model_copy(update={"shared": Storage(frames_per_second_per_node=frames / step_s, source=source)})


def speed_ratios(machine: Machine, specs: dict[str, Spec], nodes: int) -> dict[str, float]:
    """How many times as fast TSM trains than each I3D: clips a second at so many nodes."""
    speed = {arch: forecast(job_of(machine, spec, nodes)).clips_per_second for arch, spec in specs.items()}
    return {arch: speed["tsm"] / speed[arch] for arch in published.SPEED_RATIO}


def compare(machine: Machine, spec: Spec, fit: Fit) -> list[Comparison]:
    """All timed rows of Table 3 against the model."""
    return [
        Comparison(row.nodes, float(row.seconds or 0), predicted_seconds(machine, spec, row), row.nodes in fit.rows)
        for row in published.timed_rows()
    ]


def predicted_seconds(machine: Machine, spec: Spec, row: published.Row) -> float:
    """The training time of one row of Table 3: its clips a GPU, 100 epochs of 240,000 videos."""
    return forecast(_row_job(machine, spec, row)).run_s


def job_of(machine: Machine, spec: Spec, nodes: int) -> Job:
    """The paper's data set on so many nodes, the batch growing with them."""
    return Job(spec, machine, nodes, published.TRAINING_VIDEOS, published.VALIDATION_VIDEOS)


def _row_job(machine: Machine, spec: Spec, row: published.Row) -> Job:
    scale = spec.scale.model_copy(update={"clips_per_gpu": row.clips_per_gpu})
    schedule = spec.schedule.model_copy(update={"epochs": published.EPOCHS})
    return job_of(machine, spec.model_copy(update={"scale": scale, "schedule": schedule}), row.nodes)


def gauss_newton(errors: Callable[[Vector], Vector], start: Vector, rounds: int = 100) -> Vector:
    """The positive numbers near `start` with the least sum of squared `errors`.

    Raises FitError where it does not settle: one of them wants to be zero or below.
    """
    point, here = start, errors(start)
    for _ in range(rounds):
        columns = [_slope(errors, point, i, here) for i in range(len(point))]
        normal = [[_dot(left, right) for right in columns] for left in columns]
        move = solve(normal, [-_dot(column, here) for column in columns])
        while not all(x + dx > 0 for x, dx in zip(point, move, strict=True)):
            move = [dx / 2 for dx in move]
        point = [x + dx for x, dx in zip(point, move, strict=True)]
        here = errors(point)
        if all(abs(dx) < 1e-9 * x for x, dx in zip(point, move, strict=True)):
            return point
    raise FitError(f"no positive constants found after {rounds} rounds, last {point}")


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Vector:
    """Linear equations by elimination with pivots. Raises FitError where they have no single answer."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-14:
            raise FitError("the rows do not determine the constants: they leave one of them open")
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _slope(errors: Callable[[Vector], Vector], point: Vector, i: int, here: Vector) -> Vector:
    width = 1e-6
    moved = [x + width * (k == i) for k, x in enumerate(point)]
    return [(there - e) / width for there, e in zip(errors(moved), here, strict=True)]


def _rate(arch: str, frames: int, clips_per_second: float, source: str) -> Rate:
    return Rate.model_validate(
        {"arch": arch, "num_frames": frames, "clips_per_second": clips_per_second, "source": source}
    )
