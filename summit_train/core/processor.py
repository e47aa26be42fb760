"""Identify this machine's processor by its model and instruction sets, on which compiled code may depend."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def name() -> str:
    """Return the model, e.g. "AMD EPYC 9R14"."""
    return _first("model name", "cpu") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Return the instruction sets; none where the system does not list them."""
    return frozenset(_first("flags", "Features").split())


def digest(*settings: str) -> str:
    """Return 12 characters that differ where the model, its instruction sets or `settings` do."""
    words = " ".join([platform.machine(), name(), *sorted(flags()), *settings])
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _first(*keys: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""
