"""Memory of a training step: what autograd keeps for the backward pass, and the peak of the process."""

from __future__ import annotations

import resource
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Activations:
    """Counts the bytes that autograd holds between forward and backward pass; `most_bytes` is their peak.

    Tensors that share memory count once. The given parameters do not count: they are in memory anyway.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: Counter[int] = Counter()  # by address
        self._bytes = 0
        self.most_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is saved within the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._hold, lambda saved: saved.tensor):
            yield

    def _hold(self, tensor: torch.Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        saved, key = _Saved(tensor), storage.data_ptr()
        if key not in self._ignored:
            self._bytes += 0 if self._holders[key] else storage.nbytes()
            self.most_bytes = max(self.most_bytes, self._bytes)
            self._holders[key] += 1
            weakref.finalize(saved, self._release, key, storage.nbytes()).atexit = False
        return saved

    def _release(self, key: int, num_bytes: int) -> None:
        self._holders[key] -= 1
        self._bytes -= 0 if self._holders[key] else num_bytes


@dataclass(eq=False)
class _Saved:
    """A saved tensor that tells its release."""

    tensor: torch.Tensor


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the device's tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
