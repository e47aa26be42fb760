"""An augmentation of the user's own: called with each training clip and a keyed generator (docs/own_parts.md)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.data.video.render import Frames


class OwnAugment:
    """Called with a clip, uint8 (T, H, W, C), and the generator of its draws; returns one of that shape and type."""

    def __init__(self, part: OwnPart) -> None:
        self._part = part
        self._vary = part.make("clip", "generator")

    def __call__(self, clip: Frames, generator: np.random.Generator) -> Frames:
        shape = clip.shape
        with _keyed_globals(generator):
            try:
                varied = self._vary(clip, generator)
            except OSError as error:  # which would read as one of the data or of a worker that died
                raise RuntimeError(f"{self._part.key}: {self._part.name}: {error}") from error
        if not isinstance(varied, np.ndarray) or (varied.shape, varied.dtype) != (shape, np.uint8):
            got = f"{varied.dtype} {varied.shape}" if isinstance(varied, np.ndarray) else type(varied).__name__
            raise self._part.wrong(f"a NumPy array uint8 {shape}", got)
        copy: Frames = varied.copy()  # it may be one buffer, which the next call fills again
        return copy


@contextmanager
def _keyed_globals(generator: np.random.Generator) -> Iterator[None]:
    """Seed the global generators, which libraries draw from, by what `generator` would draw; then restore them."""
    state = generator.bit_generator.state
    seed = int(generator.integers(2**32))
    generator.bit_generator.state = state
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for GPUs, too
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def try_augment(part: OwnPart, clip_shape: tuple[int, ...]) -> None:
    """Vary a clip of noise twice. Raises UserError where the results differ, or are not clips."""
    vary = OwnAugment(part)
    noise = rng.key(0, "trial").integers(256, size=clip_shape, dtype=np.uint8)
    first, second = (vary(noise.copy(), rng.key(0, "trial", 1)) for _ in range(2))
    if not np.array_equal(first, second):
        right = "draw only from the generator it receives or global ones, and keep no state between calls"
        raise UserError(f"{part.key}: {part.name} must return the same for the same clip and draws; {right}")
