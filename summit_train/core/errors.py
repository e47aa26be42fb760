"""Errors that are not bugs. Every other exception keeps its traceback and ends the process with status 1."""

from __future__ import annotations

import errno
import resource
import traceback

from summit_train.core.text import printable


class _Message(Exception):
    """An error with a message for people: each argument is a line of it."""

    def __str__(self) -> str:
        return "\n".join(map(printable, self.args))


class UserError(_Message):
    """The user's input is wrong; exit status 2. Its message: what is wrong, where, and what would be right."""


class RunFailed(_Message):
    """The run cannot continue, for a known reason, such as a lost rank or a full disk; exit status 1."""


class AgreedError(RunFailed):
    """All ranks raise it together, after a vote: no rank waits for another, and rank 0 has the whole message."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(*message.split("\n"))
        self.status = status


def is_bug(error: BaseException) -> bool:
    """Return True unless the exception's message tells a person what to fix.

    An OSError that names its file, or lacks room for one more, is the machine's fault; otherwise it could be anything.
    """
    names_file = isinstance(error, OSError) and error.filename is not None
    return not names_file and not isinstance(error, UserError | RunFailed) and not _too_many_files(error)


def _too_many_files(error: BaseException | None) -> bool:
    """True for EMFILE or ENFILE in this error, its cause, or the error that it replaces (from None)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or (error.__context__ if error.__suppress_context__ else None)
    return False


def exit_status(error: BaseException) -> int:
    """Return the status that a process ends with because of this exception."""
    if isinstance(error, AgreedError):
        return error.status
    return 2 if isinstance(error, UserError) else 1


def describe(error: BaseException) -> str:
    """Return an error's line, or the traceback of a bug. A value that makes it too long is cut."""
    if is_bug(error):
        return "".join(traceback.format_exception(error)).rstrip()
    if _too_many_files(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: the limit of {limit:,} for a process is too low; raise it by ulimit -n"
    text = printable(f"{error.filename}: {error.strerror}") if isinstance(error, OSError) else str(error)
    half = 2000
    return text if len(text) <= 2 * half else f"{text[:half]} [{len(text):,} characters in all] {text[-half:]}"
