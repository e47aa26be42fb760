"""The constants of Summit that no document gives, fitted to rows of the paper's Table 3.

Three numbers are fitted to three times: seconds a clip, fixed seconds a pass, and a rank's deviation. The network is
not fitted: at these sizes its exposed part is milliseconds, which the rows cannot tell from stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.errors import RunFailed
from summit_train.scaling import published
from summit_train.scaling.cost import Job, expected_maximum, forecast, step_time, steps_per_epoch
from summit_train.scaling.machines import Compute, Machine, Rate, Storage
from summit_train.spec import Spec

Vector = NDArray[np.float64]

_ROUNDS = 6  # of communication and constants in turn


class FitError(RunFailed):
    """The rows do not determine the constants."""


@dataclass(frozen=True)
class Fit:
    """The fitted constants and the rows (numbers of nodes) that they come from."""

    rows: tuple[int, ...]
    seconds_per_clip: float
    step_overhead_s: float
    straggler_cv: float


@dataclass(frozen=True)
class Comparison:
    """One row of Table 3, predicted and published, in seconds. fitted: the constants come from it."""

    nodes: int
    published_s: float
    predicted_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """Return the relative error: 0.01 is 1 % too long."""
        return self.predicted_s / self.published_s - 1


def fit_table_3(machine: Machine, spec: Spec, rows: Sequence[published.Row]) -> Fit:
    """Fit the constants with the least squared relative errors on `rows`, by Gauss-Newton.

    Raises FitError where the rows leave the constants open: all with one batch a GPU, or fewer than three.
    """
    if len(rows) < 3 or len({row.clips_per_gpu for row in rows}) < 2:
        raise FitError("three rows with two numbers of clips a GPU are wanted, to tell clips and passes apart")

    nodes = tuple(row.nodes for row in rows)
    clips = np.array([row.clips_per_gpu for row in rows])
    deviations = np.array([expected_maximum(row.gpus) for row in rows])  # by which the slowest rank is behind
    seconds = np.array([published_step_seconds(row) for row in rows])
    point, found = np.array([0.04, 0.05, 0.05]), []
    for _ in range(_ROUNDS):
        # Communication is worked out with the constants so far: it jumps by up to a cycle where a gradient just misses
        # one, and nothing that jumps can be fitted by slopes. So the last round is not always the best either.
        tried = with_constants(machine, Fit(nodes, *point.tolist()))
        exposed = np.array([step_time(_row_job(tried, spec, row)).communication_s for row in rows])

        def errors(constants: Vector, exposed: Vector = exposed) -> Vector:
            clip_s, overhead_s, cv = constants
            step_s = (overhead_s + clips * clip_s) * (1 + cv * deviations) + exposed
            return np.asarray(step_s / seconds - 1)

        found.append((float(sum(errors(point) ** 2)), point.tolist()))
        point = gauss_newton(errors, point)
    return Fit(nodes, *min(found)[1])


def published_step_seconds(row: published.Row) -> float:
    """Return the seconds of one step of a timed row. The last, partial batch of an epoch counts as a step."""
    steps = steps_per_epoch(published.TRAINING_VIDEOS, row.global_batch, "keep")
    return (row.seconds or 0) / (published.EPOCHS * steps)


def with_constants(machine: Machine, fit: Fit) -> Machine:
    """Return the machine with the fitted constants. The I3Ds' rates are TSM's by the ratio of Table 1's throughputs."""
    tsm, table = 1 / fit.seconds_per_clip, published.TABLE_1
    tsn = "as tsm: the shift is taken to cost nothing"
    rates = [Rate(arch="tsn", num_frames=8, clips_per_second=tsm, source=tsn)]
    for arch, row in table.items():
        by_ratio = "tsm's times the ratio of throughputs in Table 1 (P100, inference)"
        source = "fitted to Table 3" if arch == "tsm" else by_ratio
        speed = tsm * row.clips_per_second / table["tsm"].clips_per_second
        rates.append(Rate(arch=arch, num_frames=row.frames, clips_per_second=speed, source=source))
    source = f"fitted to the rows of {', '.join(map(str, fit.rows))} nodes of Table 3"
    constants = {"step_overhead_s": fit.step_overhead_s, "straggler_cv": fit.straggler_cv}
    compute = Compute(**constants, rates=tuple(rates), source=source)
    return machine.model_copy(update={"compute": compute, "last_batch": "keep"})


def with_storage(machine: Machine, specs: dict[str, Spec], arch: str) -> Machine:
    """Return the machine with a shared file system on which `arch` trains as slowly at 256 nodes as the paper says.

    Its rate is the frames of a node's step over the seconds of such a step.
    """
    spec, ratio, nodes = specs[arch], published.SPEED_RATIO[arch], published.RATIO_NODES
    step_s = ratio * forecast(job_of(machine, specs["tsm"], nodes)).step_s
    frames = machine.gpus_per_node * spec.scale.clips_per_gpu * spec.data.num_frames
    source = f"fitted: {arch} is {ratio} times as slow as TSM at {nodes} nodes (section 4.2)"
    return machine.model_copy(update={"shared": Storage(frames_per_second_per_node=frames / step_s, source=source)})


def speed_ratios(machine: Machine, specs: dict[str, Spec], nodes: int) -> dict[str, float]:
    """Return TSM's clips a second over those of each I3D."""
    speed = {arch: forecast(job_of(machine, spec, nodes)).clips_per_second for arch, spec in specs.items()}
    return {arch: speed["tsm"] / speed[arch] for arch in published.SPEED_RATIO}


def compare(machine: Machine, spec: Spec, fit: Fit) -> list[Comparison]:
    """Return all timed rows of Table 3, published and predicted."""
    return [
        Comparison(row.nodes, float(row.seconds or 0), predicted_seconds(machine, spec, row), row.nodes in fit.rows)
        for row in published.timed_rows()
    ]


def predicted_seconds(machine: Machine, spec: Spec, row: published.Row) -> float:
    """Return the training time of one row of Table 3: its clips a GPU, 100 epochs of 240,000 videos."""
    return forecast(_row_job(machine, spec, row)).run_s


def job_of(machine: Machine, spec: Spec, nodes: int) -> Job:
    """Return the job of the paper's data set on so many nodes. The batch grows with them."""
    return Job(spec, machine, nodes, published.TRAINING_VIDEOS, published.VALIDATION_VIDEOS)


def _row_job(machine: Machine, spec: Spec, row: published.Row) -> Job:
    scale = spec.scale.model_copy(update={"clips_per_gpu": row.clips_per_gpu})
    schedule = spec.schedule.model_copy(update={"epochs": published.EPOCHS})
    return job_of(machine, spec.model_copy(update={"scale": scale, "schedule": schedule}), row.nodes)


def gauss_newton(errors: Callable[[Vector], Vector], start: Vector, rounds: int = 100) -> Vector:
    """Return the positive numbers near `start` with the least sum of squared `errors`.

    Raises FitError where the errors leave a number open, and where a number wants to be zero or below.
    """
    point, width = start, 1e-6
    for _ in range(rounds):
        here = errors(point)
        slopes = np.stack([(errors(point + width * unit) - here) / width for unit in np.eye(len(point))], axis=1)
        move, _, rank, _ = np.linalg.lstsq(slopes, -here, rcond=1e-7)
        if rank < len(point):
            raise FitError("the rows do not determine the constants: they leave one of them open")
        while not (point + move > 0).all():
            move = move / 2
        point = point + move
        if (abs(move) < 1e-9 * point).all():
            return point
    raise FitError(f"no positive constants found after {rounds} rounds, last {point.tolist()}")
