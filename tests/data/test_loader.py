from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from summit_train import rng
from summit_train.data import augment, loader, order, sampling
from summit_train.data.clips import read_clip
from summit_train.data.decode import write_video
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.quarantine import Kept
from summit_train.data.store import Store, open_store
from summit_train.data.video import DecodeError
from summit_train.errors import RunFailed
from summit_train.spec import DataSpec, EvaluateSpec

NUM_VIDEOS = 9
NUM_FRAMES = 12
GREY_STEP = 20  # frame i of every video is grey of the value 20 i, and white at its right edge


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of nine short videos of 48 x 32 and their manifest; every third is played backwards."""
    folder = tmp_path_factory.mktemp("videos")
    frames = np.empty((NUM_FRAMES, 32, 48, 3), np.uint8)
    frames[:] = np.arange(NUM_FRAMES, dtype=np.uint8)[:, None, None, None] * GREY_STEP
    frames[:, :, 40:] = 255
    for video in range(NUM_VIDEOS):
        write_video(folder / f"{video}.mp4", frames)
    rows = [
        ManifestRow(f"{video}.mp4", video % 4, NUM_FRAMES if video % 2 else None, reversed=video % 3 == 2)
        for video in range(NUM_VIDEOS)
    ]
    write_manifest(folder / "list.csv", rows)
    return folder


@pytest.fixture
def manifest(videos: Path) -> Manifest:
    return read_manifest(videos / "list.csv")


def _data(workers: int = 0, **changes: Any) -> DataSpec:
    settings: dict[str, Any] = {
        "train": "list.csv", "val": "list.csv", "num_frames": 4, "frame_stride": 2,
        "short_side": (24, 32), "crop": 24, "workers": workers,
    }  # fmt: skip
    return DataSpec(**{**settings, **changes})


def _batches(manifest: Manifest, data: DataSpec, **changes: int) -> loader.Batches[loader.MicroBatch]:
    """Four virtual GPUs of one clip, two steps an epoch: eight of the nine videos."""
    run = {
        "seed": 5, "virtual_gpus": 4, "clips_per_gpu": 1, "steps_per_epoch": 2,
        "rank": 0, "ranks": 1, "start_step": 0, "end_step": 5,
    }  # fmt: skip
    return loader.training_batches(data, open_store(data, manifest), **{**run, **changes})


def _plain(batches: loader.Batches[loader.MicroBatch]) -> list[tuple[Any, ...]]:
    with batches:
        return [(b.step, b.virtual_gpu, b.ids.tolist(), b.labels.tolist(), b.clips.numpy().tobytes()) for b in batches]


def _grey(frames: np.ndarray) -> list[int]:
    """Which frame of the video each of the frames (T, h, w, 3) is, read from its darkest pixel."""
    return [round(int(frame.min()) / GREY_STEP) for frame in frames]


def _until(condition: Callable[[], bool]) -> bool:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# Training.


def test_a_micro_batch_holds_the_clips_that_the_keys_say(manifest: Manifest, videos: Path) -> None:
    batches = list(_batches(manifest, _data(), virtual_gpus=2, clips_per_gpu=2))
    assert [(b.step, b.virtual_gpu) for b in batches[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for batch in batches:
        assert (batch.clips.dtype, batch.clips.shape) == (torch.uint8, (2, 4, 24, 24, 3))
        assert (batch.labels.dtype, batch.ids.dtype) == (torch.int64, torch.int64)
        assert batch.labels.tolist() == [video % 4 for video in batch.ids.tolist()]
        for clip, video in zip(batch.clips.numpy(), batch.ids.tolist(), strict=True):
            _check_clip(clip, videos, video, epoch=batch.step // 2)


def _check_clip(clip: np.ndarray, videos: Path, video: int, epoch: int) -> None:
    frames = sampling.train_frames("dense", NUM_FRAMES, 4, 2, rng.key(5, "sampling", epoch, video))
    frames = NUM_FRAMES - 1 - frames if video % 3 == 2 else frames
    assert _grey(clip) == frames.tolist()
    generator = rng.key(5, "augment", epoch, video)
    view = augment.train_view("scale_jitter", (24, 32), 24, True, 48, 32, generator)
    assert np.array_equal(clip, read_clip(videos / f"{video}.mp4", lambda _: frames, lambda *_: view))


def test_each_epoch_shows_a_clip_anew(manifest: Manifest) -> None:
    seen = [(b.ids.item(), b.clips.numpy().tobytes()) for b in _batches(manifest, _data(), end_step=12)]
    counts = {video: len({pixels for v, pixels in seen if v == video}) for video, _ in seen}
    assert len(counts) == NUM_VIDEOS
    assert min(counts.values()) > 1


def test_workers_change_nothing(manifest: Manifest) -> None:
    alone = _plain(_batches(manifest, _data(workers=0)))
    assert len(alone) == 20
    assert _plain(_batches(manifest, _data(workers=2))) == alone


def test_ranks_share_the_same_batches(manifest: Manifest) -> None:
    alone = _plain(_batches(manifest, _data()))
    for ranks in (2, 4):
        shares = [_plain(_batches(manifest, _data(), rank=rank, ranks=ranks)) for rank in range(ranks)]
        assert sorted(batch for share in shares for batch in share) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_in_mid_epoch_gives_the_tail(manifest: Manifest, workers: int) -> None:
    everything = _plain(_batches(manifest, _data()))
    assert _plain(_batches(manifest, _data(workers), start_step=3)) == everything[12:]


@pytest.mark.parametrize("root", [None, ".", "/else/where"])
def test_paths_that_start_at_the_manifests_folder_are_found_whatever_root_says(
    manifest: Manifest, root: str | None
) -> None:
    assert _plain(_batches(manifest, _data(root=root))) == _plain(_batches(manifest, _data()))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_global_generators(manifest: Manifest, workers: int) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    _plain(_batches(manifest, _data(workers), end_step=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy_before


def test_impossible_runs_are_refused_at_once(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="cannot be shared evenly by 3 ranks"):
        _batches(manifest, _data(), ranks=3)
    with pytest.raises(ValueError, match="cannot be taken from 9 clips"):
        _batches(manifest, _data(), clips_per_gpu=2)


# The test.


@pytest.mark.parametrize("workers", [0, 2])
def test_test_views_come_in_the_order_asked(manifest: Manifest, workers: int) -> None:
    evaluate = EvaluateSpec(clips=3, crops=1, short_side=24)
    batches = list(loader.test_batches(_data(workers), evaluate, open_store(_data(), manifest), [7, 2, 2, 0]))
    assert [(b.video, b.label) for b in batches] == [(7, 3), (2, 2), (2, 2), (0, 0)]
    # Window 8 of 12 frames: starts 0, 2, 4.
    starts = [[0, 2, 4, 6], [2, 4, 6, 8], [4, 6, 8, 10]]
    backwards = [[NUM_FRAMES - 1 - frame for frame in clip] for clip in starts]
    for batch in batches:
        assert (batch.views.dtype, batch.views.shape) == (torch.uint8, (3, 4, 24, 24, 3))
        wanted = backwards if batch.video == 2 else starts
        assert [_grey(view) for view in batch.views.numpy()] == wanted


def test_clips_and_crops_can_be_asked_for(manifest: Manifest) -> None:
    evaluate = EvaluateSpec(clips=5, crops="full", short_side=32)
    (full,) = loader.test_batches(_data(), evaluate, open_store(_data(), manifest), [1])
    assert full.views.shape == (5, 4, 32, 48, 3)
    (crops,) = loader.test_batches(_data(), evaluate, open_store(_data(), manifest), [1], clips=1, crops=3)
    assert crops.views.shape == (3, 4, 32, 32, 3)
    # Left, centre and right of 48 columns, of which the last 8 are white and the others the frame's own grey.
    right_edges = crops.views[:, 0, 16, -4, 0].tolist()
    assert right_edges[0] < 200
    assert right_edges[1] < 200
    assert right_edges[2] > 245


def test_no_videos_no_batches(manifest: Manifest) -> None:
    assert list(loader.test_batches(_data(2), EvaluateSpec(), open_store(_data(), manifest), [])) == []


# What goes wrong.


@pytest.fixture
def broken(videos: Path, tmp_path: Path) -> Manifest:
    """The manifest with the fourth video cut short."""
    for path in videos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    os.truncate(tmp_path / "3.mp4", 300)
    return read_manifest(tmp_path / "list.csv")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_video_is_named_when_its_batch_is_asked_for(broken: Manifest, workers: int) -> None:
    path = str(Path(broken.source).parent / "3.mp4")
    good: list[float] = []
    batches = _batches(broken, _data(workers), end_step=6)
    with pytest.raises(DecodeError) as caught:
        good.extend(batch.ids.item() for batch in batches)
    assert caught.value.path == path
    assert caught.value.reason
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)
    asked = [ids.item() for *_, ids in _keys(broken)]
    assert good == asked[: asked.index(3)]
    assert list(batches) == []


def _keys(manifest: Manifest) -> list[Any]:
    return list(order.micro_batches(len(manifest), 5, 4, 1, 2, 0, 1, 0, 6))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_video_is_named_in_the_test(broken: Manifest, workers: int) -> None:
    store = open_store(_data(), broken)
    batches = loader.test_batches(_data(workers), EvaluateSpec(clips=1, short_side=24), store, [2, 3, 4])
    assert next(batches).video == 2
    with pytest.raises(DecodeError, match=r"3\.mp4"):
        next(batches)


# Substitutes for what cannot be read.


def _kept(*excluded: int) -> Kept:
    return Kept(NUM_VIDEOS, np.array(excluded, np.int64))


def test_clips_in_quarantine_are_left_out(manifest: Manifest) -> None:
    data = _data()
    run = {"virtual_gpus": 1, "clips_per_gpu": 1, "steps_per_epoch": 6, "rank": 0, "ranks": 1}
    batches = loader.training_batches(
        data, open_store(data, manifest), seed=5, start_step=0, end_step=6, kept=_kept(2, 3, 8), **run
    )
    order_ = order.epoch_order(6, 5, 0)
    assert [batch.ids.item() for batch in batches] == [[0, 1, 4, 5, 6, 7][place] for place in order_]


def _substituted(broken: Manifest, workers: int, **changes: int) -> list[Any]:
    with _batches(broken, _data(workers, on_bad_clip="skip"), end_step=6, **changes) as batches:
        return [
            (b.step, b.virtual_gpu, b.ids.tolist(), b.labels.tolist(), b.clips.numpy().tobytes(), b.bad)
            for b in batches
        ]


def test_a_bad_clip_is_replaced_and_named(broken: Manifest) -> None:
    batches = _substituted(broken, 0)
    for (*_, wanted), (_, _, ids, labels, _, bad) in zip(_keys(broken), batches, strict=True):
        if wanted.item() != 3:
            assert (ids, bad) == (wanted.tolist(), ())
            continue
        assert len(bad) == 1
        assert (bad[0].clip, bad[0].path, bad[0].substitute) == (3, str(Path(broken.source).parent / "3.mp4"), ids[0])
        assert bad[0].reason and ids[0] != 3 and labels == [ids[0] % 4]
    assert any(bad for *_, bad in batches)


def test_substitutes_are_the_same_on_all_ranks_workers_and_from_any_step(broken: Manifest) -> None:
    alone = _substituted(broken, 0)
    assert _substituted(broken, 2) == alone
    shares = [_substituted(broken, 0, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(batch for share in shares for batch in share) == alone
    assert _substituted(broken, 0, start_step=3) == alone[12:]


def test_a_substitute_that_is_bad_too_is_named_and_another_taken(broken: Manifest) -> None:
    for video in range(NUM_VIDEOS):
        if video not in (4, 5, 6):
            os.truncate(Path(broken.source).parent / f"{video}.mp4", 300)
    tried = set[int]()
    for *_, ids, labels, _, bad in _substituted(broken, 0):
        assert ids[0] in (4, 5, 6) and labels == [ids[0] % 4]
        assert not bad or bad[0].substitute == ids[0]
        tried |= {clip.clip for clip in bad[1:]}
        assert all(clip.substitute is None for clip in bad[1:])
    assert tried and not tried & {4, 5, 6}


def test_a_set_without_one_good_clip_ends_the_run(broken: Manifest) -> None:
    for video in range(NUM_VIDEOS):
        os.truncate(Path(broken.source).parent / f"{video}.mp4", 300)
    with pytest.raises(DecodeError, match="nor can 16 others be read in its place"):
        _substituted(broken, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_video_of_the_test_has_no_substitute(broken: Manifest, workers: int) -> None:
    data = _data(workers, on_bad_clip="skip")
    evaluate = EvaluateSpec(clips=1, short_side=24)
    batches = list(loader.test_batches(data, evaluate, open_store(data, broken), [2, 3, 4]))
    assert [(batch.video, batch.bad and batch.bad.clip) for batch in batches] == [(2, None), (3, 3), (4, None)]
    assert not len(batches[1].views) and len(batches[2].views)


# Clips that bring their reader down.


@dataclass(frozen=True)
class Trap:
    """A store whose clip 3 ends its reader, or holds it for ever."""

    store: Store
    hangs: bool

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest

    def read_clip(self, clip: int, choose: Any, view_of: Any) -> Any:
        if clip == 3:
            time.sleep(1000) if self.hangs else os.kill(os.getpid(), signal.SIGKILL)
        return self.store.read_clip(clip, choose, view_of)

    def read_views(self, clip: int, choose: Any, views_of: Any) -> Any:
        raise NotImplementedError


def _trapped(manifest: Manifest, hangs: bool, on_bad_clip: str) -> loader.Batches[loader.MicroBatch]:
    data = _data(workers=2, on_bad_clip=on_bad_clip, clip_seconds=2 if hangs else 120)
    run = {"virtual_gpus": 4, "clips_per_gpu": 1, "steps_per_epoch": 2, "rank": 0, "ranks": 1}
    trap = Trap(open_store(data, manifest), hangs)
    return loader.training_batches(data, trap, seed=5, start_step=0, end_step=4, **run)


each_trap = pytest.mark.parametrize(
    ("hangs", "reason"), [(False, "kills the process that reads it"), (True, "is not read within")]
)


@each_trap
def test_a_clip_that_ends_or_holds_its_reader_is_named(manifest: Manifest, hangs: bool, reason: str) -> None:
    good: list[int] = []
    with pytest.raises(DecodeError, match=rf"3\.mp4: {reason}"):
        good.extend(batch.ids.item() for batch in _trapped(manifest, hangs, "fail"))
    asked = [ids.item() for *_, ids in _keys(manifest)]
    assert good == asked[: asked.index(3)]


@each_trap
def test_the_run_goes_on_without_a_clip_that_ends_or_holds_its_reader(
    manifest: Manifest, hangs: bool, reason: str
) -> None:
    with _trapped(manifest, hangs, "skip") as batches:
        found = list(batches)
    assert [(b.step, b.virtual_gpu) for b in found] == [(step, gpu) for step in range(4) for gpu in range(4)]
    bad = [clip for batch in found for clip in batch.bad]
    assert {clip.clip for clip in bad} == {3}
    assert all(clip.reason.startswith(reason) for clip in bad)
    asked = [ids.item() for *_, ids in _keys(manifest)][:16]
    assert [b.ids.item() for b in found if not b.bad] == [clip for clip in asked if clip != 3]


# Workers.


def test_close_ends_the_workers_and_the_batches(manifest: Manifest) -> None:
    others = set(multiprocessing.active_children())
    batches = _batches(manifest, _data(workers=2), end_step=1000)
    assert next(batches).step == 0
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    batches.close()
    assert _until(lambda: not any(worker.is_alive() for worker in workers))
    assert list(batches) == []
    batches.close()


def test_the_end_of_the_run_ends_the_workers(manifest: Manifest) -> None:
    others = set(multiprocessing.active_children())
    batches = _batches(manifest, _data(workers=1))
    workers = set(multiprocessing.active_children()) - others
    assert len(list(batches)) == 20
    assert _until(lambda: not any(worker.is_alive() for worker in workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_job_leaves_the_workers_to_the_main_process(manifest: Manifest, number: signal.Signals) -> None:
    with _batches(manifest, _data(workers=1)) as batches:
        first = next(batches)  # the worker is up
        for pid in _descendants(os.getpid()):
            os.kill(pid, number)
        steps = [first.step, *(batch.step for batch in batches)]
    assert steps == [step for step in range(5) for _ in range(4)]


def _descendants(pid: int) -> list[int]:
    """The processes below one: the fork server, its workers and the resource tracker."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


def test_a_signal_to_the_main_process_is_not_lost(manifest: Manifest) -> None:
    held: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: held.append(number))
    try:
        with _batches(manifest, _data(workers=1)) as batches:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(list(batches)) == 20
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert held == [signal.SIGUSR1]


@pytest.mark.parametrize("ending", ["raise SystemExit(7)", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_without_close_does_not_hang(videos: Path, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(manifest=str(videos / "list.csv"), ending=ending))
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(loader.__file__).parents[2])},
    )
    assert done.returncode in (7, -9), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


_SCRIPT = """
import multiprocessing, os
from summit_train.data import loader
from summit_train.data.manifest import read_manifest
from summit_train.data.quarantine import Kept
from summit_train.data.store import Store, open_store
from summit_train.spec import DataSpec

if __name__ == "__main__":
    data = DataSpec(train="x", val="x", num_frames=4, frame_stride=2, short_side=(24, 32), crop=24, workers=2)
    batches = loader.training_batches(
        data, open_store(data, read_manifest({manifest!r})), seed=0, virtual_gpus=1, clips_per_gpu=1,
        steps_per_epoch=9, rank=0, ranks=1, start_step=0, end_step=1000,
    )
    next(batches)
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    {ending}
"""


def test_a_worker_that_is_killed_ends_the_run_with_an_error(manifest: Manifest) -> None:
    others = set(multiprocessing.active_children())
    batches = _batches(manifest, _data(workers=1), end_step=100_000)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    assert _until(lambda: not any(_reads_at(batches, 0.02) for _ in range(20)))  # it has read ahead and waits
    worker.kill()
    with pytest.raises(RunFailed, match="worker"):
        for _ in batches:
            pass
    assert list(batches) == []


def _reads_at(batches: loader.Batches[loader.MicroBatch], pause: float) -> bool:
    """Whether a worker is reading a clip, a moment later."""
    time.sleep(pause)
    return bool(batches._board.read())


def test_batches_are_pinned_whole(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = next(_batches(manifest, _data()))
    assert batch.pin_memory() == batch
    assert sorted(pinned) == [(1,), (1,), (1, 4, 24, 24, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_pinned_memory(manifest: Manifest, workers: int) -> None:
    for batch in _batches(manifest, _data(workers), end_step=1):
        assert batch.clips.is_pinned()
        assert batch.labels.is_pinned()
    evaluate = EvaluateSpec(clips=1, short_side=24)
    for test_batch in loader.test_batches(_data(workers), evaluate, open_store(_data(), manifest), [0, 1]):
        assert test_batch.views.is_pinned()
