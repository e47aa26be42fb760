"""Published mean average precision on ImageNet VID's validation set: Table 9 of the TSM paper, and what it is beside.

Nothing here is measured. Percent, over all boxes, then of slow, medium and fast objects. Figures of one `form` do not
compare with those of another: see detection/measures.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """online: from past frames alone. latency: of a frame, in multiples of R-FCN's; None: not printed."""

    label: str
    source: str
    form: Literal["FGFA", "MEGA"]
    online: bool
    map: float
    slow: float
    medium: float
    fast: float
    latency: float | None = None


# The paper says that it used FGFA's code, so its figures are of that form.
_TABLE, _FGFA, _MEGA = "TSM journal version, Table 9", "README of FGFA's code", "README of MEGA's code"
TABLE_9 = (
    Row("R-FCN, ResNet-101", _TABLE, "FGFA", True, 74.7, 83.6, 72.5, 51.4, 1.0),
    Row("FGFA, ResNet-101", _TABLE, "FGFA", False, 75.9, 84.0, 74.4, 55.6, 2.5),
    Row("Online TSM, ResNet-101", _TABLE, "FGFA", True, 76.3, 83.4, 74.8, 56.0, 1.0),
)
BESIDE = (
    Row("R-FCN, ResNet-101", _FGFA, "FGFA", True, 74.1, 83.6, 71.6, 51.2),
    Row("FGFA, ResNet-101", _FGFA, "FGFA", False, 77.1, 85.9, 75.7, 56.1),
    Row("FGFA and SeqNMS, ResNet-101", _FGFA, "FGFA", False, 78.9, 86.8, 77.9, 57.9),
    Row("Single frame, ResNet-101", _MEGA, "MEGA", True, 76.7, 84.9, 74.1, 52.3),
    Row("FGFA, ResNet-101", _MEGA, "MEGA", False, 78.0, 85.6, 76.9, 55.3),
    Row("MEGA, ResNet-101", _MEGA, "MEGA", False, 82.9, 89.4, 81.6, 62.7),
)
