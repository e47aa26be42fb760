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
from typing import Any

from summit_train.core.run_log import number
from summit_train.core.text import noise_text
from summit_train.report.records import RunRecord

QUARTERS = 4
FEWEST = 4  # measurements of a part of the run that is shown on its own
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # batches in the table, times the run's


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


def pooled(pairs: Sequence[Sequence[float]]) -> Measured:
    """Return the ratio of the means of tr(Sigma) and |G|^2 from pairs (|G|^2, tr(Sigma)).

    Its standard error is that of a ratio of two means, to first order; the measurements count as independent.
    """
    count = len(pairs)
    square = fmean(s for s, _ in pairs)
    variance = fmean(v for _, v in pairs)
    if square <= 0 or variance <= 0:
        return Measured(count, None, None)
    value = variance / square
    residuals = [v - value * s for s, v in pairs]
    error = math.sqrt(sum(r * r for r in residuals) / (count - 1) / count) / square if count > 1 else None
    return Measured(count, value, error)


def measurements(run: RunRecord) -> list[tuple[int, float, float]]:
    """Return (step, |G|^2, tr(Sigma)) of the steps that measured their gradient."""
    return [
        (step.step, step.gradient_square, step.gradient_variance)
        for step in run.log.steps
        if step.gradient_square is not None and step.gradient_variance is not None
    ]


def noise_section(run: RunRecord) -> dict[str, Any] | None:
    """Return the noise scale for the page; None where it was not measured.

    whole, parts: Measured, over all steps and over the quarters of the run. batches: rows of `batch_rows`.
    """
    found = measurements(run)
    if not found:
        return None
    length = found[-1][0]
    quarters: list[list[tuple[float, float]]] = [[] for _ in range(QUARTERS)]
    for step, square, variance in found:
        quarters[min(QUARTERS - 1, (step - 1) * QUARTERS // length)].append((square, variance))
    parts = [pooled(part) for part in quarters if len(part) >= FEWEST]
    whole = pooled([pair for _, *pair in found])
    batch = number(run.plan.get("global_batch"))
    rows = batch_rows(batch, whole.value) if batch and whole.value else []
    return {"whole": whole, "parts": parts if len(parts) > 1 else [], "batches": rows}


def batch_rows(batch: float, noise_scale: float) -> list[tuple[str, ...]]:
    """Return (batch, S / S_min, E / E_min, steps, clips) of the run's batch and larger ones.

    steps and clips are those to the same loss, as shares of what the run's batch needs.
    """
    rows = []
    for factor in FACTORS:
        steps = 1 + noise_scale / (factor * batch)
        clips = 1 + factor * batch / noise_scale
        share = (steps / (1 + noise_scale / batch), clips / (1 + batch / noise_scale))
        cells = (f"{factor * batch:,.0f}", f"{steps:.2f}", f"{clips:.2f}")
        rows.append((*cells, *(f"{100 * part:,.0f} %" for part in share)))
    return rows
