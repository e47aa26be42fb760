"""A part of a JPEG picture without decoding the rest: its bytes are cut at restart markers.

Between two restart markers a picture's blocks can be decoded by themselves (ITU-T T.81, F.1.1.5.1). Where the markers
stand often enough, as in pictures that `data pack` makes, the blocks around a rectangle make a smaller picture, whose
pixels are the large one's to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Baseline, and colour at half the resolution: a unit of 16 x 16 pixels has four blocks of brightness, two of colour.
UNIT = 16
_SIZE, _HUFFMAN, _QUANTISER, _SCAN, _INTERVAL, _EXIF, _END = 0xC0, 0xC4, 0xDB, 0xDA, 0xDD, 0xE1, b"\xff\xd9"
_OTHER_FRAMES = frozenset(range(0xC1, 0xD0)) - {_HUFFMAN, 0xC8, 0xCC}
_SAMPLING = (0x22, 0x11, 0x11)
_RESTARTS = tuple(bytes((0xFF, 0xD0 + number)) for number in range(8))


@dataclass(frozen=True)
class Layout:
    """Where things stand in a picture's bytes. units: of one restart interval; size_at, scan_at: offsets."""

    width: int
    height: int
    units: int
    size_at: int
    scan_at: int


@dataclass(frozen=True)
class Part:
    """A rectangle of a picture as a picture of its own; left, top: where it lies, in pixels of the whole."""

    content: bytes
    left: int
    top: int


def restart_units(width: int) -> int:
    """Units between restart markers so that they stand in columns: 2, 3 or 1, whichever divides a row of units."""
    columns = -(-width // UNIT)
    return next(units for units in (2, 3, 1) if columns % units == 0)


def layout_of(content: bytes) -> Layout | None:
    """The layout of a picture that can be cut, and has all of its tables; None for all others, and for no picture."""
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


def part_of(content: bytes, layout: Layout, box: tuple[int, int, int, int]) -> Part | None:
    """The smallest part that has the box (left, top, right, bottom), in pixels; None where it would be the whole.

    Also None where the markers are not those that the header promises: whoever decodes the whole says what is wrong.
    """
    units, columns, rows = layout.units, -(-layout.width // UNIT), -(-layout.height // UNIT)
    first, last = box[0] // (UNIT * units), -(-box[2] // (UNIT * units))
    top, bottom = box[1] // UNIT, -(-box[3] // UNIT)
    intervals = columns // units
    if (last - first) * (bottom - top) >= intervals * rows:
        return None
    marks = _restarts(content, layout.scan_at)
    if len(marks) != rows * intervals - 1:
        return None
    bounds = [layout.scan_at - 2, *marks, content.rfind(_END)]
    kept = [row * intervals + column for row in range(top, bottom) for column in range(first, last)]
    # Each but the last with the marker behind it, which are numbered from 0 to 7 in turn.
    blocks = [content[bounds[i] + 2 : bounds[i + 1]] + _RESTARTS[place & 7] for place, i in enumerate(kept)]
    left, upper = first * units * UNIT, top * UNIT
    width, height = min(last * units * UNIT, layout.width) - left, min(bottom * UNIT, layout.height) - upper
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    head = content[: layout.size_at] + size + content[layout.size_at + 4 : layout.scan_at]
    return Part(head + b"".join(blocks)[:-2] + _END, left, upper)


def _restarts(content: bytes, start: int) -> list[int]:
    """Where the restart markers stand, FF D0 to FF D7."""
    scan: NDArray[np.uint8] = np.frombuffer(content, np.uint8, offset=start)
    places = np.flatnonzero(scan[:-1] == 0xFF)
    found: list[int] = (places[scan[places + 1] & 0xF8 == 0xD0] + start).tolist()
    return found
