"""Sizes in bytes as people write them."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Parse 1G, 256M, 1.5T or a plain number of bytes; each unit is 1024 of the one below it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match.group(1)) * _UNITS[match.group(2).upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a size such as 1G or 256M is wanted")
    return size


def size_text(size: float) -> str:
    """Format bytes as 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
