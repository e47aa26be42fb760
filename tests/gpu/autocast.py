"""CUDA's autocast for tensors on the meta device, decided by torch's own kernels for it.

A build without CUDA has those kernels, but they cast CUDA tensors alone, which such a build cannot differentiate. So
each operation that they know is asked of them with probes, which look like CUDA tensors and have no gradient, and the
casts that they make are made for the step's own tensors, which are dispatched as those of an idle backend (XPU).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

CUDA, META = torch.device("cuda"), torch.device("meta")
IDLE = "xpu"
_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastXPU"))


def dispatched_as(tensor: torch.Tensor, backend: str) -> torch.Tensor:
    """Return a tensor of the same storage that is dispatched as one of `backend`; its device stays meta."""
    device = torch.device(backend)
    return torch.Tensor._make_subclass(torch.Tensor, tensor, False, device_for_backend_keys=device)


class _Probe(torch.Tensor):
    """A tensor that says it is on a CUDA device."""


class _Cast(Exception):
    """The casts are known."""


class _Casts(TorchDispatchMode):
    """Notes the casts of probes, and ends with _Cast before the first operation that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = dict[int, torch.dtype]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.prim.device.default:
            return CUDA
        if operation is not torch.ops.aten._to_copy.default:
            raise _Cast
        self.dtypes[id(args[0])] = kwargs["dtype"]
        return _probe(dispatched_as(args[0], "meta").to(kwargs["dtype"]))


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(_Probe, tensor, False, dispatch_device=True, device_for_backend_keys=CUDA)


@contextmanager
def _enabled(backend: str, on: bool = True) -> Iterator[None]:
    former = torch.is_autocast_enabled(backend)
    torch.set_autocast_enabled(backend, on)
    try:
        yield
    finally:
        torch.set_autocast_enabled(backend, former)


def _cast(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation as CUDA's autocast would."""
    leaves, structure = tree_flatten((args, kwargs))
    probes = [_probe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    asked = tree_unflatten(probes, structure)
    with suppress(_Cast), _disable_current_modes(), torch.no_grad(), _Casts() as casts, _enabled("cuda"):
        operation(*asked[0], **asked[1])
    dtypes = [casts.dtypes.get(id(probe)) for probe in probes]
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        cast = [leaf if dtype is None else leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        args, kwargs = tree_unflatten(cast, structure)
        # Some take the type of the result, and autocast gives it instead of a cast.
        if any(argument.name == "dtype" for argument in operation._schema.arguments):
            kwargs = {"dtype": torch.float32} | kwargs
        return operation(*args, **kwargs)


@contextmanager
def _autocast(
    device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> Iterator[None]:
    if dtype is not None and device_type == META.type:
        torch.set_autocast_dtype(CUDA.type, dtype)
    with _enabled(_backend(device_type), enabled):
        yield


def _backend(device_type: str) -> str:
    return IDLE if device_type == META.type else device_type


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let torch.autocast on the meta device be CUDA's within the block."""
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the idle backend has kernels of its own
            for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
                name, _, overload = full.removeprefix("aten::").partition(".")
                operation = getattr(getattr(torch.ops.aten, name), overload or "default")
                library.impl(full.removeprefix("aten::"), partial(_cast, operation), "AutocastXPU")
        with (
            patch.object(torch, "autocast", _autocast),
            patch.object(torch.amp, "autocast", _autocast),
            patch.object(torch, "is_autocast_enabled", lambda device: is_enabled(_backend(device))),
            patch.object(torch, "get_autocast_dtype", lambda device: dtype_of("cuda" if device == "meta" else device)),
            patch.object(torch.amp, "is_autocast_available", lambda device: True),
        ):
            yield
