"""A detector's stream: its boxes against the clip network's, JSON, text, the drawn video, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from summit_train.data.video.encode import write_video
from summit_train.data.video.stream import Progress, file_frames
from summit_train.inference.stream.command import drawn_in
from summit_train.inference.stream.stream import Stream
from summit_train.inference.trained import Trained, open_trained
from summit_train.models.build import build_network
from summit_train.models.precision import Normalise, parameter_type
from summit_train.spec import Spec
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.stream import BoxFinder
from tests.closeness import assert_near
from tests.data.clips import write_as
from tests.detectors import detector_spec
from tests.inference.stream.test_command import lines, read
from tests.worlds import Say, refused

CPU, NAMES = torch.device("cpu"), ("cat", "dog")
SCALED: dict[str, Any] = {"data": {"long_side": 80}, "evaluate": {"short_side": 64}}
PAST = {"arch": "tsm", "shift_direction": "past"}


def checkpoint(spec: Spec, path: Path) -> Path:
    """A checkpoint of the spec's network, with random weights whose scores differ from frame to frame."""
    generator = torch.Generator().manual_seed(5)
    network = build_network(spec, generator)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if name.startswith("detector."):
                value.normal_(0.0, 0.05, generator=generator)
            elif value.dtype.is_floating_point and value.dim() == 1:
                low, high = (0.5, 1.5) if name.endswith(("weight", "var")) else (-0.2, 0.2)
                value.uniform_(low, high, generator=generator)
    state = {"model": network.state_dict(), "optimizer": {"state": {}}, "step": 7, "classes": list(NAMES)}
    torch.save(state | {"spec": spec.model_dump(mode="json")}, path)
    return path


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An online detector that sees frames with a short side of 64 pixels and a long one of 80 at most."""
    return checkpoint(detector_spec(model=PAST, precision="fp32", **SCALED), tmp_path_factory.mktemp("a") / "online.pt")


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 frames of blurred noise, stored as 96 x 48 pixels and shown upright as 48 x 96."""
    noise = np.random.default_rng(3).integers(0, 256, (9, 6, 12, 3), np.uint8)
    path = tmp_path_factory.mktemp("b") / "noise.mp4"
    write_as(path, noise.repeat(8, 1).repeat(8, 2), rotation=90)
    return path


def pictures_of(trained: Trained, video: Path) -> list[NDArray[np.uint8]]:
    stream = Stream(trained, CPU)
    return [stream.picture(frame) for frame in file_frames(str(video), Progress())]


def clip_maps(trained: Trained, pictures: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
    """The maps of the clip network, run as evaluation runs it, on a clip of all these frames: (T, C, h, w)."""
    spec = trained.spec
    data = spec.data.model_copy(update={"num_frames": len(pictures)})
    clip = Normalise(parameter_type(spec.precision), CPU)(torch.from_numpy(np.stack(pictures))[None])
    with torch.inference_mode():
        maps: torch.Tensor = Trained(**{**vars(trained), "spec": spec.model_copy(update={"data": data})}).network(CPU)(
            clip
        )
    return maps[0]


@pytest.mark.parametrize("model", [PAST, {"arch": "tsn"}])
def test_every_frame_has_the_boxes_of_the_clip_network(tmp_path: Path, video: Path, model: dict[str, Any]) -> None:
    # In fp64: in fp32, where two scores are nearly equal, rounding decides which box is suppressed.
    trained = open_trained(checkpoint(detector_spec(model=model, **SCALED), tmp_path / "a.pt"))
    pictures = pictures_of(trained, video)
    assert pictures[0].shape == (80, 40, 3), "the long side limits the frame"
    head = trained.spec.model.detector
    assert head is not None
    expected = detect(clip_maps(trained, pictures), (80, 40), head, 2)
    stream = BoxFinder(trained, CPU, 0.0)
    for number, picture in enumerate(pictures):
        found = stream.found(picture)
        assert len(found) > 3
        assert_near(found, expected[number], 1e-6, f"frame {number}")
    alone = BoxFinder(trained, CPU, 0.0).found(pictures[8])
    has_memory = alone.shape != found.shape or not torch.equal(alone, found)
    assert has_memory == (model["arch"] == "tsm")


def test_the_maps_of_a_stream_are_those_of_the_clip_network_in_fp32(detector: Path, video: Path) -> None:
    trained = open_trained(detector)
    pictures, stream = pictures_of(trained, video), Stream(trained, CPU)
    for expected, picture in zip(clip_maps(trained, pictures), pictures, strict=True):
        assert_near(stream.output(picture)[0], expected, 1e-5)


def test_one_line_a_frame_with_boxes_in_pixels_of_the_upright_frame(say: Say, detector: Path, video: Path) -> None:
    said = say("stream", detector, video, "--json", "--score", "0.385")
    assert said[0] == 0 and f"{detector}: tsm resnet18, every frame, boxes\n" in said[2]
    trained = open_trained(detector)
    stream, num_boxes = BoxFinder(trained, CPU, 0.385), 0
    for number, (line, picture) in enumerate(zip(lines(said), pictures_of(trained, video), strict=True)):
        assert list(line) == ["frame", "seconds", "boxes", "latency_ms"]
        assert (line["frame"], line["seconds"]) == (number, pytest.approx(number / 25))
        rows = stream.found(picture).tolist()
        num_boxes += len(rows)
        for box, (label, score, left, top, right, bottom) in zip(line["boxes"], rows, strict=True):
            assert list(box) == ["label", "name", "score", "left", "top", "width", "height"]
            assert (box["label"], box["name"]) == (label, NAMES[int(label)]) and box["score"] == pytest.approx(score)
            # 40 x 80 pixels were seen of a frame of 48 x 96.
            edges = [1.2 * left, 1.2 * top, 1.2 * (right - left), 1.2 * (bottom - top)]
            assert [box[key] for key in ("left", "top", "width", "height")] == pytest.approx(edges, abs=6e-4)
            assert 0 <= box["left"] <= 48 and box["top"] + box["height"] <= 96.001 and box["score"] >= 0.385
    assert num_boxes > 9


def test_without_json_a_line_where_number_or_classes_change(say: Say, detector: Path, video: Path) -> None:
    words = ("stream", detector, video, "--score", "0.385")
    boxes = [line["boxes"] for line in lines(say(*words, "--json"))]
    expected, last = [], None
    for number, found in enumerate(boxes):
        classes = sorted(box["label"] for box in found)
        if classes != last:
            text = ", ".join(f"{box['name']} {box['score']:.2f}" for box in found)
            expected.append(f"{number / 25:9.2f} s  {text or 'no box'}")
        last = classes
    assert 1 < len(expected) < 9
    assert say(*words)[1].splitlines() == expected
    none = say("stream", detector, video, "--score", "1")[1]
    assert none == "     0.00 s  no box\n"


def test_boxes_stay_in_the_drawn_frames_that_a_stride_skips(
    say: Say, detector: Path, video: Path, tmp_path: Path
) -> None:
    said = say("stream", detector, video, "--json", "--stride", "4", "--draw", tmp_path / "a.mp4")
    assert [line["frame"] for line in lines(said)] == [0, 4, 8]
    assert read(tmp_path / "a.mp4")[1].shape == (9, 96, 48, 3)


def test_the_drawn_video_has_the_colours_of_the_classes_at_the_edges(tmp_path: Path) -> None:
    write_video(tmp_path / "grey.mp4", np.full((3, 120, 160, 3), 110, np.uint8))
    boxes = [
        {"label": 0, "name": "cat", "score": 0.9, "left": 20.2, "top": 30, "width": 60, "height": 49.9},
        {"label": 1, "name": "dog", "score": 0.8, "left": 100, "top": 60, "width": 40, "height": 40},
    ]
    draw = lambda picture, values: BoxFinder.draw(cast(Any, None), picture, values)  # noqa: E731
    with drawn_in(str(tmp_path / "a.mp4"), str(tmp_path / "grey.mp4"), Progress(), draw) as add:
        for frame in file_frames(str(tmp_path / "grey.mp4"), Progress()):
            add(frame, {"boxes": boxes if frame.number else []})
    pictures = read(tmp_path / "a.mp4")[1].astype(int)
    assert np.abs(pictures[0] - 110).max() < 12, "a frame without boxes stays as it is"
    for picture in pictures[1:]:
        for colour, left, top, right, bottom in (((255, 25, 25), 20, 30, 80, 80), ((25, 255, 94), 100, 60, 140, 100)):
            edges = (
                picture[top : top + 2, left + 20 : right], picture[bottom - 2 : bottom, left:right],
                picture[top:bottom, left : left + 2], picture[top:bottom, right - 2 : right],
            )  # fmt: skip
            for edge in edges:
                assert np.abs(edge.reshape(-1, 3).mean(0) - colour).max() < 60
            assert np.abs(picture[top + 6 : bottom - 6, left + 6 : right - 6] - 110).max() < 40


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["stream", "RUN", "VIDEO", "--window", "3"], "--window must be used with a classifier, and this network"),
        (["predict", "RUN", "VIDEO"], "predict is for classifiers, and this network is a detector"),
        (["cam", "RUN", "VIDEO", "--out", "maps"], "cam is for classifiers, and this network is a detector"),
        (["export", "RUN", "--out", "a.onnx"], "detectors see whole frames: give their scaled size, --size HxW"),
    ],
)
def test_what_a_detector_cannot_do_is_one_line_and_2(
    say: Say, detector: Path, video: Path, words: list[str], reason: str
) -> None:
    given = {"RUN": detector, "VIDEO": video}
    assert reason in refused(say(*(given.get(word, word) for word in words)))


def test_scores_that_cannot_be_and_those_of_a_classifier(
    say: Say, detector: Path, video: Path, trained_run: Path
) -> None:
    for value in ("-0.1", "1.1", "half", "nan"):
        status, _, err = say("stream", detector, video, f"--score={value}")
        assert status == 2 and err.endswith(f"argument --score: must be 0 to 1, got '{value}'\n")
    line = refused(say("stream", trained_run, video, "--score", "0.5"))
    assert line.startswith("--score must be used with a detector")


def test_the_exported_stream_gives_the_maps(say: Say, detector: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    words = ("--out", tmp_path / "a.onnx", "--stream", "--size", "80x40", "--json")
    status, out, _ = say("export", detector, *words)
    found = json.loads(out)
    assert status == 0 and found["kind"] == "stream" and found["outputs"][0]["shape"][2:] == [5, 3]
    random = found["verification"]["random"]
    assert 0 < random["largest_difference"] < 1e-5 * random["largest_logit"]
