"""What a task brings: the check of its keys, its annotation of a clip, network, loss, scorer, measures and output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from summit_train.tasks.table import task_named

if TYPE_CHECKING:
    import torch

    from summit_train.data.manifest.annotation import Annotation
    from summit_train.data.motion import MotionSet
    from summit_train.evaluation.measures import Measure
    from summit_train.evaluation.scores import Found
    from summit_train.evaluation.scoring import Scorer
    from summit_train.models.video import VideoNetwork
    from summit_train.spec import ModelSpec, Spec
    from summit_train.spec.typed import Section


class TaskLoss(Protocol):
    """The training loss of a task."""

    def of_batch(
        self, outputs: torch.Tensor, targets: torch.Tensor, size: tuple[int, int], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a micro-batch, and the number of its clips that are right.

        outputs: the network's. targets: `MicroBatch.labels`. size: the frames' height and width in pixels. seed: of
        random draws on the device.
        """

    def of_scores(self, found: Found) -> float | None:
        """Return the mean loss of the validation videos that could be read; None where it is not known."""


class MotionKind(NamedTuple):
    """A generated data set. flag: of `data motion`, which asks for it. about: what it is, for the list of flags."""

    flag: str
    about: str
    videos: type[MotionSet]


class StreamOption(NamedTuple):
    """The option of `stream` that a task reads, --NAME VALUE: `parse` makes the value of the text.

    is_right: whether that is a possible value, which must be `expected`. about: for the list of options.
    """

    name: str
    value: str
    parse: Callable[[str], Any]
    is_right: Callable[[Any], bool]
    expected: str
    about: str


class Task:
    """What a task brings. The TASK in a task's task.py overrides what differs from here.

    Methods import what they need: a spec asks for its keys, for which nobody should wait for torch.

    name: of its folder, and in a spec. about: what is found. title: one of its networks, for people. kinds: each
    loss.kind that it takes, the usual one first, and the key of the measure by which checkpoints are compared, in
    percent. whole_frames: it sees whole frames, not crops (data.augment: whole). gives_labels: it finds the classes of
    a video: `predict` and `cam` show them, `fuse` combines them. section: the section of `model` with its own keys, see
    `keys`; "" without any.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    title: ClassVar[str]
    kinds: ClassVar[Mapping[str, str]]
    whole_frames: ClassVar[bool] = False
    gives_labels: ClassVar[bool] = False
    section: ClassVar[str] = ""

    def keys(self) -> type[Section]:
        """Return the type of `model.<section>`, which is null with other tasks."""
        raise NotImplementedError

    def problems(self, spec: Spec) -> Iterator[tuple[str, str]]:
        """Yield the keys of a spec of this task that do not fit it: (key, what is wrong)."""
        yield from ()

    def network(self, trunk: VideoNetwork, model: ModelSpec, generator: torch.Generator | None) -> VideoNetwork:
        """Return the network on that of model.arch, with new weights drawn from `generator`.

        Called only for a task with keys of its own.
        """
        return trunk

    def annotation(self) -> type[Annotation] | None:
        """Return what its lists have besides the classes of clips; None if nothing."""
        return None

    def importers(self) -> Mapping[str, tuple[Callable[..., Any], str]]:
        """Return the kinds of `data import` that it adds: see data.manifest.importers."""
        return {}

    def motion(self) -> MotionKind | None:
        """Return its generated data set, if it has one besides the usual one."""
        return None

    def loss(self, spec: Spec, clips_of_class: Sequence[int], device: torch.device) -> TaskLoss:
        """Return the training loss. clips_of_class: the training clips of the first classes; the others have none."""
        raise NotImplementedError

    def scorer(self) -> type[Scorer]:
        """Return the class that scores its videos."""
        raise NotImplementedError

    def measures(self) -> Mapping[str, tuple[Measure, ...]]:
        """Return the measures of each of `kinds`, the main one first."""
        raise NotImplementedError

    def read_section(self, run: Any) -> Any | None:
        """Return its section of the page of a report.records.Run; None where it has nothing to show.

        `template` names the file below tasks/ that renders the section, which sees it as `section`.
        """
        return None

    def stream_option(self) -> StreamOption | None:
        """Return the option of `stream` that `watcher` takes; None if its networks do not stream."""
        return None

    def watcher(self, trained: Any, device: torch.device, option: Any) -> Any:
        """Return the inference.stream.stream.Stream of an inference.trained.Trained. option: None if not given."""
        raise NotImplementedError

    def measure_latency(self, entries: Any, passes: Any, place: Any) -> Any | None:
        """Return the rows of `bench latency` if a frame of a stream is what it times; None if clips are."""
        return None


def task_of(spec: Spec) -> Task:
    found: Task = task_named(spec.task)
    return found
