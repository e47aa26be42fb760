"""Score videos by their views or frame by frame: each once, whatever the number of ranks."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed
from summit_train.core.files import replacing
from summit_train.core.watch import Ballot, Stopped, StopRequest
from summit_train.data.bad_clips import check_test, record_test
from summit_train.data.batches.loader import BadClip, FrameBlock, WholeVideo, test_batches, whole_videos
from summit_train.data.dataset import Dataset
from summit_train.data.loading import Sample
from summit_train.data.video.augment import stream_frames
from summit_train.data.video.source import DecodeError
from summit_train.evaluation.scores import Scored, Scores
from summit_train.models.build import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.plan import views_at_once
from summit_train.spec import DataSpec, Spec

Progress = Callable[[int, int], None]  # (videos done, videos of this rank); equal while it waits for the others
# The result of each video, such as its logits, or why it has none; before that None after each block of the video.
Results = Generator[NDArray[Any] | BadClip | None, None, None]
Result = TypeVar("Result", bound=Scored, covariant=True)


class PartialScores:
    """The results of the videos scored so far, by their numbers in the manifest, and the unreadable ones among them.

    path: the file that keeps them, so that a stopped evaluation resumes; None: memory only. key: everything that the
    results depend on; a file with another key is ignored.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self.results: dict[int, NDArray[Any]] = {}
        self.bad: list[BadClip] = []
        self._path = path
        self._key = key
        if path is None:
            return
        # A missing or damaged file: all videos are scored again.
        with suppress(FileNotFoundError, BadZipFile, EOFError, KeyError, ValueError), np.load(path) as file:
            kept = dict(file)
            if str(kept["key"]) == key:
                bad = [BadClip(**clip) for clip in json.loads(str(kept["bad"]))]
                self.add(kept["video"].tolist(), np.split(kept["scores"], kept["ends"][:-1]), bad)

    def add(self, videos: Sequence[int], results: Sequence[NDArray[Any]], bad: Sequence[BadClip]) -> None:
        self.results |= zip(videos, results, strict=True)
        self.bad += bad

    def save(self) -> None:
        if self._path is not None and self.results:
            results = list(self.results.values())
            with replacing(self._path) as file:
                np.savez(
                    file,
                    key=np.array(self._key),
                    video=np.array(list(self.results), np.int64),
                    scores=np.concatenate(results),
                    ends=np.cumsum(list(map(len, results))),
                    bad=np.array(json.dumps([asdict(clip) for clip in self.bad])),
                )


@dataclass(frozen=True)
class VideoScorer(Generic[Result]):
    """Scores the videos of a data set on all ranks as spec.evaluate says, each rank its shard.

    No video is padded or scored twice. A video's views form batches of their own, so its scores do not depend on the
    number of ranks. Where `stop` asks one rank to stop, all leave between two videos, or two blocks of a video that is
    read as a whole, and raise Stopped. keeps_records: write bad videos to the run's bad_clips.jsonl, and allow
    data.max_bad_fraction of them. A subclass defines the result of a video: `shape`, `results` and `gathered`.
    """

    spec: Spec
    dataset: Dataset
    world: World
    device: torch.device
    stop: StopRequest = field(default_factory=StopRequest)
    keeps_records: bool = True

    def score(
        self,
        model: nn.Module,
        progress: Progress = lambda done, total: None,
        *,
        source: str | None = "the network",
        earlier: PartialScores | None = None,
    ) -> Result | None:
        """Score all videos; return the results on rank 0, None elsewhere. Collective.

        earlier: rank 0's results so far, which are not computed again; the new ones are added and saved. With
        data.on_bad_clip "skip" a bad video is counted and recorded. Raises AgreedError if there are too many, else
        DecodeError at the first. Raises RunFailed, with `source`, at scores that are not finite; None: as results.
        """
        earlier = earlier or PartialScores()
        num_known = len(earlier.bad)
        ballot = Ballot(self.world, self.stop)
        known = set(self.world.broadcast(list(earlier.results)))
        shard = self.dataset.shard(self.world.rank, self.world.size).tolist()
        videos = [video for video in shard if video not in known]
        scores, bad = self._score_shard(model, videos, progress, ballot, source)
        for _ in ballot.rounds():
            progress(len(scores), len(videos))  # the others still score: a wait longer than a stall is allowed
        gathered = self.world.gather((videos[: len(scores)], scores, [asdict(clip) for clip in bad]))
        if gathered is not None:
            for scored, results, unreadable in gathered:
                earlier.add(scored, results, [BadClip(**clip) for clip in unreadable])
            earlier.save()
            if self.keeps_records:  # before the request to stop: the evaluation that resumes records only new ones
                record_test(self.spec.run_path, earlier.bad[num_known:])
        if ballot.is_stopped:
            raise Stopped
        assert len(scores) == len(videos)
        data = self.spec.data
        clips = np.arange(len(self.dataset))
        if self.keeps_records and data.on_bad_clip == "skip":
            check_test(self.world, self.spec.run_path, len(earlier.bad), len(clips), data.max_bad_fraction)
        if gathered is None:
            return None
        assert sorted(earlier.results) == clips.tolist(), "each video exactly once"
        is_read = ~np.isin(clips, [clip.clip for clip in earlier.bad])
        return self.gathered(clips, [earlier.results[clip] for clip in clips.tolist()], is_read)

    def _score_shard(
        self, model: nn.Module, videos: Sequence[int], progress: Progress, ballot: Ballot, source: str | None
    ) -> tuple[list[NDArray[Any]], list[BadClip]]:
        """Return this rank's results up to a stop, with the model in evaluation mode, and its bad videos."""
        scores = list[NDArray[Any]]()
        bad = list[BadClip]()
        was_training = model.training
        shape = self.shape
        model.eval()
        if not videos:
            progress(0, 0)
        results = self.results(model, videos)
        with torch.inference_mode(), mixed_precision(self.spec.precision, self.device), closing(results):
            for result in results:
                if isinstance(result, BadClip):
                    bad.append(result)
                    scores.append(np.full(shape, np.nan))
                elif result is not None:
                    if source is not None:
                        check_finite(result, self.dataset.manifest.path(videos[len(scores)]), source)
                    assert result.shape[1:] == shape[1:]
                    scores.append(result)
                progress(len(scores), len(videos))
                if ballot.is_over(busy=len(scores) < len(videos)):
                    break
        model.train(was_training)
        return scores, bad

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result of a video that cannot be read; others may be longer."""
        raise NotImplementedError

    def results(self, model: nn.Module, videos: Sequence[int]) -> Results:
        """Yield each video's result, or why it has none."""
        raise NotImplementedError

    def gathered(self, clips: NDArray[np.int64], results: Sequence[NDArray[Any]], is_read: NDArray[np.bool_]) -> Result:
        """Return the results of all `clips`, in their order, as one object."""
        raise NotImplementedError

    def each_video(self, videos: Sequence[int], sample: Sample, score: Callable[[WholeVideo], Results]) -> Results:
        """Yield what `score` yields for the chosen frames of each video, or why it cannot be read."""
        data = self.spec.data.on_node(self.world.local_size)
        for video in whole_videos(data, self.spec.evaluate, self.dataset.store, videos, sample):
            try:
                yield from score(video)
            except DecodeError as error:
                if data.on_bad_clip == "fail":
                    raise
                yield BadClip(video.video, error.path, error.reason, None)


class Scorer(VideoScorer[Scores]):
    """Scores videos by the logits of their classes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.spec.model.num_classes,)

    def gathered(self, clips: NDArray[np.int64], results: Sequence[NDArray[Any]], is_read: NDArray[np.bool_]) -> Scores:
        labels = self.dataset.manifest.class_labels(clips, self.spec.multi_label_classes)
        return Scores(clips, labels, np.stack(results).astype(np.float32), is_read)

    def results(self, model: nn.Module, videos: Sequence[int]) -> Results:
        """Yield each video's logits, averaged as spec.evaluate.mode says, or why it has none."""
        spec = self.spec
        if spec.evaluate.mode == "stream":
            average = partial(stream_scores, Streamer(model, spec, self.device), spec.data)
            yield from self.each_video(videos, partial(stream_frames, spec.data), average)
            return
        normalise = Normalise(parameter_type(spec.precision), self.device, spec.data.input)
        batches = test_batches(spec.data.on_node(self.world.local_size), spec.evaluate, self.dataset.store, videos)
        for batch, video in zip(batches, videos, strict=True):
            assert batch.video == video
            if batch.bad is None:
                yield view_logits(model, normalise, batch.views, spec).mean(0).cpu().numpy()
            else:
                yield batch.bad


def view_logits(model: nn.Module, normalise: Normalise, views: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the logits, fp64 (n, classes), of views (n, T, h, w, C), computed in parts of bounded memory."""
    parts = torch.split(views, views_at_once(spec, views.shape[2] * views.shape[3]))
    return torch.cat([model(normalise(part)) for part in parts]).double()


def check_finite(scores: NDArray[Any], path: str, source: str) -> None:
    """Raise RunFailed, with the name of their source, if the scores of the video at `path` are not finite."""
    if not np.isfinite(scores).all():
        raise RunFailed(f"{source}: scores are not finite, those of {path} the first")


class Streamer:
    """The stream of a network with the same weights, however the network is executed, and its input."""

    def __init__(self, model: nn.Module, spec: Spec, device: torch.device) -> None:
        dtype = parameter_type(spec.precision)
        # A plain one: an accelerated network has fused the shifts that a stream replaces. The names are the same.
        plain = build_network(spec, torch.Generator()).to(device=device, dtype=dtype)
        plain.load_state_dict(model.state_dict())
        self.network = StreamNetwork(plain)
        self.normalise = Normalise(dtype, device, spec.data.input)
        self.num_classes = spec.model.num_classes


class StreamAverage:
    """The running average of a stream's logits over one video, in one crop or several.

    order: the numbers of the frames that the stream sees, rising, some perhaps twice. edges: frame numbers, rising.
    """

    def __init__(self, streamer: Streamer, order: Sequence[int], edges: Sequence[int]) -> None:
        self._streamer = streamer
        self._times = Counter(order)
        self._edges = edges
        self._caches: list[torch.Tensor] = []
        self._sum = torch.zeros((), dtype=torch.float64)
        self._num_seen = 0
        self._averages: list[torch.Tensor | None] = [None] * len(edges)

    def add(self, block: FrameBlock) -> None:
        for index, number in enumerate(block.numbers.tolist()):
            if not self._times[number]:
                continue
            frame_NCHW = self._streamer.normalise(block.views[:, index : index + 1])[:, 0]
            for _ in range(self._times[number]):
                logits, self._caches = self._streamer.network(frame_NCHW, self._caches)
                self._sum = self._sum.to(logits.device) + logits.double().mean(0)
                self._num_seen += 1
            later = bisect_right(self._edges, number)  # the edges above it have this frame before them
            self._averages[later:] = [self._sum / self._num_seen] * (len(self._edges) - later)

    def at_edges(self, unknown_value: float = np.nan) -> NDArray[np.float64]:
        """Return the logits averaged over the crops and all frames before each edge, fp64 (len(edges), classes).

        unknown_value: replaces the logits before the first frame.
        """
        unknown = np.full(self._streamer.num_classes, unknown_value)
        return np.stack([unknown if average is None else average.cpu().numpy() for average in self._averages])


def stream_scores(streamer: Streamer, data: DataSpec, video: WholeVideo) -> Results:
    """Yield a video's logits, fp64 (classes,), averaged over all frames and crops.

    Source: the TSM paper (journal version), section 5.5.1 and Table 7: "the prediction averaged from all the frames".
    """
    number = video.first.num_frames
    average = StreamAverage(streamer, stream_frames(data, number).tolist(), [number])
    for block in video.blocks():
        average.add(block)
        yield None
    yield np.asarray(average.at_edges()[0])
