"""What a task brings, and the table of the tasks. Floors below a task's modules ask here, by the name in a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

# Each is a folder beside this file, whose __init__.py has its TASK. The first one is that of a spec without the key.
TASKS = (
    "classification",
    "detection",
)


class Option(NamedTuple):
    """An option of `stream`, --NAME VALUE: a number from 0 to `most`, as `expected` says."""

    name: str
    value: str
    parse: Callable[[str], float]
    most: float
    expected: str
    about: str

    def takes(self, value: float) -> bool:
        return 0 <= value <= self.most


@dataclass(frozen=True)
class Task:
    """What a task brings. Data are here, where a spec finds them without numpy or torch; `part` imports the code.

    name: of its folder, and in a spec. about: what is found. title: one of its networks, for people. kinds: each
    loss.kind that it takes, the usual one first, and the key of its main measure: in percent, the more the better.
    section: the section of `model` with the task's keys, null with other tasks; "" if it has none. whole_frames: it
    sees whole frames (data.augment: whole), not crops. gives_labels: it finds the classes of a video, which `predict`
    and `cam` show. motion: the flag of `data motion` for its set, and what that is. option: what `watcher` reads.

    parts: the places of its code, as `module:name` in this package. A task leaves out what it does not have.
      keys                                 the type of `section`
      problems(spec)                       yields the keys that do not fit: (key, what is wrong)
      network(trunk, model, generator)     the network on that of model.arch, if the task has a `section`
      annotation                           what its lists have besides classes, a data.manifest.annotation.Annotation
      importers                            kinds of `data import`: kind -> (reader, what its source is)
      motion                               the data.motion.MotionSet of its flag
      loss(spec, clips_of_class, device)   of_batch, a training.loss.BatchLoss, and of_scores(found), or None
      scorer                               an evaluation.scoring.Scorer
      measures                             of each of `kinds`, evaluation.measures.Measures, the main one first
      report(run)                          its section of the page, or None; `template` is the file, below tasks/
      watcher(trained, device, option)     an inference.stream.stream.Stream
      latency(entries, passes, place)      rows of `bench latency`, of a frame of a stream in place of clips
    """

    name: str
    about: str
    title: str
    kinds: Mapping[str, str]
    parts: Mapping[str, str]
    section: str = ""
    whole_frames: bool = False
    gives_labels: bool = False
    motion: tuple[str, str] | None = None
    option: Option | None = None

    def part(self, name: str) -> Any:
        """Return a part of the task, None where it has none of this name."""
        module, _, attribute = self.parts.get(name, "").partition(":")
        return getattr(import_module(f"summit_train.{module}"), attribute) if module else None


def task_named(name: str) -> Task:
    task: Task = import_module(f"{__package__}.{name}").TASK
    return task


def every_task() -> list[Task]:
    return list(map(task_named, TASKS))


def every_part(name: str) -> list[Any]:
    return [part for task in every_task() if (part := task.part(name)) is not None]
