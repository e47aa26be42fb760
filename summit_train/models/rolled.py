"""The residual stream of a TSM kept rolled in time, so that the shift costs nothing (Lin et al., "TSM", Section 3).

A shift as it is commonly written copies every block's input, in both passes. Here the stream between two shifted blocks
is stored *rolled*: the leading channels of stored frame t are those of frame t + 1, the ones after them those of frame
t - 1, around the clip's ends, so that nothing is lost. The next convolution then finds its input shifted but for what
came round the ends, one frame of each group, which is blanked while it runs and put back after it, bit for bit. The
shortcut is added as it lies. What is left to do is to roll a branch's output before it is added, a quarter of its
channels within its own memory, and its gradient. Nothing is saved that the 2D network does not save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from summit_train.models.activation import add, relu
from summit_train.models.native import kernels
from summit_train.models.native.kernels import Layout, Segment


@dataclass(frozen=True)
class Roll:
    """How clips of `num_frames` frames are stored: channels [0, from_next) of stored frame t are those of frame t + 1,
    the `from_previous` after them those of frame t - 1, around the ends; all others are frame t's own.

    Its methods take frames (N*T, C, H, W) of any memory format whose elements share no memory.
    """

    num_frames: int
    from_next: int
    from_previous: int

    def roll_(self, x: torch.Tensor) -> None:
        """Store `x`, which has every frame in its place, rolled; in place, and no business of autograd's."""
        for frames, step in self._groups(x):
            _turn_(frames, step)

    def unroll_(self, x: torch.Tensor) -> None:
        """Undo `roll_`."""
        for frames, step in self._groups(x):
            _turn_(frames, -step)

    def rolled(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`, rolled; no business of autograd's."""
        copy = x.detach().clone()
        self.roll_(copy)
        return copy

    def unrolled(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a rolled `x` with every frame in its place; no business of autograd's."""
        copy = x.detach().clone()
        self.unroll_(copy)
        return copy

    def blank_(self, x: torch.Tensor) -> None:
        """Make of a rolled `x` a shifted one: zeros for what came round the ends."""
        for end in self._ends(x):
            end.zero_()

    @contextmanager
    def blanked(self, x: torch.Tensor) -> Iterator[None]:
        """`blank_`; after the block, also one that fails, `x` is as before."""
        if kernels.available(x):
            layout = layout_of(x.shape[1], None, self)
            kernels.put_away(x.data, layout)
            try:
                yield
            finally:
                kernels.put_back(x.data, layout)
            return
        values = [end.clone() for end in self._ends(x)]
        self.blank_(x)
        try:
            yield
        finally:
            for end, value in zip(self._ends(x), values, strict=True):
                end.copy_(value)

    @contextmanager
    def shifted(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """`x` shifted, for as long as the block takes: a copy, or where no kernel makes one, `x` itself meanwhile.

        After the block, also one that fails, `x` is as before.
        """
        if kernels.available(x):
            yield kernels.moved(x.data, layout_of(x.shape[1], None, self), blank=True)
            return
        self.roll_(x)
        try:
            with self.blanked(x):
                yield x
        finally:
            self.unroll_(x)

    def of_shifted(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient to what was shifted, of that to the shifted one, which may be changed."""
        if kernels.available(grad):
            return kernels.moved(grad, layout_of(grad.shape[1], self, None), blank=True)
        self.blank_(grad)
        self.unroll_(grad)
        return grad

    def pixels(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        """Every `stride`-th pixel of a rolled `x`, with every frame in its place; no business of autograd's."""
        if kernels.available(x):
            return kernels.moved(x.data, layout_of(x.shape[1], self, None), stride=stride, blank=False)
        return self.unrolled(x[..., ::stride, ::stride])

    @property
    def cuts(self) -> tuple[int, int]:
        """The channels behind the first group, and behind the second."""
        return self.from_next, self.from_next + self.from_previous

    def place_of(self, channel: int) -> int:
        """In which frame, counted from its own, that channel of a frame is stored."""
        first, both = self.cuts
        return -1 if channel < first else 1 if channel < both else 0

    def _groups(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """The groups of channels that move, as views (N, T, c, H, W), with the step that each takes its frames from."""
        # .data: with a version of its own, as autograd takes no notice.
        clips = x.data.view(-1, self.num_frames, *x.shape[1:])
        both = self.from_next + self.from_previous
        if self.from_next:
            yield clips[:, :, : self.from_next], 1
        if self.from_previous:
            yield clips[:, :, self.from_next : both], -1

    def _ends(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [frames[:, -1 if step > 0 else 0] for frames, step in self._groups(x)]


def _turn_(frames_NTCHW: torch.Tensor, step: int) -> None:
    """In place: frame t becomes frame t + step (+1 or -1), around the clip's ends."""
    if frames_NTCHW.device.type != "cpu":  # Few kernels count there, and on a CPU that no memory is new.
        values = frames_NTCHW.clone()
        inner, outer = (slice(None, -1), slice(1, None))[::step]
        frames_NTCHW[:, inner] = values[:, outer]
        frames_NTCHW[:, -1 if step > 0 else 0] = values[:, 0 if step > 0 else -1]
        return
    order = range(frames_NTCHW.shape[1])[::step]
    fell_out = frames_NTCHW[:, order[0]].clone()
    for target, source in pairwise(order):
        frames_NTCHW[:, target].copy_(frames_NTCHW[:, source])
    frames_NTCHW[:, order[-1]].copy_(fell_out)


@cache
def layout_of(channels: int, before: Roll | None, after: Roll | None) -> Layout:
    """For the kernels: a shortcut stored as `before` says, a result as `after` does; None is unrolled."""
    rolls = [roll for roll in (before, after) if roll is not None]
    if not rolls:  # Then it is all the same what a clip is.
        return Layout(1, (Segment(0, channels, 0, 0, 0, 0),))
    starts = sorted({0, channels, *(cut for roll in rolls for cut in roll.cuts)})
    segments = []
    for begin, end in pairwise(starts):
        source = 0 if after is None else -after.place_of(begin)
        place = 0 if before is None else before.place_of(begin)
        segments.append(Segment(begin, end, source, source + place, place, -source))
    return Layout(rolls[0].num_frames, tuple(segments))


class Rolled(NamedTuple):
    """A stream as it is stored, frames (N*T, C, H, W), and how."""

    frames: torch.Tensor
    roll: Roll

    def unrolled(self) -> torch.Tensor:
        """A copy with every frame in its place; autograd does not see through it."""
        return self.roll.unrolled(self.frames)


class _Join(torch.autograd.Function):
    """relu(branch + shortcut): the shortcut is stored as `before` says, the result as `after` does; None is unrolled.

    Gradients are stored as what they belong to; where branch and shortcut are stored alike they get one.
    """

    @staticmethod
    def forward(
        ctx: Any, branch: torch.Tensor, shortcut: torch.Tensor, before: Roll | None, after: Roll | None
    ) -> torch.Tensor:
        if before is not None:
            before.roll_(branch)
        out = relu(add(branch, shortcut))
        if before != after:
            if before is not None:
                before.unroll_(out)
            if after is not None:
                after.roll_(out)
        if out is branch:
            ctx.mark_dirty(branch)
        ctx.save_for_backward(out)
        ctx.rolls = before, after
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        before, after = ctx.rolls
        # In the layout of the activation, which that of the last one's gradient is not.
        stored = torch.empty_like(out)
        torch.ops.aten.threshold_backward.grad_input(grad, out, 0, grad_input=stored)
        branch = stored if after is None else after.unrolled(stored)
        if before == after:
            return branch, stored, None, None
        return branch, branch if before is None else before.rolled(branch), None, None


# Function.apply carries no types of its own.
join = cast("Callable[[torch.Tensor, torch.Tensor, Roll | None, Roll | None], torch.Tensor]", _Join.apply)
