"""The section of the report: the videos with the largest errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST = 3


@dataclass(frozen=True)
class Section:
    worst: list[tuple[str, float, int]]
    template: str = "moment/section.html.j2"


def read_section(run: Any) -> Section | None:
    if run.final is None:
        return None
    with np.load(run.path / "predictions" / f"{Path(run.final.checkpoints[-1].path).stem}.npz") as file:
        paths, moments, events = (file[name] for name in ("path", "moments", "events"))
    order = np.argsort(-np.abs(moments - events), kind="stable")[:MOST]
    return Section([(str(paths[i]), float(moments[i]), int(events[i])) for i in order])
