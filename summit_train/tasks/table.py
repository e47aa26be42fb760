"""The tasks. A line is a folder beside this file, whose task.py has its `TASK`, a `tasks.task.Task`.

Modules below tasks/task.py ask here for a task by its name, and get what it brings to them: so no floor knows a task.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The first one is that of a spec without the key. The order is that of a list in a message or on a page.
TASKS = (
    "classification",
    "detection",
)


def task_named(name: str) -> Any:
    """Return the Task of this name, one of TASKS."""
    return import_module(f"{__package__}.{name}.task").TASK


def every_task() -> list[Any]:
    """Return the Task of each of TASKS."""
    return [task_named(name) for name in TASKS]
