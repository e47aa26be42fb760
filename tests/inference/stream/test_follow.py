"""What a follower says of a stream: the lines of --json and the summary, by hand."""

from __future__ import annotations

from typing import Any, cast

from summit_train.data.video.stream import Reading
from summit_train.inference.stream.follow import Follower, Labelled
from summit_train.inference.stream.pace import Pace

NOTHING = cast(Any, None)


def test_resets_and_drops_stand_only_where_they_happened() -> None:
    usual = Labelled(7, 0.28, 2, "left", 0.9376543219, 0.0123456, reset=False, dropped=0)
    values = {"frame": 7, "seconds": 0.28, "label": 2, "name": "left", "score": 0.937654, "latency_ms": 12.346}
    assert usual.values() == values and list(usual.values()) == list(values)
    marked = Labelled(7, 0.28, 2, "left", 0.9376543219, 0.0123456, reset=True, dropped=3)
    assert marked.values() == values | {"reset": True, "dropped": 3}


def test_the_summary_has_every_frame() -> None:
    follower = Follower(NOTHING, NOTHING, (), Reading(1200, 2), Pace(skipped=900, dropped=98))
    for milliseconds in range(1, 201):
        follower.latencies.add(milliseconds / 1000)
    assert "1,200 frames (200 seen, 900 skipped by the stride, 98 dropped, 2 damaged); latency " in follower.summary()
    assert "max 200.0 ms; " in follower.summary() and "reset" not in follower.summary()
    follower.num_resets = 2
    assert "2 damaged), 2 resets; latency" in follower.summary()
