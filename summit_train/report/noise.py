"""What a measured gradient noise scale says of the batch.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", section 2.3. With B the batch, B_noise the
noise scale, S the steps to some loss and E the clips (both at the best LR of each batch),

    S / S_min = 1 + B_noise / B        E / E_min = 1 + B / B_noise

so that (S / S_min - 1) (E / E_min - 1) = 1 (their equation 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from summit_train.core.text import noise_text
from summit_train.report.records import Run, StepRecord, number

QUARTERS = 4
FEWEST = 4  # measurements of a part of the run that is shown on its own
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # batches in the table, times the run's


def steps_factor(batch: float, noise_scale: float) -> float:
    """Return S / S_min: 2 where the batch is the noise scale, towards 1 above it."""
    return 1 + noise_scale / batch


def clips_factor(batch: float, noise_scale: float) -> float:
    """Return E / E_min: towards 1 below the noise scale, 2 where the batch is the noise scale."""
    return 1 + batch / noise_scale


@dataclass(frozen=True)
class Measured:
    """The noise scale over `count` measurements, in clips, and its standard error; None where it is unclear."""

    count: int
    value: float | None
    error: float | None

    @property
    def text(self) -> str:
        """Return `1,230 clips`, with the standard error where it is known."""
        error = "" if self.error is None else f" \N{PLUS-MINUS SIGN} {noise_text(self.error)}"
        return noise_text(self.value).removesuffix(" clips" if error else "") + error


def pooled(pairs: Sequence[tuple[float, float]]) -> Measured:
    """Return the ratio of the means of tr(Sigma) and |G|^2 from pairs (|G|^2, tr(Sigma)).

    Its standard error is that of a ratio of two means, to first order; the measurements count as independent.
    """
    count, square, variance = len(pairs), fmean(s for s, _ in pairs), fmean(v for _, v in pairs)
    if square <= 0 or variance <= 0:
        return Measured(count, None, None)
    value = variance / square
    residuals = [v - value * s for s, v in pairs]
    error = math.sqrt(sum(r * r for r in residuals) / (count - 1) / count) / square if count > 1 else None
    return Measured(count, value, error)


def measured(steps: Sequence[StepRecord]) -> Measured:
    """Return the noise scale over `steps`, all measured."""
    return pooled([(step.gradient_square or 0.0, step.gradient_variance or 0.0) for step in steps])


def measured_steps(run: Run) -> list[StepRecord]:
    """Return the steps of a run that measured its gradient."""
    return [step for step in run.steps if step.gradient_square is not None and step.gradient_variance is not None]


@dataclass(frozen=True)
class NoiseSection:
    """The noise scale in the report: of all measured steps, of the quarters of the run, and the table of batches."""

    whole: Measured
    parts: tuple[Measured, ...]
    batches: tuple[tuple[str, ...], ...]


def noise_section(run: Run) -> NoiseSection | None:
    """Return what the report shows of the noise scale; None where it was not measured."""
    steps = measured_steps(run)
    if not steps:
        return None
    length = steps[-1].step
    quarters: list[list[StepRecord]] = [[] for _ in range(QUARTERS)]
    for step in steps:
        quarters[min(QUARTERS - 1, (step.step - 1) * QUARTERS // length)].append(step)
    parts = [measured(part) for part in quarters if len(part) >= FEWEST]
    whole, batch = measured(steps), number(run.plan.get("global_batch"))
    rows = batch_rows(batch, whole.value) if batch and whole.value else ()
    return NoiseSection(whole, tuple(parts) if len(parts) > 1 else (), rows)


def batch_rows(batch: float, noise_scale: float) -> tuple[tuple[str, ...], ...]:
    """Return (batch, S / S_min, E / E_min, steps, clips) of the run's batch and larger ones.

    steps and clips are those to the same loss, as shares of what the run's batch needs.
    """
    rows = []
    for factor in FACTORS:
        other = factor * batch
        steps, clips = steps_factor(other, noise_scale), clips_factor(other, noise_scale)
        share = (steps / steps_factor(batch, noise_scale), clips / clips_factor(batch, noise_scale))
        rows.append((f"{other:,.0f}", f"{steps:.2f}", f"{clips:.2f}", *(f"{100 * part:,.0f} %" for part in share)))
    return tuple(rows)
