"""A part of a JPEG picture without decoding the rest: its bytes are cut at restart markers.

Between two restart markers a picture's blocks can be decoded by themselves (ITU-T T.81, F.1.1.5.1). Where the markers
stand often enough, as in pictures that `data pack` makes, the blocks around a rectangle make a smaller picture, whose
pixels are the large one's to the bit.
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
    """Where things stand in a picture's bytes. units: of one restart interval; size_at, scan_at: offsets."""

    width: int
    height: int
    units: int
    size_at: int
    scan_at: int


@dataclass(frozen=True)
class Part:
    """The blocks of a rectangle of a picture: a stretch of its bytes for each row of units.

    ends: behind each restart interval, in bytes of all rows together, int64; its last two are a marker. left, top:
    where the rectangle lies; width, height: its size, in pixels.
    """

    rows: list[bytes]
    ends: NDArray[np.int64]
    left: int
    top: int
    width: int
    height: int


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


def orientation_of(content: bytes) -> int:
    """A picture's orientation as its EXIF has it, 1 to 8 (CIPA DC-008, 4.6.5); 1 where it says nothing."""
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


def part_of(content: bytes, layout: Layout, box: tuple[int, int, int, int]) -> Part | None:
    """The smallest part that has the box (left, top, right, bottom), in pixels.

    None where the markers are not those that the header promises: whoever decodes the whole says what is wrong.
    """
    units, columns, rows = layout.units, -(-layout.width // UNIT), -(-layout.height // UNIT)
    first, last = box[0] // (UNIT * units), -(-box[2] // (UNIT * units))
    top, bottom = box[1] // UNIT, -(-box[3] // UNIT)
    intervals = columns // units
    marks = _restarts(content, layout.scan_at)
    if len(marks) != rows * intervals - 1:
        return None
    bounds = [layout.scan_at - 2, *marks, content.rfind(_END)]
    lengths = np.diff(bounds).reshape(rows, intervals)[top:bottom, first:last]
    of_rows = range(top * intervals, bottom * intervals, intervals)
    stretches = [content[bounds[row + first] + 2 : bounds[row + last] + 2] for row in of_rows]
    left, upper = first * units * UNIT, top * UNIT
    width, height = min(last * units * UNIT, layout.width) - left, min(bottom * UNIT, layout.height) - upper
    return Part(stretches, np.cumsum(lengths), left, upper, width, height)


def stacked(content: bytes, layout: Layout, parts: Sequence[Part]) -> bytes:
    """The parts, one below the other, as one picture; each but the last takes whole rows of units.

    They are cut by one box from pictures of one layout, whose bytes up to the scan are those of `content`.
    """
    one = parts[0]
    height = sum(UNIT * len(part.rows) for part in parts[:-1]) + one.height
    size = height.to_bytes(2, "big") + one.width.to_bytes(2, "big")
    head = content[: layout.size_at] + size + content[layout.size_at + 4 : layout.scan_at]
    blocks = bytearray(b"".join(row for part in parts for row in part.rows))
    # The markers between intervals are numbered from 0 to 7 in turn.
    starts = np.cumsum([0, *(part.ends[-1] for part in parts[:-1])])
    ends = np.concatenate([part.ends + start for part, start in zip(parts, starts, strict=True)])
    np.frombuffer(blocks, np.uint8)[ends - 1] = _RESTART + np.arange(len(ends)) % 8
    blocks[-2:] = _END
    return head + blocks


def _restarts(content: bytes, start: int) -> list[int]:
    """Where the restart markers stand, FF D0 to FF D7."""
    scan: NDArray[np.uint8] = np.frombuffer(content, np.uint8, offset=start)
    places = np.flatnonzero(scan[:-1] == 0xFF)
    found: list[int] = (places[scan[places + 1] & 0xF8 == 0xD0] + start).tolist()
    return found
