"""The seconds of training steps over repeats and ranks, and clips a second and utilisation from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from summit_train.plan import Plan
from summit_train.scaling.measure import pair_ratios, spread

Phases = Mapping[str, float]


def mean_phases(steps: Sequence[Phases]) -> dict[str, float]:
    """Return each phase's mean over the steps of one repeat."""
    return {phase: fmean(step[phase] for step in steps) for phase in steps[0]}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each phase: ranks[r][i] are rank r's in repeat i, the mean over the repeat's steps."""

    ranks: tuple[tuple[Phases, ...], ...]

    @property
    def step_s(self) -> list[float]:
        """Return a step's seconds in each repeat, on the slowest rank."""
        return [max(sum(phases.values()) for phases in repeat) for repeat in zip(*self.ranks, strict=True)]

    @property
    def phases_s(self) -> dict[str, list[float]]:
        """Return each phase's seconds in each repeat, the mean over the ranks. Their sum is the mean step."""
        repeats = [mean_phases(repeat) for repeat in zip(*self.ranks, strict=True)]
        return {phase: [repeat[phase] for repeat in repeats] for phase in repeats[0]}

    @property
    def shares(self) -> dict[str, float]:
        """Return each phase's part of all the time. The parts sum to 1."""
        sums = {phase: sum(seconds) for phase, seconds in self.phases_s.items()}
        total = sum(sums.values())
        return {phase: seconds / total for phase, seconds in sums.items()}

    def ratios(self, other: StepTimes) -> dict[str, dict[str, float]]:
        """Return this over the other, repeat by repeat: the step, and each phase of at least 1 % of both steps."""
        shares = (self.shares, other.shares)
        both = {"step": (self.step_s, other.step_s)}
        both |= {
            phase: (seconds, other.phases_s[phase])
            for phase, seconds in self.phases_s.items()
            if min(part[phase] for part in shares) >= 0.01
        }
        return {name: spread(pair_ratios(mine, others)) for name, (mine, others) in both.items()}


def step_values(times: StepTimes, plan: Plan, training_multiply_adds: int, peak: float | None) -> dict[str, Any]:
    """Return a JSON object: seconds, clips and multiply-adds a second, and utilisation (mfu), by part.

    training_multiply_adds: of one clip, forward and backward. peak: of all ranks, in multiply-adds/s; None leaves the
    utilisation out, which is achieved over peak (the paper, section 3 a).
    """
    step_s, phases, clips = times.step_s, times.phases_s, plan.global_batch
    forward, training = clips * plan.multiply_adds, clips * training_multiply_adds

    def utilisation(multiply_adds: int, seconds: Sequence[float]) -> dict[str, float] | None:
        return None if peak is None or min(seconds) == 0 else spread([multiply_adds / s / peak for s in seconds])

    return {
        "step_s": spread(step_s),
        "clips_per_second": spread([clips / seconds for seconds in step_s]),
        "phases_s": {phase: spread(seconds) for phase, seconds in phases.items()},
        "shares": times.shares,
        "multiply_adds_per_step": training,
        "multiply_adds_per_second": spread([training / seconds for seconds in step_s]),
        "mfu": utilisation(training, step_s),
        "forward_mfu": utilisation(forward, phases["forward"]),
        "backward_mfu": utilisation(training - forward, phases["backward"]),
        "repeats_s": [list(map(dict, rank)) for rank in times.ranks],
    }
