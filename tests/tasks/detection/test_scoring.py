"""Detections of whole videos: a stream's equal the clip network's, bad videos, damage, a stop; validation to report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed
from summit_train.data.batches import loader
from summit_train.data.batches.loader import BadClip
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.clip import Clip
from summit_train.data.motion import write_motion_set
from summit_train.data.video.source import DecodeError
from summit_train.evaluation.evaluation import build_scorer
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scoring import PartialScores
from summit_train.models.network import initial_network
from summit_train.models.precision import Normalise
from summit_train.report.index import write_index
from summit_train.spec import Spec, dump_spec
from summit_train.tasks.detection.boxes import BOX, Boxes
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.detections import Detections, read_detections
from summit_train.tasks.detection.moving_objects import MovingObjects
from summit_train.tasks.detection.scoring import DetectionScorer
from tests.detectors import detector_spec
from tests.runs import records
from tests.worlds import command, lines, main_said, needs_ranks

CPU, NUMBER, FRAMES = torch.device("cpu"), 3, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training videos and three for validation, of 48 x 48 pixels."""
    path = tmp_path_factory.mktemp("shapes")
    for _ in write_motion_set(path, 4, NUMBER, MovingObjects(size=48, num_frames=FRAMES, num_classes=2)):
        pass
    return path


class WideShapes(MovingObjects):
    """Their videos with 16 more columns, so that a centre square is not the whole frame."""

    def video(self, split: str, number: int) -> tuple[NDArray[np.uint8], Boxes]:
        frames, boxes = super().video(split, number)
        return np.pad(frames, ((0, 0), (0, 0), (0, 16), (0, 0))), boxes


def spec_of(folder: Path, **sections: object) -> Spec:
    """A past-only detector that sees the videos at a third more than their size."""
    data = {"train": f"{folder}/train.csv", "val": f"{folder}/val.csv", "root": str(folder), "num_frames": FRAMES}
    data |= {"short_side": [64, 64], "frame_stride": 1, "workers": 0}
    usual = {"data": data, "evaluate": {"short_side": 64}, "model": {"arch": "tsm", "shift_direction": "past"}}
    return detector_spec(**{name: {**usual.get(name, {}), **own} if isinstance(own, dict) else own
                            for name, own in {**usual, **sections}.items()})  # fmt: skip


def scorer(spec: Spec) -> DetectionScorer:
    found = build_scorer(spec, Dataset.open(spec, "val"), World(), CPU)
    assert isinstance(found, DetectionScorer)
    return found


def network_of(spec: Spec) -> torch.nn.Module:
    """A network whose maps differ from place to place."""
    generator = torch.Generator().manual_seed(0)
    model = initial_network(spec, CPU)
    with torch.no_grad():
        for weight in model.detector.parameters():
            weight.normal_(0, 0.1, generator=generator)
    return model


@pytest.fixture(scope="module")
def streamed(folder: Path) -> tuple[Spec, torch.nn.Module, Detections]:
    spec = spec_of(folder)
    model = network_of(spec)
    found = scorer(spec).score(model)
    assert found is not None
    return spec, model, found


def test_the_stream_finds_what_the_clip_network_finds(streamed: tuple[Spec, torch.nn.Module, Detections]) -> None:
    """Of a clip of the whole video, in pixels of the stored frame: 48 of 64. One piece, or three pieces of a video."""
    spec, model, found = streamed
    assert found.videos.tolist() == [0, 1, 2] and len(found.rows) > 100 and found.num_bad == 0
    dataset = Dataset.open(spec, "val")
    normalise, detector = Normalise(torch.float64, CPU, spec.data.input), spec.model.detector
    assert detector is not None
    for video, (rows, truth) in enumerate((found.rows[own], found.truth.rows[boxes]) for own, boxes in found.parts()):
        (block,) = next(iter(loader.whole_videos(spec.data, spec.evaluate, dataset.store, [video], np.arange))).blocks()
        assert block.views.shape == (1, FRAMES, 64, 64, 3) and block.size == (48, 48)
        with torch.inference_mode():
            maps = model.eval()(normalise(block.views))[0].float()
        expected = [
            [frame, *box[:2], *(0.75 * box[2:])]
            for frame, boxes in enumerate(detect(maps, (64, 64), detector, 2))
            for box in boxes.numpy()
        ]
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-4)
        assert np.array_equal(truth, dataset.manifest.boxes.of(video))


def test_a_long_video_is_streamed_in_pieces(
    streamed: tuple[Spec, torch.nn.Module, Detections], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, model, found = streamed
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 5)
    pieces = scorer(spec).score(model)
    assert pieces is not None and np.array_equal(pieces.rows, found.rows)


def test_a_stopped_evaluation_keeps_its_detections(
    streamed: tuple[Spec, torch.nn.Module, Detections], tmp_path: Path
) -> None:
    """Videos have different numbers of them; the one that is not kept is found again, the unread one stays unread."""
    spec, model, found = streamed
    kept = PartialScores(tmp_path / "kept.partial", "key")
    rows = [found.rows[own] for own, _ in found.parts()]
    kept.add([2, 0], [rows[2], rows[0][:0]], [BadClip(0, "a.mp4", "is cut", None)])
    kept.save()
    again = PartialScores(tmp_path / "kept.partial", "key")
    resumed = scorer(spec.model_copy(update={"run_dir": str(tmp_path)})).score(model, earlier=again)
    assert resumed is not None and resumed.is_read.tolist() == [False, True, True]
    assert [len(resumed.rows[own]) for own, _ in resumed.parts()] == [0, len(rows[1]), len(rows[2])]
    assert np.array_equal(resumed.rows, np.concatenate(rows[1:]))
    # Its objects are all missed, but they count.
    assert resumed.counted.shape == found.counted.shape and resumed.num_bad == 1


def test_the_file_holds_what_was_found_beside_the_true_boxes(
    streamed: tuple[Spec, torch.nn.Module, Detections], tmp_path: Path
) -> None:
    _, _, found = streamed
    found.save(tmp_path / "found.npz", [Clip(f"{i}.mp4") for i in range(3)], ("disc", "square"))
    read, videos, names = read_detections(tmp_path / "found.npz", 2)
    assert videos == ["0.mp4", "1.mp4", "2.mp4"] and names == ("disc", "square")
    assert read.truth.rows.dtype == BOX and np.array_equal(read.rows, found.rows)
    assert measures_of("detection").values(read) == measures_of("detection").values(found)


def test_maps_that_are_not_finite_end_the_evaluation(streamed: tuple[Spec, torch.nn.Module, Detections]) -> None:
    spec, _, _ = streamed
    model = network_of(spec)
    with torch.no_grad():
        model.detector.boxes.bias[0] = torch.nan
    with pytest.raises(RunFailed, match=r"^the network: scores are not finite, those of .*val_000000"):
        scorer(spec).score(model)


def test_a_video_that_cannot_be_read_is_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").symlink_to(folder / "videos")
    for name in ("train.csv", "val.csv", "classes.txt"):
        (tmp_path / name).write_text((folder / name).read_text())
    with (tmp_path / "val.csv").open("a") as listed:
        row = {"video": "videos/gone.mp4", "frame": 0, "track": 0, "label": 0}
        row |= {"left": 1, "top": 1, "width": 9, "height": 9}
        header = (folder / "val.csv").read_text().splitlines()[0].split(",")
        listed.write(",".join(str(row.get(name, "")) for name in header) + "\n")
    data = {"on_bad_clip": "skip", "max_bad_fraction": 0.5}
    spec = spec_of(tmp_path, data={**spec_of(tmp_path).data.model_dump(), **data}, run_dir=str(tmp_path))
    found = scorer(spec).score(network_of(spec))
    assert found is not None and found.is_read.tolist() == [True, True, True, False]
    assert found.counted[0, -1] and len(found.rows[found.parts()[3][0]]) == 0


def test_a_true_box_outside_the_frame_is_named_with_its_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").symlink_to(folder / "videos")
    header, *rows = (folder / "val.csv").read_text().splitlines()
    line = next(number for number, row in enumerate(rows) if row.split(",")[1])
    cells = dict(zip(header.split(","), rows[line].split(","), strict=True)) | {"left": "48"}
    rows[line] = ",".join(cells.values())
    (tmp_path / "val.csv").write_text("\n".join([header, *rows]))
    spec = spec_of(folder)
    data = spec.data.model_copy(update={"val": str(tmp_path / "val.csv"), "root": str(tmp_path)})
    with pytest.raises(DecodeError, match=rf"val\.csv:{line + 2}\) lies outside the frame of 48 x 48"):
        scorer(spec.model_copy(update={"data": data})).score(network_of(spec))


@needs_ranks
def test_a_detector_is_validated_evaluated_and_reported_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained in this process, then evaluated by 3 ranks: the same bits."""
    folder = tmp_path / "shapes"
    for _ in write_motion_set(folder, 4, NUMBER, WideShapes(size=48, num_frames=FRAMES, num_classes=2)):
        pass
    sections = {"scale": {"gpus": 2, "clips_per_gpu": 2}, "schedule": {"epochs": 1, "warmup_epochs": 0}}
    more = {"evaluate": {"every_epochs": 1, "last_checkpoints": 1}, "checkpoint": {"keep_best": "map"}}
    path = tmp_path / "detector.yaml"
    path.write_text(dump_spec(spec_of(folder, run_dir=str(tmp_path), **sections, **more)))
    status, output, errors = main_said(capsys, "train", path)
    assert status == 0, errors
    said = output + errors
    run = tmp_path / "detector"
    result = json.loads((run / "eval.json").read_text())
    (line,) = records(run, "eval")
    keys = [measure.key for measure in measures_of("detection").every]
    assert all(line[key] == result[f"{key}_mean"] == result["checkpoints"][0][key] for key in keys)
    assert line["map"] is not None and line["clips"] is None
    assert f"epoch 1: mAP {line['map']:.2f} %" in said and "(3 videos, all frames streamed" in said
    best = json.loads((run / "checkpoints/best.json").read_text())
    assert (best["measure"], best["value"]) == ("map", line["map"])
    assert "<h3>Detections</h3>" in (run / "report.html").read_text()
    (row,) = write_index(tmp_path, tmp_path / "index.html").values()["runs"]
    assert (row["measure"], row["mean"]) == ("mAP", result["map_mean"])
    first = (run / "predictions/step_00000001.npz").read_bytes()
    status, output = command(3, "eval", str(path), "--json", comm="torch")
    assert status == 0, output
    again = json.loads(next(one for one in lines(output) if one.startswith("{")))
    assert again["checkpoints"] == result["checkpoints"]
    assert (run / "predictions/step_00000001.npz").read_bytes() == first
