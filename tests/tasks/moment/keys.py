"""The keys of `model.moment`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from summit_train.spec.typed import Section


class MomentSpec(Section):
    """One event in each video."""

    tolerance: Annotated[float, Field(ge=0)] = 2.0
    """Frames by which a moment that counts as found may be wrong."""


def problems(spec: Any) -> Iterator[tuple[str, str]]:
    if spec.model.num_classes != 1:
        yield "model.num_classes", f"must be 1 with task moment, the event, got {spec.model.num_classes}"
    if spec.data.span_frames is not None:
        yield "data.span_frames", "must be null with task moment: a span may lack the event"
