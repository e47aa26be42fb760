"""The errors that are no bugs. Every other exception keeps its traceback and ends the process with status 1."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong; exit status 2.

    The message is for people: what is wrong, where, and what would be right.
    """


class RunFailed(Exception):
    """The run cannot go on for a reason that is known, such as a lost rank or a full disk; exit status 1."""
