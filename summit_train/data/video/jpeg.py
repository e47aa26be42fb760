"""Cutting a rectangle out of JPEG bytes at restart markers, so that the rest need not be decoded.

The blocks between two restart markers can be decoded alone (ITU-T T.81, F.1.1.5.1). Where there are enough markers, as
in pictures that `data pack` makes, the blocks around a rectangle make a smaller picture with bit-identical pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Baseline, and colour at half the resolution: a unit of 16 x 16 pixels has four blocks of brightness, two of colour.
UNIT = 16
_SIZE, _HUFFMAN, _QUANTISER, _SCAN, _INTERVAL, _EXIF, _END = 0xC0, 0xC4, 0xDB, 0xDA, 0xDD, 0xE1, b"\xff\xd9"
_ORIENTATION = 0x0112
_OTHER_FRAMES = frozenset(range(0xC1, 0xD0)) - {_HUFFMAN, 0xC8, 0xCC}
_SAMPLING = (0x22, 0x11, 0x11)
_RESTART = 0xD0  # .. 0xD7


@dataclass(frozen=True)
class Layout:
    """The layout of a picture's bytes. units: of one restart interval; size_at, scan_at: offsets."""

    width: int
    height: int
    units: int
    size_at: int
    scan_at: int


@dataclass(frozen=True)
class Stack:
    """The same rectangle of several pictures, one below the other, as one picture.

    content: its bytes; pitch: pixels from one rectangle's upper edge to the next one's; left, top: where the rectangle
    lies in its picture; width, height: its size.
    """

    content: bytes
    pitch: int
    left: int
    top: int
    width: int
    height: int


def restart_units(width: int) -> int:
    """Return the units between restart markers: 2, 3 or 1, whichever divides a row, so that markers form columns."""
    columns = -(-width // UNIT)
    return next(units for units in (2, 3, 1) if columns % units == 0)


def layout_of(content: bytes) -> Layout | None:
    """Return the layout of a picture that can be cut and has all of its tables; None for anything else."""
    at, width, height, units, size_at = 2, 0, 0, 0, 0
    seen: list[int] = []
    while content[at : at + 1] == b"\xff" and at + 4 <= len(content):
        marker, length = content[at + 1], int.from_bytes(content[at + 2 : at + 4], "big")
        seen.append(marker)
        if marker == _SIZE:
            size_at = at + 5
            height, width = (int.from_bytes(content[i : i + 2], "big") for i in (size_at, size_at + 2))
            if content[at + 4] != 8 or content[at + 9] != 3 or tuple(content[at + 11 : at + 19 : 3]) != _SAMPLING:
                return None
        elif marker == _INTERVAL:
            units = int.from_bytes(content[at + 4 : at + 6], "big")
        elif marker == _EXIF or marker in _OTHER_FRAMES:  # it may be turned; not baseline
            return None
        elif marker == _SCAN:
            has_tables = (seen.count(_QUANTISER), seen.count(_HUFFMAN), seen.count(_SIZE)) == (2, 4, 1)
            scan_at = at + 2 + length
            if not (has_tables and width and height and units) or -(-width // UNIT) % units or content[at + 4] != 3:
                return None
            return Layout(width, height, units, size_at, scan_at) if scan_at < len(content) else None
        at += 2 + length
    return None


def orientation_of(content: bytes) -> int:
    """Return a picture's EXIF orientation, 1 to 8 (CIPA DC-008, 4.6.5); 1 where it has none."""
    at = 2
    while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] not in (b"", b"\xda"):
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        if content[at + 1] == _EXIF and content[at + 4 : at + 10] == b"Exif\0\0":
            return _orientation_in(content[at + 10 : at + 2 + length])
        at += 2 + length
    return 1


def _orientation_in(tiff: bytes) -> int:
    order: Literal["little", "big"] = "little" if tiff[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * number(directory, 2), 12):
        if entry + 12 <= len(tiff) and number(entry, 2) == _ORIENTATION:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1


def stack_of(contents: Sequence[bytes], layout: Layout, box: tuple[int, int, int, int]) -> Stack | None:
    """Cut the smallest parts with the box (left, top, right, bottom), in pixels, out of pictures with one layout.

    All have the same bytes up to the scan. None where one's markers do not match its header: decoding that picture
    alone then raises the error.
    """
    units, columns, rows = layout.units, -(-layout.width // UNIT), -(-layout.height // UNIT)
    first, last = box[0] // (UNIT * units), -(-box[2] // (UNIT * units))
    top, bottom = box[1] // UNIT, -(-box[3] // UNIT)
    intervals = columns // units
    together = b"".join(contents)
    bounds = _bounds(together, contents, layout, rows * intervals)
    if bounds is None:
        return None
    # Of each row of units all from the first interval's bytes to the last one's marker.
    starts = (bounds[:, :-1].reshape(-1, rows, intervals)[:, top:bottom, first] + 2).ravel().tolist()
    ends = (bounds[:, 1:].reshape(-1, rows, intervals)[:, top:bottom, last - 1] + 2).ravel().tolist()
    blocks = bytearray(b"".join([together[start:end] for start, end in zip(starts, ends, strict=True)]))
    # The markers between intervals are numbered from 0 to 7 in turn.
    lengths = np.diff(bounds).reshape(-1, rows, intervals)[:, top:bottom, first:last]
    markers = np.cumsum(lengths) - 1
    np.frombuffer(blocks, np.uint8)[markers] = _RESTART + np.arange(len(markers)) % 8
    blocks[-2:] = _END
    left, upper, pitch = first * units * UNIT, top * UNIT, (bottom - top) * UNIT
    width, height = min(last * units * UNIT, layout.width) - left, min(bottom * UNIT, layout.height) - upper
    size = (pitch * (len(contents) - 1) + height).to_bytes(2, "big") + width.to_bytes(2, "big")
    head = together[: layout.size_at] + size + together[layout.size_at + 4 : layout.scan_at]
    return Stack(head + blocks, pitch, left, upper, width, height)


def _bounds(together: bytes, contents: Sequence[bytes], layout: Layout, intervals: int) -> NDArray[np.int64] | None:
    """Return the offsets of each picture's markers in all pictures' bytes: (picture, intervals + 1).

    The first is two bytes before the scan, the last the picture's end.
    """
    starts = np.cumsum([0, *map(len, contents)])
    scan: NDArray[np.uint8] = np.frombuffer(together, np.uint8)
    places = np.flatnonzero(scan[:-1] == 0xFF)
    marks = places[scan[places + 1] & 0xF8 == _RESTART]
    scans = starts[:-1] + layout.scan_at
    inside = np.searchsorted(marks, np.stack([scans, starts[1:]]))
    if np.any(inside[1] - inside[0] != intervals - 1):
        return None
    bounds = np.empty((len(contents), intervals + 1), np.int64)
    bounds[:, 0] = scans - 2
    bounds[:, 1:-1] = marks[inside[0][:, None] + np.arange(intervals - 1)]
    bounds[:, -1] = [start + content.rfind(_END) for start, content in zip(starts, contents, strict=False)]
    return bounds
