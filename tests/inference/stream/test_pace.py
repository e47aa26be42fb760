"""The stride, and a live source that is faster than the network: which frames are seen, dropped and counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from summit_train.core.errors import RunFailed
from summit_train.data.video.source import DecodeError
from summit_train.data.video.stream import StreamFrame
from summit_train.inference.stream.pace import Pace, Paced


def frames(*numbers: int) -> list[StreamFrame]:
    return [StreamFrame(number, number / 25, 0.0, cast(Any, None)) for number in numbers]


def due(*numbers: int) -> list[Paced]:
    return [Paced(frame, True) for frame in frames(*numbers)]


def test_the_stride_counts_from_the_first_frame() -> None:
    pace = Pace()
    assert [paced.frame.number for paced in pace.strided(frames(*range(10)), 4)] == [0, 4, 8]
    assert pace.skipped == 7
    assert [paced.is_due for paced in Pace().strided(frames(*range(5)), 2, keep_skipped=True)] == [1, 0, 1, 0, 1]


def test_a_damaged_frame_does_not_move_the_others() -> None:
    pace = Pace()
    assert [paced.frame.number for paced in pace.strided(frames(0, 1, 2, 3, 5, 6, 7, 8), 4)] == [0, 8]  # 4 is damaged
    assert pace.skipped == 6


def test_a_source_that_waits_loses_nothing() -> None:
    taken, pace = threading.Semaphore(3), Pace()

    def slowly() -> Iterator[Paced]:
        for paced in due(*range(50)):
            taken.acquire()
            yield paced

    for number, paced in enumerate(pace.newest(slowly(), max_waiting=3)):
        assert (paced.frame.number, paced.dropped) == (number, 0)
        taken.release()
    assert number == 49 and pace.dropped == 0


def test_the_oldest_frames_are_dropped_and_counted() -> None:
    pace, may_read, is_read = Pace(), threading.Event(), threading.Event()

    def source() -> Iterator[Paced]:
        yield from due(0)
        may_read.wait()
        yield from due(*range(1, 11))
        is_read.set()
        may_end.wait()
        yield from due(11)

    may_end, live = threading.Event(), Pace.newest(pace, source(), max_waiting=4)
    assert next(live).frame.number == 0
    may_read.set()
    is_read.wait()  # 1 to 10 have come while 0 was seen: 7 to 10 wait
    first = next(live)
    assert (first.frame.number, first.dropped, pace.dropped) == (7, 6, 6)
    assert [(paced.frame.number, paced.dropped) for paced in (next(live), next(live), next(live))] == [
        (8, 0),
        (9, 0),
        (10, 0),
    ]
    may_end.set()
    assert [(paced.frame.number, paced.dropped) for paced in live] == [(11, 0)]
    assert pace.dropped == 6


def test_an_error_comes_after_the_frames_before_it() -> None:
    def source() -> Iterator[Paced]:
        yield from due(0, 1)
        raise DecodeError("a.mkv", "is damaged")

    taken = []
    with pytest.raises(DecodeError, match=r"a\.mkv: is damaged"):
        for paced in Pace().newest(source()):
            taken.append(paced.frame.number)
    assert taken == [0, 1]


def test_a_fault_of_ours_ends_the_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.set())

    def source() -> Iterator[Paced]:
        yield from due(0)
        raise ValueError("a bug")

    with pytest.raises(RunFailed, match="the thread that reads the stream failed"):
        list(Pace().newest(source()))
    assert printed.wait(10)
