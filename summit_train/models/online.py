"""Online TSM: a past-only network, frame by frame, with a cached slice for each shift (Lin et al., section 4.2)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from summit_train.models.shift import TemporalShift, num_shifted_channels
from summit_train.models.video import VideoNetwork


@dataclass
class Caches:
    """The slices that the shifts pass from frame to frame, in the order in which the shifts run."""

    before: Sequence[torch.Tensor] = ()  # of the previous frame, empty at a stream's start
    after: list[torch.Tensor] = field(default_factory=list)  # of this frame, of the shifts that have run


class CachedShift(nn.Module):
    """The past-only shift of a stream: the first channels come from the previous frame, zeros at a stream's start."""

    def __init__(self, fraction: float, caches: Caches) -> None:
        super().__init__()
        self.fraction = fraction
        self._caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift frames (N, C, H, W), each of another stream."""
        caches = self._caches
        fold = num_shifted_channels(x.shape[1], self.fraction)
        previous = caches.before[len(caches.after)] if caches.before else torch.zeros_like(x[:, :fold])
        caches.after.append(x[:, :fold])
        # Concatenation, not assignment to a slice: exporters fold an assignment away and freeze what it assigns.
        return torch.cat([previous, x[:, fold:]], 1)


class StreamNetwork(nn.Module):
    """A copy of a past-only TSM, or of its 2D twin, that sees one frame at a time: float (N, C, H, W) of N streams.

    The logits of frame t are those that the network itself gives frame t of a clip, to rounding: they depend on frames
    up to t alone. The state is explicit: tensors (N, fold, H', W') go in and come out, one for each shift, in the order
    in which the shifts run; each is the input of that shift, unshifted. Raises ValueError for a bidirectional shift and
    for an accelerated network; `spec.checks.stream_problem` lists all that cannot stream.
    """

    def __init__(self, network: VideoNetwork) -> None:
        super().__init__()
        if network.execution != "plain":
            raise ValueError(f"a stream needs a plain network, got one that runs {network.execution}")
        self.network = copy.deepcopy(network).eval()
        self._caches = Caches()
        for name, module in list(self.network.named_modules()):
            if isinstance(module, TemporalShift):
                if module.direction != "past":
                    raise ValueError(f"{name} needs the next frame, which a stream does not have")
                self.network.set_submodule(name, CachedShift(module.fraction, self._caches))

    def forward(
        self, frames_NCHW: torch.Tensor, caches: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits (N, num_classes) of the streams' next frames, and the caches for the frames after them.

        caches: those returned for the previous frames; without them the streams start.
        """
        self._caches.before = caches
        self._caches.after = []
        logits = self.network.classify(self.network.extract(frames_NCHW))
        return logits, self._caches.after


def cache_shapes(network: VideoNetwork, height: int, width: int) -> list[tuple[int, ...]]:
    """Return the shape (fold, H', W') of each cached slice of one stream of `height` x `width` pixels."""
    with torch.inference_mode():
        _, caches = StreamNetwork(network).to("meta")(torch.empty(1, network.in_channels, height, width, device="meta"))
    return [tuple(cache.shape[1:]) for cache in caches]
