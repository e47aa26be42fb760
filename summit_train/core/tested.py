"""Which versions of PyTorch this package was tested with, and one warning in an environment that has another."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from contextlib import suppress

from summit_train import __version__
from summit_train.core.files import cache_folder
from summit_train.core.result import warn

TESTED_TORCH = ("2.7", "2.15")  # the oldest and the newest, by tests/matrix.sh


def untested(torch_version: str) -> str:
    """Return what to say of a PyTorch that is older or newer than those that were tested, "" of any other."""
    first, last, this = ([int(n) for n in re.findall(r"\d+", text)[:2]] for text in (*TESTED_TORCH, torch_version))
    if first <= this <= last:
        return ""
    return f"torch {torch_version} was not tested with summit_train {__version__} (tested: {' to '.join(TESTED_TORCH)})"


def warn_untested(torch_version: str) -> None:
    """Warn of such a PyTorch the first time that it runs in this environment."""
    text = untested(torch_version)
    if not text:
        return
    with suppress(OSError):  # each run warns where nothing can be kept
        marker = cache_folder() / "warned" / hashlib.sha256(os.fsencode(f"{sys.prefix}\0{text}")).hexdigest()[:16]
        if marker.exists():
            return
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    warn(f"{text}; `summit-train doctor` checks it")
