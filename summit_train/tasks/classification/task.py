"""Classification: what it brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from summit_train.tasks.task import StreamOption, Task, TaskLoss

if TYPE_CHECKING:
    import torch

    from summit_train.evaluation.measures import Measure
    from summit_train.evaluation.scoring import Scorer
    from summit_train.spec import Spec
    from summit_train.tasks.classification.stream import Labeller


class Classification(Task):
    name = "classification"
    about = "the class of a clip"
    title = "classifier"
    kinds = MappingProxyType({"softmax": "top1", "binary": "map"})
    gives_labels = True

    def loss(self, spec: Spec, clips_of_class: Sequence[int], device: torch.device) -> TaskLoss:
        from summit_train.training.loss import build_loss

        return build_loss(spec, clips_of_class, device)

    def scorer(self) -> type[Scorer]:
        from summit_train.evaluation.scoring import Scorer

        return Scorer

    def measures(self) -> Mapping[str, tuple[Measure, ...]]:
        from summit_train.tasks.classification.measures import MEASURES

        return MEASURES

    def stream_option(self) -> StreamOption:
        is_window = range(10**9).__contains__
        return StreamOption("window", "N", int, is_window, "0 or more", "average N frames; 0: all [data.num_frames]")

    def watcher(self, trained: Any, device: torch.device, option: Any) -> Labeller:
        from summit_train.tasks.classification.stream import Labeller

        return Labeller(trained, device, option)


TASK = Classification()
