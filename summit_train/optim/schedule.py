"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def peak_learning_rate(base_lr: float, base_batch: int, global_batch: int, rule: str) -> float:
    """Return the LR at the end of the warm-up.

    linear: base_lr * global_batch / base_batch (paper, section 4.1: 0.00125 for every 8 clips); sqrt: the root of that
    factor (LEGW); none: base_lr. Raises ValueError for another rule.
    """
    factor = global_batch / base_batch
    if rule == "linear":
        return base_lr * factor
    if rule == "sqrt":
        return base_lr * math.sqrt(factor)
    if rule == "none":
        return base_lr
    raise ValueError(f"LR scaling {rule!r}; valid: linear, sqrt, none")


def learning_rate(step: int, *, peak_lr: float, total_steps: int, warmup_steps: int, decay: str) -> float:
    """Return the LR of update number `step`, counted from 0.

    Warm-up (Goyal et al., section 2.2): linear, peak_lr * (step + 1) / warmup_steps, so the first update moves already
    and the last one of the warm-up has the peak. Then half a cosine to zero at `total_steps`, or the peak throughout.
    """
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    if decay == "none":
        return peak_lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * peak_lr * (1 + math.cos(math.pi * progress))
