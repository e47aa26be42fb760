"""The bytes that autograd holds between a forward and a backward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class _Saved:
    """What autograd keeps in place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def held_bytes(parameters: Iterable[torch.Tensor]) -> Iterator[list[int]]:
    """The bytes held after each change within the block, by storage: tensors that share one count once, and the
    parameters, which are in memory anyway, do not count."""
    ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    holders, held = Counter[int](), [0]

    def release(key: int, num_bytes: int) -> None:
        holders[key] -= 1
        held.append(held[-1] - (0 if holders[key] else num_bytes))

    def hold(tensor: torch.Tensor) -> _Saved:
        saved, storage = _Saved(tensor), tensor.untyped_storage()
        if (key := storage.data_ptr()) not in ignored:
            held.append(held[-1] + (0 if holders[key] else storage.nbytes()))
            holders[key] += 1
            weakref.finalize(saved, release, key, storage.nbytes()).atexit = False
        return saved

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda saved: saved.tensor):
        yield held
