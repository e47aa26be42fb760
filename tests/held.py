"""What autograd holds between a forward and a backward pass: bytes over time, and elements of distinct tensors."""

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


class Kept:
    """Elements of the distinct tensors that were noted: floats, and 64-bit indices; without those of one dimension."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._elements = Counter[tuple[bool, int]]()

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() >= 2 and storage.data_ptr() not in self._ignored:
            # A view keeps all of its storage.
            key = (tensor.dtype == torch.int64, storage.data_ptr())
            self._elements[key] = storage.nbytes() // tensor.element_size()
        return tensor

    def elements(self, *, indices: bool = False) -> int:
        return sum(number for (is_index, _), number in self._elements.items() if is_index == indices)


@contextmanager
def kept(parameters: Iterable[torch.Tensor]) -> Iterator[Kept]:
    """Note what autograd keeps in the block, but the parameters."""
    noted = Kept(parameters)
    with torch.autograd.graph.saved_tensors_hooks(noted.note, lambda tensor: tensor):
        yield noted
