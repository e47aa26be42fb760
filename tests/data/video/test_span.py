"""A span: which frames of a video it has."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import TO_THE_END, WHOLE, Span, SpanError, located_error, span_of


@given(video_frames=st.integers(1, 1000), start=st.integers(0, 1000), end=st.none() | st.integers(0, 1000))
def test_its_frames_lie_in_the_video_or_it_is_refused(video_frames: int, start: int, end: int | None) -> None:
    span = Span(start, TO_THE_END if end is None else end)
    wanted = list(range(video_frames))[start:end] if start < video_frames else []
    if not wanted or (end is not None and end > video_frames):
        with pytest.raises(SpanError, match=f"^v.mp4: has {video_frames} frames, and the span {span} does not lie"):
            span.frames("v.mp4", video_frames)
        return
    assert list(span.frames("v.mp4", video_frames)) == wanted
    assert span.num_frames("v.mp4", video_frames) == len(wanted)
    every = span.chosen_in("v.mp4", lambda n: np.arange(n))
    assert every(video_frames).tolist() == wanted


def test_the_whole_video_is_the_usual_span() -> None:
    assert Span() == WHOLE == (0, TO_THE_END)
    assert WHOLE.chosen_in("v", lambda n: np.array([n - 1]))(7).tolist() == [6]
    assert (Span(0, 4).cells, Span(3).cells, WHOLE.cells) == (("", "4"), ("3", ""), ("", ""))


def test_an_error_travels_between_processes_with_its_span() -> None:
    error = pickle.loads(pickle.dumps(SpanError("a.mp4", "is outside", Span(3, 9))))
    assert (str(error), span_of(error)) == ("a.mp4: is outside", Span(3, 9))
    assert type(located_error("a", "b", WHOLE)) is DecodeError
    assert span_of(located_error("a", "b", WHOLE)) == WHOLE
