"""Predictions worked out by hand, and those of a trained network on real videos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from av.video.frame import VideoFrame

from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import TO_THE_END, Span
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import Scorer
from summit_train.inference.predict import PredictedVideo, Predictions, most_probable, predict_videos
from summit_train.inference.trained import Trained, open_trained
from summit_train.inference.videos import list_videos
from tests.closeness import assert_near

CPU = torch.device("cpu")
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    return open_trained(trained_run)


def predicted(trained: Trained, *words: Path, top: int = 4) -> Predictions:
    listings = list_videos([str(word) for word in words], trained, print)
    predictions = predict_videos(trained, listings, World(), CPU, top)
    assert predictions is not None
    return predictions


def scores(video: PredictedVideo) -> list[float]:
    """The softmax of every class, label 0 first."""
    return [one["score"] for one in sorted(video.predictions, key=lambda one: int(one["label"]))]


def write_pictures(folder: Path, frames: Sequence[np.ndarray]) -> Path:
    folder.mkdir()
    for number, frame in enumerate(frames):
        VideoFrame.from_ndarray(frame, "rgb24").save(str(folder / f"{number:05}.png"))
    return folder


@pytest.mark.parametrize(
    ("kind", "logits", "labels", "shares"),
    [
        (
            "softmax",
            [1000, 1000 + math.log(3), 1000, 1000 + math.log(6)],
            [3, 1, 0, 2],
            [6 / 11, 3 / 11, 1 / 11, 1 / 11],
        ),
        ("binary", [0, math.log(3), -1000, math.log(4)], [3, 1, 0, 2], [4 / 5, 3 / 4, 1 / 2, 0]),
    ],
)
def test_probabilities_by_hand_and_the_order_of_equal_classes(
    kind: str, logits: list[float], labels: list[int], shares: list[float]
) -> None:
    found = most_probable(np.array(logits, np.float32), NAMES, 9, kind)
    assert [(one["label"], one["name"]) for one in found] == [(label, NAMES[label]) for label in labels]
    assert [one["score"] for one in found] == pytest.approx(shares, rel=1e-4)
    assert most_probable(np.array(logits, np.float32), NAMES, 3, kind) == found[:3]


def test_json_and_csv_by_hand(tmp_path: Path) -> None:
    first = [{"label": 2, "name": "c", "score": 0.75}, {"label": 0, "name": "a", "score": 0.125}]
    videos = (
        PredictedVideo(Clip("x, y.mp4"), first),
        PredictedVideo(Clip("z.mp4", Span(3, TO_THE_END)), (), "is empty"),
    )
    labelled = Scores(np.arange(2), np.array([0, 1]), np.array([[1.0, 0, 2, 0], [np.nan] * 4]), np.array([True, False]))
    failed = {"path": "z.mp4", "start_frame": 3, "end_frame": None, "error": "is empty"}
    rows = [{"path": "x, y.mp4", "predictions": first}, failed]
    found = Predictions(videos, labelled).values()
    assert found == {"videos": rows, "top1": 0.0, "top5": 50.0, "videos_labelled": 2}
    assert Predictions(videos, None).values() == {"videos": rows}
    text = Predictions(videos, None).csv_text()
    assert text.splitlines() == [
        "path,start_frame,end_frame,label,name,score,label_2,name_2,score_2,error",
        '"x, y.mp4",,,2,c,0.75,0,a,0.125,',
        "z.mp4,3,,;,,,,,,is empty",
    ]
    (tmp_path / "found.csv").write_text(text)
    listed = read_manifest(tmp_path / "found.csv")
    assert listed.labels.tolist() == [2, -1] and listed.clip(1) == videos[1].clip
    assert Predictions(videos[1:], None).csv_text().splitlines()[1] == "z.mp4,3,,;,,,is empty"
    assert Predictions(videos[:1], None).csv_text().startswith("path,label,name,score,label_2,")
    backwards = Predictions([videos[0], replace(videos[0], clip=Clip("x, y.mp4", is_reversed=True))], None)
    assert backwards.values()["videos"][1] == {"path": "x, y.mp4", "reversed": True, "predictions": first}
    assert [line[:15] for line in backwards.csv_text().splitlines()] == [
        "path,reversed,l",
        '"x, y.mp4",0,2,',
        '"x, y.mp4",1,2,',
    ]


def test_the_scores_are_those_of_the_evaluation(trained: Trained, motion_set: Path) -> None:
    manifest = read_manifest(motion_set / "val.csv")
    again = open_trained(trained.path, ["evaluate.clips=3", f"data.val={motion_set / 'val.csv'}"])
    wanted = Scorer(again.spec, Dataset.open(again.spec, "val"), World(), CPU).score(trained.network(CPU))
    found = predicted(again, motion_set / "val.csv")
    assert wanted is not None and found.labelled is not None
    assert np.array_equal(found.labelled.scores, wanted.scores)
    assert np.array_equal(found.labelled.labels, wanted.labels)
    assert found.values()["top1"] == wanted.top(1)
    assert [video.clip.path for video in found.videos] == [manifest.path(clip) for clip in range(11)]
    for video, logits in zip(found.videos, wanted.scores, strict=True):
        assert video.predictions[0]["label"] == int(np.argmax(logits))
        assert_near(scores(video), torch.softmax(torch.from_numpy(logits).double(), 0).numpy(), 1e-12)


def test_a_file_a_folder_a_manifest_and_a_packed_set_give_the_same(
    trained: Trained, motion_set: Path, tmp_path: Path
) -> None:
    rows = (motion_set / "val.csv").read_text().splitlines()[1:4]
    (tmp_path / "few.csv").write_text("path,label,num_frames\n" + "".join(f"{motion_set}/{row}\n" for row in rows))
    pack = ["data", "pack", str(tmp_path / "few.csv"), str(tmp_path / "packed"), "--kind", "bytes", "--workers", "0"]
    assert main(pack) == 0
    files = [motion_set / row.split(",")[0] for row in rows]
    (tmp_path / "folder").mkdir()
    for number, file in enumerate(files):
        (tmp_path / f"folder/{number}.mp4").symlink_to(file)
    one, folder, listed, packed = (
        [scores(video) for video in predicted(trained, *words).videos]
        for words in (files, [tmp_path / "folder"], [tmp_path / "few.csv"], [tmp_path / "packed"])
    )
    assert one == folder == listed == packed and len(one) == 3 and one[0] != one[1]
    both = predicted(trained, tmp_path / "few.csv", files[0], tmp_path / "packed")
    assert len(both.videos) == 7 and both.labelled is not None and len(both.labelled.labels) == 6


def test_a_video_of_two_frames_repeats_them(trained: Trained, tmp_path: Path) -> None:
    a, b = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    clips = [write_pictures(tmp_path / name, frames) for name, frames in (
        ("two", [a, b]), ("four", [a, b, a, b]), ("other", [a, a, b, b]),
    )]  # fmt: skip
    two, four, other = (scores(video) for video in predicted(trained, *clips).videos)
    assert two == four != other


def test_spans_and_directions_are_clips_of_their_own(trained: Trained, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    for name, part in (("whole", frames), ("first", frames[:4]), ("last", frames[4:]), ("turned", frames[3::-1])):
        write_pictures(tmp_path / name, part)
    rows = "whole,0,,4,0\nwhole,1,4,,0\nwhole,0,,4,1\n"
    (tmp_path / "list.csv").write_text(f"path,label,start_frame,end_frame,reversed\n{rows}")
    listed = predicted(trained, tmp_path / "list.csv").videos
    alone = predicted(trained, *(tmp_path / name for name in ("first", "last", "turned"))).videos
    assert [scores(video) for video in listed] == [scores(video) for video in alone]
    assert len({tuple(scores(video)) for video in listed}) == 3
    spans = [(video.clip.span, video.clip.is_reversed) for video in listed]
    assert spans == [(Span(0, 4), False), (Span(4, TO_THE_END), False), (Span(0, 4), True)]


def test_a_bad_picture_is_named_and_the_rest_goes_on(trained: Trained, motion_set: Path, tmp_path: Path) -> None:
    good = motion_set / "videos/val_000000.mp4"
    torn = write_pictures(tmp_path / "pictures", np.zeros((3, 32, 32, 3), np.uint8)) / "00001.png"
    torn.write_bytes(torn.read_bytes()[:40])
    found = predicted(trained, tmp_path / "pictures", good)
    assert [video.error for video in found.videos] == ["00001.png is cut short", None]
    assert scores(found.videos[1]) == scores(predicted(trained, good).videos[0])


def test_a_labelled_video_that_cannot_be_read_counts_as_wrong(
    trained: Trained, motion_set: Path, tmp_path: Path
) -> None:
    name = "videos/val_000000.mp4"
    label = predicted(trained, motion_set / name).videos[0].predictions[0]["label"]
    (tmp_path / "list.csv").write_text(f"path,label\n{motion_set}/{name},{label}\ngone.mp4,0\n")
    values = predicted(trained, tmp_path / "list.csv").values()
    assert (values["top1"], values["videos_labelled"]) == (50.0, 2)
    assert values["videos"][1] == {"path": "gone.mp4", "error": "No such file or directory"}


def test_scores_that_are_not_finite_are_no_prediction(trained: Trained, motion_set: Path) -> None:
    broken = {**trained.weights, "fc.bias": torch.full((4,), torch.nan)}
    video = motion_set / "videos/val_000000.mp4"
    assert predicted(replace(trained, weights=broken), video).videos[0].error == "its scores are not finite"


def test_progress_counts_over_all_lists_of_this_rank(trained: Trained, motion_set: Path) -> None:
    rows = (motion_set / "val.csv").read_text().splitlines()[1:4]
    file = str(motion_set / rows[0].split(",")[0])
    listings = list_videos([file, str(motion_set / "val.csv"), file, file], trained, print)
    world = World()
    world.rank, world.size = 1, 2
    world.gather = lambda value: None  # type: ignore[method-assign, assignment, misc]
    done: list[tuple[int, int]] = []
    found = predict_videos(trained, listings, world, CPU, 1, lambda *progress: done.append(progress))
    assert found is None
    # Of 1, 11 and 2 videos, rank 1 of 2 has none (which is said, too), 5 and 1.
    assert done == [(number, 6) for number in range(7)]
