"""Memory of a training step: what autograd keeps for the backward pass, and the peak of the process."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Activations:
    """Counts the bytes that autograd holds between forward and backward pass; `most_bytes` is their peak.

    Tensors that share memory count once. The given parameters do not count: they are in memory anyway.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}
        self._bytes = 0
        self.most_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is saved within the block."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor):
            yield

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._ignored:
            return
        if key not in self._holders:
            self._bytes += storage.nbytes()
            self.most_bytes = max(self.most_bytes, self._bytes)
        self._holders[key] = self._holders.get(key, 0) + 1

    def release(self, tensor: torch.Tensor) -> None:
        """Discount a tensor that autograd releases."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._holders:
            return
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self._bytes -= storage.nbytes()


class _Saved:
    """A saved tensor that tells its release."""

    def __init__(self, tensor: torch.Tensor, activations: Activations) -> None:
        self.tensor, self._activations = tensor, activations
        activations.hold(tensor)

    def __del__(self) -> None:
        self._activations.release(self.tensor)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the device's tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
