"""The files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from summit_train.errors import UserError
from summit_train.files import check_writable


def check_output(option: str, given: str | Path, file: str | Path) -> None:
    """Raise UserError where `file`, which the option's value asks for, cannot be written."""
    try:
        check_writable(file)
    except OSError as error:
        raise UserError(f"{option} {given}: cannot be written: {error.strerror}") from error
