"""The distribution of a duration over any number of events, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

# Each bin is this much longer than the one before: what is read from the bins is right to 0.5 %.
_STEP = math.log(1.01)
_SHORTEST = 1e-7


class Latencies:
    """A histogram of seconds with logarithmic bins from 0.1 microseconds on, and the exact maximum."""

    def __init__(self) -> None:
        self._bins = Counter[int]()
        self.count = 0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        """Count one event."""
        self._bins[round(math.log(max(seconds, _SHORTEST) / _SHORTEST) / _STEP)] += 1
        self.count += 1
        self.maximum = max(self.maximum, seconds)

    def quantile(self, part: float) -> float:
        """Return the seconds that this part of the events, 0 to 1, does not exceed, to 0.5 %; 0 without events."""
        wanted, counted = math.ceil(part * self.count), 0
        for place in sorted(self._bins):
            counted += self._bins[place]
            if counted >= wanted:
                return min(self.maximum, _SHORTEST * math.exp(place * _STEP))
        return 0.0
