"""The parts of bench/gpu.sh in the order in which they run: what matters most comes first."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PLANNED = 0.75  # of the limit; the rest is for what has begun
GROUPS = ("right", "fast", "fed")


@dataclass(frozen=True)
class Part:
    """One program beside this file.

    limit_s: it is stopped after so many seconds. plans: it takes --seconds and begins nothing new after those.
    """

    name: str
    group: str
    about: str
    limit_s: float
    plans: bool = True

    def command(self, out: Path, rehearse: bool, limit_s: float | None = None) -> list[str]:
        """Return the command line; `out` is the folder that gets NAME.json, limit_s when it will be stopped."""
        words = [sys.executable, str(HERE / f"{self.name}.py"), "--out", str(out / f"{self.name}.json")]
        if self.plans:
            words += ["--seconds", f"{_PLANNED * (self.limit_s if limit_s is None else limit_s):.0f}"]
        return [*words, "--device", "cpu", "--small"] if rehearse else words


PARTS = (
    Part("suite", "right", "the tests marked gpu, none skipped", 90, plans=False),
    Part("precision", "right", "every network against double on the CPU; the shift to the bit", 90),
    Part("accumulation", "right", "four virtual GPUs, BN statistics, fp16's loss scale", 30, plans=False),
    Part("syncs", "right", "no step waits for the host", 40),
    Part("memory", "right", "peak memory against the plan's", 40),
    Part("speed", "fast", "training and inference: precisions, executions, ratios", 170),
    Part("feed", "fed", "the loader against the step, raw and packed", 90, plans=False),
    Part("resume", "right", "killed and resumed, bit-equal", 90),
    Part("kernels", "fast", "where a step's time goes; copies beside kernels", 40, plans=False),
    Part("ranks", "right", "two ranks on this GPU, sums on the host", 60, plans=False),
    Part("nonfinite", "right", "a NaN ends the run by name", 40),
    Part("tables", "fast", "Tables 1, 5, 6 and Figure 3 of the papers", 120),
)
