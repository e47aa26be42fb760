"""The residual stream of a TSM kept rolled in time, so that the shift costs nothing (Lin et al., "TSM", Section 3).

A shift as it is commonly written copies every block's input, in both passes. Here the stream between two shifted blocks
is stored *rolled*: the leading channels of stored frame t are those of frame t + 1, the ones after them those of frame
t - 1. What falls out at a clip's ends, one frame of each group, is stored apart and leaves zeros. So the next block's
convolution reads its input shifted as it lies, and the shortcut is added as it lies. What is left to do is to roll a
branch's output where it is added, a quarter of its channels, and its gradient.

The ends are read once, by the next block's sum. What the backward pass needs to know of them, where relu let them
through, is in the sign of the zeros: nothing is saved that the 2D network does not save, but for a projection's input,
of which the ends are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from summit_train.models.activation import add, relu
from summit_train.models.native import kernels
from summit_train.models.native.kernels import Layout, Segment, Stored
from summit_train.models.shift import shifted_copy


@dataclass(frozen=True)
class Roll:
    """How clips of `num_frames` frames are stored: channels [0, from_next) of stored frame t are those of frame t + 1,
    the `from_previous` after them those of frame t - 1; all others are frame t's own.

    What falls out has from_next + from_previous channels: frame 0's of the first group, the last frame's of the second.
    Nothing here is any business of autograd's.
    """

    num_frames: int
    from_next: int
    from_previous: int

    def stored(self, x: torch.Tensor) -> Stored:
        """A copy of frames (N*T, C, H, W), each in its place, rolled, and what fell out."""
        x = x.detach()
        if kernels.available(x):
            return kernels.moved(Stored(x, None), layout_of(x.shape[1], None, self))
        copy = x.clone()
        self.turn_(copy)
        return Stored(copy, self.take_ends(copy))

    def restored(self, frames: torch.Tensor, ends: torch.Tensor, stride: int = 1) -> torch.Tensor:
        """Every `stride`-th pixel of rolled frames, each in its place: a copy. `ends` are of these pixels."""
        frames, ends = frames.detach(), ends.detach()
        if kernels.available(frames):
            ends = ends.contiguous(memory_format=torch.channels_last)
            return kernels.moved(Stored(frames, ends), layout_of(frames.shape[1], self, None), stride=stride).frames
        copy = frames[..., ::stride, ::stride].clone()
        self.put_ends(copy, ends)
        self.turn_back_(copy)
        return copy

    def shifted(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """The temporal shift of `x`, `stored` without what fell out; back: its transpose, for gradients."""
        if kernels.available(x):
            layout = layout_of(x.shape[1], self, None) if back else layout_of(x.shape[1], None, self)
            return kernels.moved(Stored(x.detach(), None), layout, ends_wanted=False).frames
        return shifted_copy(x.detach(), self.num_frames, self.from_next, self.from_previous, -1 if back else 1)

    def turn_(self, x: torch.Tensor) -> None:
        """Roll frames in place, what falls out around the clip's ends."""
        for frames, step in self._groups(x):
            _turn_(frames, step)

    def turn_back_(self, x: torch.Tensor) -> None:
        """Undo `turn_`."""
        for frames, step in self._groups(x):
            _turn_(frames, -step)

    def ends_of(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of what `turn_` brought around the ends of `x`."""
        ends = [frames[:, -1 if step > 0 else 0] for frames, step in self._groups(x)]
        return torch.cat(ends or [x[:: self.num_frames, :0]], 1)

    def put_ends(self, x: torch.Tensor, ends: torch.Tensor) -> None:
        """Write what `turn_back_` will bring around the ends of `x`."""
        begin = 0
        for frames, step in self._groups(x):
            end = begin + frames.shape[2]
            frames[:, -1 if step > 0 else 0] = ends[:, begin:end]
            begin = end

    def take_ends(self, x: torch.Tensor) -> torch.Tensor:
        """`ends_of`, which leave zeros in `x`: negative ones where relu gives 0."""
        ends = self.ends_of(x)
        self.put_ends(x, torch.where(ends <= 0, -0.0, 0.0).to(ends.dtype))
        return ends

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
        first, both = self.cuts
        if self.from_next:
            yield clips[:, :, :first], 1
        if self.from_previous:
            yield clips[:, :, first:both], -1


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
    """For the kernels: a shortcut stored as `before` says, a result as `after` does; None: every frame in its place."""
    rolls = [roll for roll in (before, after) if roll is not None]
    if not rolls:  # Then it is all the same what a clip is.
        return Layout(1, (Segment(0, channels, 0, 0),))
    starts = sorted({0, channels, *(cut for roll in rolls for cut in roll.cuts)})
    places = [[0 if roll is None else roll.place_of(begin) for roll in (before, after)] for begin in starts[:-1]]
    segments = [Segment(begin, end, *place) for (begin, end), place in zip(pairwise(starts), places, strict=True)]
    ends = (None if roll is None else roll.cuts[1] for roll in (before, after))
    return Layout(rolls[0].num_frames, tuple(segments), *ends)


class Stream(NamedTuple):
    """What one block hands to the next: frames (N*T, C, H, W), stored as `roll` says, None with each in its place.

    beside: the same memory once more, for the shortcut. Its gradient then comes apart from the frames', and need not be
    added to it in a pass of its own. ends: what fell out of the clips, None where nothing is rolled.
    """

    frames: torch.Tensor
    beside: torch.Tensor
    ends: torch.Tensor | None = None
    roll: Roll | None = None

    def unrolled(self) -> torch.Tensor:
        """A copy with every frame in its place; autograd does not see through it."""
        if self.roll is None or self.ends is None:
            return self.frames.detach().clone()
        return self.roll.restored(self.frames, self.ends)

    @classmethod
    def of(cls, frames: torch.Tensor) -> Stream:
        """Frames in their places, whose readers' gradients autograd adds up."""
        return cls(frames, frames)


class _Join(torch.autograd.Function):
    """relu(branch + shortcut) and what fell out of it: the shortcut is stored as `before` says, the result as `after`.

    Gradients are stored as what they belong to; where branch and shortcut are stored alike they get one.
    """

    @staticmethod
    def forward(
        ctx: Any, branch: torch.Tensor, shortcut: torch.Tensor, ends: torch.Tensor | None,
        before: Roll | None, after: Roll | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        branch_ends = None
        if before is not None:
            before.turn_(branch)
            branch_ends = before.ends_of(branch)
        out = relu(add(branch, shortcut))
        if before is not None:
            before.put_ends(out, relu(add(cast(torch.Tensor, branch_ends), cast(torch.Tensor, ends))))
        if before != after:
            if before is not None:
                before.turn_back_(out)
            if after is not None:
                after.turn_(out)
        out_ends = None if after is None else after.take_ends(out)
        if out is branch:
            ctx.mark_dirty(branch)
        ctx.save_for_backward(out)
        ctx.rolls = before, after
        return out, out_ends

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, ends_grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        before, after = ctx.rolls
        # In the layout of the activation, which that of the last one's gradient is not.
        stored = torch.empty_like(out)
        torch.ops.aten.threshold_backward.grad_input(grad, out, 0, grad_input=stored)
        branch = stored
        if after is not None:
            passed = torch.where(after.ends_of(out).signbit(), 0.0, cast(torch.Tensor, ends_grad))
            branch = after.restored(stored, passed)
            if before == after:
                after.put_ends(stored, torch.zeros_like(passed))
                return branch, stored, passed, None, None
        if before is None:
            return branch, branch, None, None, None
        return branch, *before.stored(branch), None, None


# Function.apply carries no types of its own.
join = cast(
    "Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Roll | None, Roll | None],"
    " tuple[torch.Tensor, torch.Tensor | None]]",
    _Join.apply,
)
