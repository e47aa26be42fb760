"""Score videos frame by frame: the running average of a stream's logits, after parts of a video or all of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import Store
from summit_train.data.batches.walk import Piece, StreamedFrames, Walk, walks
from summit_train.data.video.source import DecodeError
from summit_train.models.network import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise, parameter_type
from summit_train.spec import DataSpec, EvaluateSpec, Spec


@dataclass(frozen=True)
class Streamer:
    """What streams videos: the network, and what makes its input of the loader's bytes."""

    network: StreamNetwork
    normalise: Normalise
    num_classes: int


def streamer_of(model: nn.Module, spec: Spec, device: torch.device) -> Streamer:
    """Return the stream of the network that `model` is, with its weights, however it is executed."""
    dtype = parameter_type(spec.precision)
    # A plain one: an accelerated network has fused the shifts that a stream replaces. The names are the same.
    plain = build_network(spec, torch.Generator()).to(device=device, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    return Streamer(StreamNetwork(plain), Normalise(dtype, device, spec.data.input), spec.model.num_classes)


class Streaming:
    """One video on its way through a stream, in one crop or several.

    order: the numbers of the frames that the stream sees, rising, some perhaps twice. edges: frame numbers, rising.
    """

    def __init__(self, streamer: Streamer, order: Sequence[int], edges: Sequence[int]) -> None:
        self._streamer, self._times, self._edges = streamer, Counter(order), edges
        self._caches: list[torch.Tensor] = []
        self._sum, self._num_seen = torch.zeros((), dtype=torch.float64), 0
        self._averages: list[torch.Tensor | None] = [None] * len(edges)

    def see(self, piece: Piece) -> None:
        """Take the frames of the piece that belong to the stream."""
        for place, number in enumerate(piece.numbers.tolist()):
            if not self._times[number]:
                continue
            frame_NCHW = self._streamer.normalise(piece.views[:, place : place + 1])[:, 0]
            for _ in range(self._times[number]):
                logits, self._caches = self._streamer.network(frame_NCHW, self._caches)
                self._sum = self._sum.to(logits.device) + logits.double().mean(0)
                self._num_seen += 1
            later = bisect_right(self._edges, number)  # the edges above it have this frame before them
            self._averages[later:] = [self._sum / self._num_seen] * (len(self._edges) - later)

    def averages(self, unknown_value: float = np.nan) -> np.ndarray:
        """Return the logits averaged over the crops and all frames before each edge, fp64 (len(edges), classes).

        unknown_value: replaces the logits before the first frame.
        """
        unknown = np.full(self._streamer.num_classes, unknown_value)
        return np.stack([unknown if one is None else one.cpu().numpy() for one in self._averages])


def stream_scores(
    streamer: Streamer, data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int]
) -> Iterator[np.ndarray | BadClip]:
    """Yield each video's logits, fp64 (classes,), averaged over all frames and crops, or why it cannot be read.

    Source: the TSM paper (journal version), section 5.5.1 and Table 7: "the prediction averaged from all the frames".
    With data.on_bad_clip "fail" a video that cannot be read raises DecodeError.
    """
    frames = StreamedFrames(data)

    def score(walk: Walk) -> np.ndarray:
        streaming = Streaming(streamer, frames.in_order(walk.num_frames).tolist(), [walk.num_frames])
        for piece in walk.pieces():
            streaming.see(piece)
        average: np.ndarray = streaming.averages()[0]
        return average

    return scored(walks(data, evaluate, store, videos, frames), score, data)


def scored(
    videos: Iterable[Walk], score: Callable[[Walk], np.ndarray], data: DataSpec
) -> Iterator[np.ndarray | BadClip]:
    """Yield the score of each video, or why it cannot be read; DecodeError with data.on_bad_clip "fail"."""
    for walk in videos:
        try:
            found: np.ndarray | BadClip = score(walk)
        except DecodeError as error:
            if data.on_bad_clip == "fail":
                raise
            found = BadClip(walk.video, error.path, error.reason, None)
        yield found
