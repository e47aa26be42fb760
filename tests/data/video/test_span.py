"""A span: which frames of a video it has."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.data.video.span import TO_THE_END, WHOLE, DecodeError, Span


@given(video_frames=st.integers(1, 1000), start=st.integers(0, 1000), end=st.none() | st.integers(0, 1000))
def test_its_frames_lie_in_the_video_or_it_is_refused(video_frames: int, start: int, end: int | None) -> None:
    span = Span(start, TO_THE_END if end is None else end)
    expected = list(range(video_frames))[start:end] if start < video_frames else []
    if not expected or (end is not None and end > video_frames):
        with pytest.raises(DecodeError, match=f"^v.mp4: has {video_frames} frames, and the span {span} does not lie"):
            span.frames("v.mp4", video_frames)
        return
    assert list(span.frames("v.mp4", video_frames)) == expected
    assert span.chosen_in("v.mp4", lambda n: np.arange(n))(video_frames).tolist() == expected


def test_the_whole_video_is_the_usual_span() -> None:
    assert Span() == WHOLE == (0, TO_THE_END)
    assert (Span(0, 4).cells, Span(3).cells, WHOLE.cells) == (("", "4"), ("3", ""), ("", ""))


def test_an_error_travels_between_processes_with_its_span() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("a.mp4", "is outside", Span(3, 9))))
    assert (error.path, error.reason, str(error), error.span) == (
        "a.mp4", "is outside", "a.mp4: is outside", Span(3, 9)
    )  # fmt: skip
    assert DecodeError("a", "b").span == WHOLE
