"""What a check of the doctor's finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str, str]  # status, what was found, and how to mend it ("" when it works)

SET_UP = "run `make setup`"


@dataclass(frozen=True)
class Check:
    """One finding: its subject, whether it works, what was found, and how to mend it ("" when it works)."""

    name: str
    status: Status
    found: str
    mend: str = ""
