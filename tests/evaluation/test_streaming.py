"""Evaluation in mode stream: equal to the clip evaluation where both see the same frames; long videos in pieces."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.watch import Stopped, StopRequest
from summit_train.data.batches import loader
from summit_train.data.batches.loader import FrameBlock, whole_videos
from summit_train.data.batches.stores import open_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import read_manifest
from summit_train.data.video import clips, decode, films
from summit_train.data.video.augment import stream_frames
from summit_train.data.video.films import Films
from summit_train.data.video.source import DecodeError
from summit_train.evaluation.scoring import Scorer
from summit_train.models.network import initial_network
from summit_train.spec import load_spec
from tests.closeness import assert_near
from tests.conftest import WriteSpec
from tests.runs import records
from tests.streamed import CPU, network_of, noise_videos, score
from tests.worlds import succeed, until, workers_of


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 1e-5)])
@pytest.mark.parametrize("crops", [1, 3, "full"])
def test_uniform_frames_streamed_are_the_clip(
    write_spec: WriteSpec, tmp_path: Path, precision: str, bound: float, crops: int | str
) -> None:
    # The video of 3 frames repeats one.
    data = {"val": noise_videos(tmp_path, [25, 3, 8]), "sampling": "uniform"}
    path = write_spec(model={"shift_direction": "past"}, data=data, precision=precision)
    clips, stream = load_spec(path), load_spec(path, ["evaluate.mode=stream"])
    model = network_of(clips)
    model.train()
    ours, theirs = score(stream, model, crops), score(clips, model, crops)
    assert model.training and model.execution != "plain"
    scale = np.abs(theirs.scores).max()
    assert theirs.scores.std(0).min() > 0.01 * scale, "the videos differ"
    # Scores are stored as fp32, so fp64 shows in the difference of what is rounded: none.
    assert np.abs(ours.scores - theirs.scores).max() <= max(bound, 1e-7) * scale


def test_dense_frames_are_every_strides_to_the_end(write_spec: WriteSpec, tmp_path: Path) -> None:
    """25 frames, stride 4: 0, 4, ..., 24, which is also the one clip of 7 frames."""
    data = {"val": noise_videos(tmp_path, [25]), "num_frames": 7, "frame_stride": 4}
    path = write_spec(model={"shift_direction": "past"}, data=data)
    seven = load_spec(path)
    three = load_spec(path, ["evaluate.mode=stream", "data.num_frames=3"])
    assert stream_frames(three.data, 25).tolist() == [0, 4, 8, 12, 16, 20, 24]
    model, short = network_of(seven), initial_network(three, CPU)
    short.load_state_dict(model.state_dict())
    assert_near(score(three, short).scores, score(seven, model).scores, 1e-5)


@pytest.mark.parametrize("counted", [False, True])
def test_a_long_video_is_read_in_pieces(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    data = {"val": noise_videos(tmp_path, [25, 10], counted=counted)}
    spec = load_spec(write_spec(model={"shift_direction": "past"}, data=data), ["evaluate.mode=stream"])
    model = network_of(spec)
    at_once = score(spec, model)
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    store = open_store(spec.data, read_manifest(spec.data.val))
    frames = partial(stream_frames, spec.data)
    found = [list(one.blocks()) for one in whole_videos(spec.data, spec.evaluate, store, [0, 1], frames)]
    assert [[block.numbers.tolist() for block in blocks] for blocks in found] == [
        [list(range(10)), list(range(10, 20)), list(range(20, 25))],
        [list(range(10))],
    ]
    assert [tuple(block.views.shape) for block in found[0]] == [(1, n, 32, 32, 3) for n in (10, 10, 5)]
    np.testing.assert_array_equal(score(spec, model).scores, at_once.scores)


@pytest.mark.parametrize("counted", [False, True])
def test_a_long_video_is_loaded_and_decoded_once(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Without the number of frames in the list it is decoded once more, for its length."""
    spec = load_spec(write_spec(data={"val": noise_videos(tmp_path, [25], counted=counted)}))
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 4)
    every_frame, load, decoded, loaded = decode.every_frame, Films.load, list[int](), list[str]()
    counting = lambda *args: (decoded.append(frame.width) or frame for frame in every_frame(*args))  # noqa: E731
    monkeypatch.setattr(clips, "every_frame", counting)
    monkeypatch.setattr(Films, "load", lambda *args: loaded.append(args[1]) or load(*args))
    store = open_store(spec.data, read_manifest(spec.data.val))
    for one in whole_videos(spec.data, spec.evaluate, store, [0], np.arange):
        assert sum(len(block.numbers) for block in one.blocks()) == 25
    assert (len(decoded), len(loaded)) == (25 if counted else 25 + 25, 1)


def test_a_request_to_stop_is_answered_between_the_blocks_of_a_long_video(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"val": noise_videos(tmp_path, [25, 10]), "num_frames": 4}
    spec = load_spec(write_spec(model={"shift_direction": "past"}, data=data), ["evaluate.mode=stream"])
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    stop, told = StopRequest(), list[tuple[int, int]]()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            stop.receive(signal.SIGUSR2, None)

    scorer = Scorer(spec, Dataset.open(spec, "val"), World(), CPU, stop)
    with pytest.raises(Stopped):
        scorer.score(network_of(spec), progress)
    assert told == [(0, 2), (0, 2)]  # after two of the three blocks of the first video


@pytest.mark.nightly
def test_few_blocks_wait_however_many_long_videos_there_are(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(write_spec(data={"val": noise_videos(tmp_path, [25] * 12), "workers": 2}))
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    store, most = open_store(spec.data, read_manifest(spec.data.val)), 0
    for one in whole_videos(spec.data, spec.evaluate, store, range(12), np.arange):
        for block in one.blocks():
            assert len(block.numbers) in (10, 5)
            most = max(most, sum(isinstance(found, FrameBlock) for found in gc.get_objects()))
    # Two that wait for their turn in each of two lanes, two that are read ahead there, the one in use and its first.
    assert most <= 2 * (2 + 2) + 2


def test_a_film_that_changes_within_a_pass_is_named(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(write_spec(data={"val": noise_videos(tmp_path, [25], counted=True)}))
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    monkeypatch.setattr(films, "_MIN_FRAMES", 25)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(spec.data, read_manifest(spec.data.val))
    videos = whole_videos(spec.data, spec.evaluate, store, [0], np.arange)
    blocks = next(videos).blocks()
    assert next(blocks).numbers.tolist() == list(range(10))
    os.utime(store.path(0), (1, 1))
    with pytest.raises(DecodeError, match="has changed while it was read"):
        next(blocks)


def test_workers_pass_over_a_video_that_is_left_in_the_middle(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"val": noise_videos(tmp_path, [25, 9, 40, 10, 30]), "workers": 2, "on_bad_clip": "skip"}
    spec = load_spec(write_spec(data=data))
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    store, found = open_store(spec.data, read_manifest(spec.data.val)), list[list[int]]()
    for one in whole_videos(spec.data, spec.evaluate, store, range(5), np.arange):
        blocks = list(islice(one.blocks(), 1 if one.video == 0 else None))
        assert {block.video for block in blocks} == {one.video}
        found.append([number for block in blocks for number in block.numbers.tolist()])
        expected = 2 if one.video < 4 else 0
        assert until(lambda expected=expected: len(workers_of(os.getpid())) == expected)
    assert found == [list(range(number)) for number in (10, 9, 40, 10, 30)]
    assert not workers_of(os.getpid())


def test_pieces_of_a_video_with_fewer_frames_than_its_manifest_says(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(noise_videos(tmp_path, [25], counted=True))
    path.write_text(path.read_text().replace("25", "31", 1))
    spec = load_spec(write_spec(data={"val": str(path)}))
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 10)
    store = open_store(spec.data, read_manifest(path))
    for one in whole_videos(spec.data, spec.evaluate, store, [0], partial(stream_frames, spec.data)):
        assert [(block.num_frames, len(block.numbers)) for block in one.blocks()] == [(25, 10), (25, 10), (25, 5)]


def test_a_video_that_cannot_be_read(write_spec: WriteSpec, tmp_path: Path) -> None:
    path = Path(noise_videos(tmp_path, [5, 6]))
    path.write_text(path.read_text() + "gone.mp4,0\n")
    name = write_spec(model={"shift_direction": "past"}, data={"val": str(path), "max_bad_fraction": 0.5})
    fails = load_spec(name, ["evaluate.mode=stream"])
    model = network_of(fails)
    with pytest.raises(DecodeError, match=r"gone\.mp4"):
        score(fails, model)
    found = score(load_spec(name, ["evaluate.mode=stream", "data.on_bad_clip=skip"]), model)
    assert np.isnan(found.scores[2]).all() and np.isfinite(found.scores[:2]).all() and found.num_bad == 1


def test_a_network_that_cannot_stream_is_refused_at_its_place(write_spec: WriteSpec) -> None:
    path = write_spec(evaluate={"mode": "stream"})
    with pytest.raises(UserError, match=r"run\.yaml:\d+: evaluate\.mode: .*its shift needs the next frame") as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)
    assert load_spec(write_spec(model={"arch": "tsn"}, evaluate={"mode": "stream"})).evaluate.mode == "stream"


def test_a_run_says_that_it_streamed(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    spec = str(tmp_path / "run/spec.yaml")
    words = (f"run_dir={tmp_path}", "evaluate.mode=stream")
    assert "all frames streamed" in succeed(0, "eval", spec, *words)
    result = json.loads((tmp_path / "run/evals/mode-stream/eval.json").read_text())
    assert (result["mode"], result["clips"]) == ("stream", None)
    more = ("name=other", "evaluate.every_epochs=1", "schedule.epochs=1", "schedule.warmup_epochs=0")
    output = succeed(0, "train", spec, *words, *more)
    assert "(11 videos, all frames streamed)" in output and "\n11 videos, all frames streamed x 1 crop\n" in output
    (validation,) = records(tmp_path / "other", "eval")
    assert validation["clips"] is None
    assert validation["top1"] == json.loads((tmp_path / "other/eval.json").read_text())["top1_mean"]
    assert "all frames, streamed" in (tmp_path / "other/report.html").read_text()
