"""What failures and checkpoints cost a run: the best interval between two checkpoints, and the goodput.

With M the mean seconds between failures of the job, d those that the steps wait for a checkpoint, t those between the
end of one and the next, and r those from a failure until steps are made again:

    Young   t = sqrt(2 d M)
    Daly    t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d    for d < 2M, else M
    goodput = t / (M e^(r / M) (e^((t + d) / M) - 1))

Sources: Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), which has the goodput as the inverse of
the time to solution. Failures are independent: the time to the next one is exponential.

A checkpoint in the background is a copy to the steps. A failure while it is written costs the interval before it too,
on average the time of the writing, which r includes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from summit_train.counts import count_network
from summit_train.plan import checkpoint_bytes
from summit_train.scaling.cost import Forecast, ScaledJob


@dataclass(frozen=True)
class Losses:
    """A run with failures. Times in seconds; goodput: time of the steps that count / time since the first start.

    failures: those expected in the run. stall_s: of a checkpoint. young_s, daly_s: the best intervals between two of
    them; goodput: with Daly's. own_interval_s, own_goodput: with the spec's.
    """

    mtbf_s: float
    failures: float
    stall_s: float
    young_s: float
    daly_s: float
    goodput: float
    own_interval_s: float
    own_goodput: float


def losses(job: ScaledJob, found: Forecast) -> Losses:
    """Estimate the cost of failures for a job."""
    rates = job.machine.failures
    spec = job.spec
    size = checkpoint_bytes(spec, count_network(spec), job.virtual_gpus or job.gpus)
    copy_s = size / rates.copy_bytes_per_second
    write_s = size / rates.write_bytes_per_second
    is_beside = spec.checkpoint.background
    stall_s = copy_s + (0 if is_beside else write_s)
    restart_s = rates.restart_s + (write_s if is_beside else 0)
    mtbf_s = rates.gpu_hours * 3600 / job.gpus
    best_s = daly_interval(stall_s, mtbf_s)
    own_s = spec.checkpoint.every_epochs * found.steps_per_epoch * found.step_s
    own_s = min(own_s, 60 * (spec.checkpoint.every_minutes or math.inf))
    return Losses(
        mtbf_s=mtbf_s,
        failures=found.run_s / mtbf_s,
        stall_s=stall_s,
        young_s=young_interval(stall_s, mtbf_s),
        daly_s=best_s,
        goodput=goodput(best_s, stall_s, mtbf_s, restart_s),
        own_interval_s=own_s,
        own_goodput=goodput(own_s, stall_s, mtbf_s, restart_s),
    )


def young_interval(stall_s: float, mtbf_s: float) -> float:
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def goodput(interval_s: float, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the part of the time that goes into steps that count."""
    period = (interval_s + stall_s) / mtbf_s
    if period + restart_s / mtbf_s > 700:  # beyond a double: hardly one interval in the age of the universe
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(period))
