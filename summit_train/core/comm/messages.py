"""Messages between ranks: JSON, followed by arrays and tensors. Nothing that is received can run code.

First come two lengths; then, as one message, the JSON text and the small arrays; then each larger array in pieces,
straight from the sender's memory into the receiver's. Only the type and shape of a tensor on the meta device are sent.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch  # for the types alone: commands that need no torch send values too

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Transfer = Callable[[Bytes], object]  # sends the bytes of an array as one message, or fills the array from one
Start = Callable[[Bytes, int], Callable[[], object]]  # begins to receive from a rank; returns what waits for it

PIECE = 64 << 20  # the most bytes of a message; MPI counts up to 2 GiB
_SMALL = 1 << 16


def broadcast(value: T, rank: int, transfer: Transfer) -> T:
    """Return rank 0's value on every rank. transfer: sends a message on rank 0, and receives it elsewhere."""
    if rank > 0:
        return cast(T, receive(transfer))
    send(value, transfer)
    return value


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], rank: int, transfer: Transfer) -> None:
    """Copy rank 0's numbers into the tensors of every rank. Small tensors go in one message.

    A large tensor that is contiguous and on the CPU is sent and received in place.
    """
    small = {name: tensor for name, tensor in tensors.items() if tensor.nbytes < _SMALL}
    for name, numbers in broadcast(small, rank, transfer).items():
        if rank > 0:
            small[name].detach().copy_(numbers)
    for name, tensor in tensors.items():
        if name in small:
            continue
        message = tensor.detach().cpu().contiguous()
        _in_pieces(_bytes_of(message), transfer)
        if rank > 0 and message.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(message)


def gather(value: T, rank: int, size: int, send_bytes: Transfer, start: Start) -> list[T] | None:
    """Return the values of all ranks on rank 0, which waits for all at once, but for large arrays one by one.

    send_bytes: sends a message to rank 0.
    """
    if rank > 0:
        send(value, send_bytes)
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


def send(value: object, send_bytes: Transfer) -> None:
    """Send a value. Raises TypeError, before anything is sent, for one that `encode` does not take."""
    arrays = list[Any]()
    text = json.dumps(encode(value, arrays)).encode("ascii")
    small = b"".join(_bytes_of(array).tobytes() for array in arrays if array.nbytes < _SMALL)
    send_bytes(np.array([len(text), len(small)]).view(np.uint8))
    _in_pieces(np.frombuffer(text + small, np.uint8), send_bytes)
    for array in arrays:
        if array.nbytes >= _SMALL:
            _in_pieces(_bytes_of(array), send_bytes)


def receive(receive_bytes: Transfer) -> Any:
    """Return the value that another rank sends."""
    lengths = np.empty(2, np.int64)
    receive_bytes(lengths.view(np.uint8))
    body = np.empty(lengths.sum(), np.uint8)
    _in_pieces(body, receive_bytes)
    return _value_of(lengths, body, receive_bytes)


def _value_of(lengths: NDArray[np.int64], body: Bytes, receive_bytes: Transfer) -> Any:
    """Return the value whose text and small arrays are in `body`, and receive its large arrays."""
    text = body[: lengths[0]].tobytes()
    small = io.BytesIO(body[lengths[0] :].tobytes())

    def fill(content: Bytes) -> None:
        if len(content) < _SMALL:
            small.readinto(content.data)
        else:
            _in_pieces(content, receive_bytes)

    return decode(json.loads(text), fill)


def encode(value: Any, arrays: list[Any]) -> Any:
    """Return the JSON form of a value: an object is of one key, the kind of what is not JSON's own.

    Takes numbers, strings, None, and lists, tuples and dicts of them and of arrays and tensors, which are added to
    `arrays` in their order. Raises TypeError for any other type, so that no type of this package depends on how it is
    sent.
    """
    kind = type(value)
    torch = sys.modules.get("torch")  # before torch is imported no value is a tensor
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if kind is list:
        return [encode(each, arrays) for each in value]
    if kind is tuple:
        return {"tuple": encode(list(value), arrays)}
    if isinstance(value, dict):  # JSON's own keys are strings
        return {"dict": [[encode(key, arrays), encode(each, arrays)] for key, each in value.items()]}
    if kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        arrays.append(value)
        return {"array": [np.lib.format.dtype_to_descr(value.dtype), value.shape]}
    if torch is not None and isinstance(value, torch.Tensor):
        if not value.is_meta:
            arrays.append(value)
        return {"meta" if value.is_meta else "tensor": [str(value.dtype).removeprefix("torch."), value.shape]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; send plain values of it")


def decode(form: Any, fill: Callable[[Bytes], None]) -> Any:
    """Return the value of which `encode` returned this form. fill: writes the bytes of the next array."""
    if isinstance(form, list):
        return [decode(each, fill) for each in form]
    if not isinstance(form, dict):
        return form
    [(kind, content)] = form.items()
    if kind == "tuple":
        return tuple(decode(content, fill))
    if kind == "dict":
        return {decode(key, fill): decode(each, fill) for key, each in content}
    dtype, shape = content
    if kind == "array":
        array: Any = np.empty(shape, np.lib.format.descr_to_dtype(dtype))
    else:
        import torch

        device = {"tensor": "cpu", "meta": "meta"}[kind]
        array = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if kind != "meta":
        fill(_bytes_of(array))
    return array


def _pieces(content: Bytes) -> list[Bytes]:
    return [content[start : start + PIECE] for start in range(0, len(content), PIECE)]


def _in_pieces(content: Bytes, transfer: Transfer) -> None:
    for piece in _pieces(content):
        # torch and MPI ask for memory that can be written to, which a mapped file is not.
        transfer(piece if piece.flags.writeable else piece.copy())


def _bytes_of(array: Any) -> Bytes:
    """Return the bytes of an array or a tensor: its own memory where that is in order, else a copy."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    import torch

    return cast(Bytes, array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
