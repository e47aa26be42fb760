"""Send plain values, arrays and tensors between ranks. Nothing that is received can run code.

A value becomes JSON text, and the bytes of its arrays. Text and small arrays travel together, with their lengths in
front: a short value is one message. A larger array goes in pieces from its own memory into that of its copy.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Bytes = NDArray[np.uint8]
# Sends the bytes of an array as one message, or fills the array from one. It has at most PIECE bytes.
Pass = Callable[[Bytes], object]

PIECE = 64 << 20  # MPI counts up to 2 GiB
_FIRST = 1024  # bytes of the first message: two lengths, and the beginning of what they are of
_LENGTHS = 16
_SMALL = 1 << 16  # arrays below are copied into one message
_PACKAGE = "summit_train"
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}


def broadcast(value: T, rank: int, share: Pass) -> T:
    """Return rank 0's value on every rank. share: sends a message of rank 0, and receives it elsewhere."""
    if rank > 0:
        return cast(T, receive(share))
    send(value, share)
    return value


def gather(value: T, rank: int, size: int, put: Pass, take: Callable[..., object]) -> list[T] | None:
    """Return the values of all ranks on rank 0. put: sends a message to rank 0; take: receives one of rank `source`."""
    if rank > 0:
        send(value, put)
        return None
    return [value, *(receive(partial(take, source=source)) for source in range(1, size))]


def send(value: object, put: Pass) -> None:
    """Send a value by `put`, which is called once for each message.

    Raises TypeError, before anything is sent, for a type that a receiver would not make.
    """
    known: dict[int, tuple[int, Any]] = {}
    text = json.dumps(_described(value, known)).encode("ascii")
    arrays = [array for _, array in known.values()]
    small = [_flat(array).tobytes() for array in arrays if array.nbytes < _SMALL]
    body = np.frombuffer(bytearray(text) + b"".join(small), np.uint8)
    first = np.zeros(_FIRST, np.uint8)
    first[:_LENGTHS].view(np.int64)[:] = len(text), len(body)
    begun = body[: _FIRST - _LENGTHS]
    first[_LENGTHS : _LENGTHS + len(begun)] = begun
    put(first)
    for piece in _pieces(body[len(begun) :]):
        put(piece)
    for array in arrays:
        for piece in _pieces(_flat(array)) if array.nbytes >= _SMALL else ():
            # Neither torch nor MPI takes what cannot be written to, as a mapped file.
            put(piece if piece.flags.writeable else piece.copy())


def receive(take: Pass) -> Any:
    """Return the value that another rank sends, given what fills an array from its next message."""
    first = np.empty(_FIRST, np.uint8)
    take(first)
    text_length, length = first[:_LENGTHS].view(np.int64).tolist()
    body = np.empty(length, np.uint8)
    begun = first[_LENGTHS : _LENGTHS + length]
    body[: len(begun)] = begun
    _filled(body[len(begun) :], take)
    return _Receiver(body[text_length:], take).made(json.loads(body[:text_length].tobytes()))


def _pieces(flat: Bytes) -> Iterator[Bytes]:
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def _filled(flat: Bytes, take: Pass) -> Bytes:
    for piece in _pieces(flat):
        take(piece)
    return flat


def _flat(array: Any) -> Bytes:
    """Return the bytes of an array or a tensor: its own memory where that is in order, else a copy."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    import torch

    flat: Bytes = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _described(value: Any, arrays: dict[int, tuple[int, Any]]) -> Any:
    """Return what JSON has of a value: itself, or a list that begins with its kind. Its arrays are added to `arrays`.

    Each has a number, by its id: one that occurs twice is sent once.
    """
    kind = type(value)
    if value is None or kind in (bool, float) or (kind is int and abs(value) < 1 << 63):
        return value
    if kind is str:  # Python would join two surrogates that JSON has one after the other
        is_plain = value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
        return value if is_plain else ["str", *map(ord, value)]
    if kind in _SEQUENCES.values():
        return [_NAMES[kind], *(_described(each, arrays) for each in value)]
    if kind in _MAPPINGS.values():
        return [_NAMES[kind], *(_described(each, arrays) for pair in value.items() for each in pair)]
    if kind is int:
        return ["int", hex(value)]
    if isinstance(value, PurePath):
        return ["path", _described(str(value), arrays)]
    if kind is bytes:
        return ["bytes", _described(np.frombuffer(value, np.uint8), arrays)]
    if isinstance(value, np.generic):
        return ["scalar", _described(np.asarray(value), arrays)]
    if (about := _about(value)) is not None:
        return [*about, arrays.setdefault(id(value), (len(arrays), value))[0]]
    if kind.__module__.startswith(f"{_PACKAGE}.") and (parts := _parts(value)) is not None:
        return ["type", kind.__module__, kind.__qualname__, _described(parts, arrays)]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; send plain values of it")


def _about(value: Any) -> list[Any] | None:
    """Return kind, type and shape of an array or a tensor; None for other values."""
    if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        return ["array", repr(np.lib.format.dtype_to_descr(value.dtype)), list(value.shape)]
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    return None


def _parts(value: Any) -> Any:
    """Return what makes up an object of a type of ours, as `_of_parts` takes it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value)
    if isinstance(value, Exception):
        return value.args, vars(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_construct"):  # pydantic's
        return dict(value), value.model_fields_set
    return None


def _of_parts(kind: Any, parts: Any) -> Any:
    """Make an object of a type of ours without its constructor."""
    if issubclass(kind, enum.Enum):
        return kind[parts]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    if issubclass(kind, Exception):
        error = kind.__new__(kind, *parts[0])
        vars(error).update(parts[1])
        return error
    if hasattr(kind, "model_construct"):
        return kind.model_construct(parts[1], **parts[0])
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, parts[field.name])
    return made


def _type_named(module: str, name: str) -> Any:
    """Return a class that a module of this package defines."""
    found: Any = importlib.import_module(module) if module.startswith(f"{_PACKAGE}.") else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or found.__module__ != module:
        raise TypeError(f"{module}.{name} is no class of {_PACKAGE}; do all ranks run the same code?")
    return found


class _Receiver:
    """Makes a value again. The arrays come in the order in which the text names them: the small ones from `small`."""

    def __init__(self, small: Bytes, take: Pass) -> None:
        self._small, self._take = small, take
        self._arrays: list[Any] = []

    def made(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == "str":
            return "".join(map(chr, rest))
        if kind == "int":
            return int(rest[0], 16)
        if kind in ("array", "tensor"):
            return self._array(kind, *rest)
        parts = [self.made(each) for each in rest]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](parts)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](zip(parts[::2], parts[1::2], strict=True))
        if kind == "type":
            return _of_parts(_type_named(*parts[:2]), parts[2])
        made: dict[str, Callable[[Any], Any]] = {"path": Path, "bytes": bytes, "scalar": lambda array: array[()]}
        return made[kind](parts[0])

    def _array(self, kind: str, dtype: str, shape: list[int], number: int) -> Any:
        if number == len(self._arrays):
            self._arrays.append(self._next(kind, dtype, shape))
        return self._arrays[number]

    def _next(self, kind: str, dtype: str, shape: list[int]) -> Any:
        made: Any
        if kind == "array":
            made = np.empty(shape, np.lib.format.descr_to_dtype(ast.literal_eval(dtype)))
        else:
            import torch

            made = torch.empty(shape, dtype=getattr(torch, dtype))
        flat = _flat(made)
        if made.nbytes >= _SMALL:
            _filled(flat, self._take)
        else:
            flat[:], self._small = self._small[: made.nbytes], self._small[made.nbytes :]
        return made
