"""Send plain values, arrays and tensors between ranks. Nothing that is received can run code.

A value becomes JSON text and the bytes of its arrays. First come two lengths; then, as one message, the text and the
small arrays; then each larger array in pieces, straight from the sender's memory into the receiver's. Only the type and
shape of a tensor on the meta device are sent.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch  # for the types alone: commands that need no torch send values too

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Pass = Callable[[Bytes], object]  # sends the bytes of an array as one message, or fills the array from one
Start = Callable[[Bytes, int], Callable[[], object]]  # begins to receive from a rank; returns what waits for it
Known = dict[int, tuple[int, Any]]  # by the id of an array: its number, in the order of sending, and itself

PIECE = 64 << 20  # the most bytes of a message; MPI counts up to 2 GiB
_SMALL = 1 << 16
_PACKAGE = "summit_train"
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}


def broadcast(value: T, rank: int, share: Pass) -> T:
    """Return rank 0's value on every rank. share: sends a message of rank 0, and receives it elsewhere (`receive`)."""
    if rank > 0:
        return cast(T, receive(share))
    send(value, share)
    return value


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], rank: int, share: Pass) -> None:
    """Copy rank 0's numbers into the tensors of every rank. Small tensors go in one message.

    A large tensor that is contiguous and on the CPU is sent and received in place.
    """
    small = {name: tensor for name, tensor in tensors.items() if tensor.nbytes < _SMALL}
    for name, numbers in broadcast(small, rank, share).items():
        if rank > 0:
            small[name].detach().copy_(numbers)
    for name, tensor in tensors.items():
        if name in small:
            continue
        message = tensor.detach().cpu().contiguous()
        _pass(_flat(message), share)
        if rank > 0 and message.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(message)


def gather(value: T, rank: int, size: int, put: Pass, start: Start) -> list[T] | None:
    """Return the values of all ranks on rank 0, which waits for all at once, but for large arrays one by one.

    put: sends a message to rank 0.
    """
    if rank > 0:
        send(value, put)
        return None
    lengths = {source: np.empty(2, np.int64) for source in range(1, size)}
    for wait in [start(each.view(np.uint8), source) for source, each in lengths.items()]:
        wait()
    bodies = {source: np.empty(each.sum(), np.uint8) for source, each in lengths.items()}
    for wait in [start(piece, source) for source, body in bodies.items() for piece in _pieces(body)]:
        wait()

    def value_of(source: int) -> Any:
        return _value_of(lengths[source], bodies[source], lambda piece: start(piece, source)())

    return [value, *map(value_of, range(1, size))]


def by_mpi(mpi: Any) -> Start:
    return lambda piece, source: mpi.Irecv(piece, source=source).wait


def send(value: object, put: Pass) -> None:
    """Send a value. Raises TypeError, before anything is sent, for a type that a receiver would not make."""
    known: Known = {}
    text = json.dumps(_described(value, known)).encode("ascii")
    arrays = [array for _, array in known.values()]
    small = b"".join(_flat(array).tobytes() for array in arrays if array.nbytes < _SMALL)
    put(np.array([len(text), len(small)]).view(np.uint8))
    _pass(np.frombuffer(text + small, np.uint8), put)
    for array in arrays:
        if array.nbytes >= _SMALL:
            _pass(_flat(array), put)


def receive(take: Pass) -> Any:
    """Return the value that another rank sends."""
    lengths = np.empty(2, np.int64)
    take(lengths.view(np.uint8))
    body = np.empty(lengths.sum(), np.uint8)
    _pass(body, take)
    return _value_of(lengths, body, take)


def _value_of(lengths: NDArray[np.int64], body: Bytes, take: Pass) -> Any:
    """Return the value whose text and small arrays are in `body`; `take` receives its large arrays."""
    text = body[: lengths[0]].tobytes()
    small = io.BytesIO(body[lengths[0] :].tobytes())

    def fill(flat: Bytes) -> None:
        small.readinto(flat.data) if len(flat) < _SMALL else _pass(flat, take)

    return _made(json.loads(text), fill, [])


def _pieces(flat: Bytes) -> list[Bytes]:
    return [flat[start : start + PIECE] for start in range(0, len(flat), PIECE)]


def _pass(flat: Bytes, move: Pass) -> None:
    for piece in _pieces(flat):
        move(piece if piece.flags.writeable else piece.copy())  # torch and MPI want to be able to write, as into a map


def _flat(array: Any) -> Bytes:
    """Return the bytes of an array or a tensor: its own memory where that is in order, else a copy."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    import torch

    return cast(Bytes, array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _described(value: Any, known: Known) -> Any:
    """Return what JSON has of a value: itself, or a list that begins with its kind. Its arrays are added to `known`."""
    kind = type(value)
    torch = sys.modules.get("torch")  # before torch is imported no value is a tensor
    is_plain = kind in (bool, float) or (kind is str and value.isascii()) or (kind is int and abs(value) < 1 << 63)
    if value is None or is_plain:
        return value
    if kind is str:  # JSON would join two surrogates that Python has one after the other
        return ["str", *map(ord, value)] if any("\ud800" <= letter <= "\udfff" for letter in value) else value
    if kind in _SEQUENCES.values():
        return [_NAMES[kind], *(_described(each, known) for each in value)]
    if kind in _MAPPINGS.values():
        return [_NAMES[kind], *(_described(each, known) for pair in value.items() for each in pair)]
    if torch is not None and kind is torch.Size:
        return ["size", _described(tuple(value), known)]
    if kind is int:
        return ["int", hex(value)]
    if isinstance(value, PurePath):
        return ["path", _described(str(value), known)]
    if kind is bytes:
        return ["bytes", _described(np.frombuffer(value, np.uint8), known)]
    if isinstance(value, np.generic):
        return ["scalar", _described(np.asarray(value), known)]
    if torch is not None and isinstance(value, torch.Tensor) and value.is_meta:
        return ["meta", str(value.dtype).removeprefix("torch."), list(value.shape)]
    is_array = kind in (np.ndarray, np.memmap) and not value.dtype.hasobject
    if is_array or (torch is not None and isinstance(value, torch.Tensor)):
        dtype = repr(np.lib.format.dtype_to_descr(value.dtype)) if is_array else str(value.dtype).removeprefix("torch.")
        number, _ = known.setdefault(id(value), (len(known), value))  # one that occurs twice is sent once
        return ["array" if is_array else "tensor", dtype, list(value.shape), number]
    if kind.__module__.startswith(f"{_PACKAGE}.") and (parts := _parts(value)) is not None:
        return ["type", kind.__module__, kind.__qualname__, _described(parts, known)]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; send plain values of it")


def _parts(value: Any) -> Any:
    """Return what makes up an object of a type of ours, as `_of_parts` takes it; None for other types."""
    if isinstance(value, tuple):
        return tuple(value)
    if isinstance(value, Exception):
        return value.args, vars(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return (dict(value), value.model_fields_set) if hasattr(value, "model_construct") else None  # pydantic's


def _of_parts(module: str, name: str, parts: Any) -> Any:
    """Make an object of a type that a module of this package defines, without its constructor."""
    kind: Any = importlib.import_module(module) if module.startswith(f"{_PACKAGE}.") else None
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or kind.__module__ != module:
        raise TypeError(f"{module}.{name} is not a type of {_PACKAGE}; do all ranks run the same code?")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    if issubclass(kind, Exception):
        made: Any = kind.__new__(kind, *parts[0])
        vars(made).update(parts[1])
        return made
    if hasattr(kind, "model_construct"):
        return kind.model_construct(parts[1], **parts[0])
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(made, field.name, parts[field.name])
    return made


def _made(node: Any, fill: Callable[[Bytes], None], arrays: list[Any]) -> Any:
    """Return the value that `_described` described, given the arrays that are there already and what fills the next."""
    if not isinstance(node, list):
        return node
    kind, *rest = node
    if kind == "str":
        return "".join(map(chr, rest))
    if kind == "int":
        return int(rest[0], 16)
    if kind == "meta":
        torch = sys.modules["torch"]
        return torch.empty(rest[1], dtype=getattr(torch, rest[0]), device="meta")
    if kind in ("array", "tensor"):
        dtype, shape, number = rest
        if number == len(arrays):
            of: Any = np if kind == "array" else sys.modules["torch"]
            its = np.lib.format.descr_to_dtype(ast.literal_eval(dtype)) if of is np else getattr(of, dtype)
            made = of.empty(shape, dtype=its)
            fill(_flat(made))
            arrays.append(made)
        return arrays[number]
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind]()
        for key, each in zip(rest[::2], rest[1::2], strict=True):
            name = _made(key, fill, arrays)
            mapping[name] = _made(each, fill, arrays)
        return mapping
    parts = [_made(each, fill, arrays) for each in rest]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](parts)
    if kind == "size":
        return sys.modules["torch"].Size(parts[0])
    single: dict[str, Callable[[Any], Any]] = {"path": Path, "bytes": bytes, "scalar": lambda array: array[()]}
    return _of_parts(*parts) if kind == "type" else single[kind](parts[0])
