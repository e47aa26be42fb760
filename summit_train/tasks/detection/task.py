"""Object detection: what it brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from summit_train.tasks.task import MotionKind, StreamOption, Task

if TYPE_CHECKING:
    import torch

    from summit_train.evaluation.measures import Measure
    from summit_train.models.video import VideoNetwork
    from summit_train.spec import ModelSpec, Spec
    from summit_train.tasks.detection.boxes import Boxes
    from summit_train.tasks.detection.keys import DetectorSpec
    from summit_train.tasks.detection.loss import DetectionLoss
    from summit_train.tasks.detection.scoring import DetectionScorer
    from summit_train.tasks.detection.section import Section
    from summit_train.tasks.detection.stream import BoxFinder

LEAST_SCORE = 0.5  # of the detections that `stream` shows


class Detection(Task):
    name = "detection"
    about = "the boxes and classes of the objects in each frame"
    title = "detector"
    kinds = MappingProxyType({"detection": "map"})
    whole_frames = True
    section = "detector"

    def keys(self) -> type[DetectorSpec]:
        from summit_train.tasks.detection.keys import DetectorSpec

        return DetectorSpec

    def problems(self, spec: Spec) -> Iterator[tuple[str, str]]:
        from summit_train.tasks.detection.keys import problems

        return problems(spec)

    def network(self, trunk: VideoNetwork, model: ModelSpec, generator: torch.Generator | None) -> VideoNetwork:
        from summit_train.tasks.detection.rfcn import build_rfcn

        return build_rfcn(trunk, model, generator)

    def annotation(self) -> type[Boxes]:
        from summit_train.tasks.detection.boxes import Boxes

        return Boxes

    def importers(self) -> Mapping[str, tuple[Callable[..., Any], str]]:
        from summit_train.tasks.detection.importers import read_mot, read_vid

        vid = "boxes: ILSVRC2015/Data/VID/train, .../VID/val, or a folder of DET"
        mot = "boxes: folder of MOTChallenge sequences with img1/ and gt/gt.txt"
        return {"vid": (lambda ask: read_vid(ask.source), vid), "mot": (lambda ask: read_mot(ask.source), mot)}

    def motion(self) -> MotionKind:
        from summit_train.tasks.detection.moving_objects import MovingObjects

        return MotionKind("boxes", "for detection: moving shapes with their boxes and tracks", MovingObjects)

    def loss(self, spec: Spec, clips_of_class: Sequence[int], device: torch.device) -> DetectionLoss:
        from summit_train.tasks.detection.keys import detector_of
        from summit_train.tasks.detection.loss import DetectionLoss

        return DetectionLoss(detector_of(spec.model), spec.model.num_classes)

    def scorer(self) -> type[DetectionScorer]:
        from summit_train.tasks.detection.scoring import DetectionScorer

        return DetectionScorer

    def measures(self) -> Mapping[str, tuple[Measure, ...]]:
        from summit_train.tasks.detection.detections import MEASURES

        return {"detection": MEASURES}

    def read_section(self, run: Any) -> Section | None:
        from summit_train.tasks.detection.section import read_section

        return read_section(run)

    def stream_option(self) -> StreamOption:
        about = f"detectors: lowest score shown [{LEAST_SCORE}]"
        return StreamOption("score", "S", float, lambda score: 0 <= score <= 1, "0 to 1", about)

    def watcher(self, trained: Any, device: torch.device, option: Any) -> BoxFinder:
        from summit_train.tasks.detection.stream import BoxFinder

        return BoxFinder(trained, device, LEAST_SCORE if option is None else option)

    def measure_latency(self, entries: Any, passes: Any, place: Any) -> list[dict[str, Any]]:
        from summit_train.tasks.detection.latency import measure_frames

        return measure_frames(entries, passes, place)


TASK = Detection()
