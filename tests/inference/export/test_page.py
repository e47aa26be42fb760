"""The programs in docs/export.md run as they stand, and give the logits of the network in an evaluation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from summit_train.core.comm import World
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.video.render import Renderer, upright_size
from summit_train.evaluation.scoring import Scorer
from summit_train.inference.export.export import centre_view
from summit_train.inference.trained import open_trained
from summit_train.models.precision import Normalise
from tests.closeness import assert_near
from tests.data.clips import write_as
from tests.inference.export.conftest import run_export
from tests.streamed import CPU

PAGE = Path(__file__).resolve().parents[3] / "docs/export.md"
BEGIN, STREAM, CLIP = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
# Frames, width, height, rotation. 64 x 48 is scaled to 42 x 32 by rounding down, 45 x 37 is yuv444p, 30 x 20 grows.
VIDEOS = [
    (12, 64, 48, 0),
    (5, 30, 20, 0),
    (25, 86, 50, 0),
    (9, 64, 48, 90),
    (8, 64, 48, -90),
    (3, 45, 37, 0),
    (7, 32, 32, 180),
]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of coloured noise in many shapes; the manifest is videos.csv."""
    folder = tmp_path_factory.mktemp("videos")
    for number, (length, width, height, rotation) in enumerate(VIDEOS):
        frames = np.random.default_rng(number).integers(0, 256, (length, height // 4 + 1, width // 4 + 1, 3), np.uint8)
        frames = frames.repeat(4, 1).repeat(4, 2)[:, :height, :width]
        write_as(folder / f"{number}.mp4", frames, rotation=rotation)
    write_manifest(folder / "videos.csv", [ManifestRow(f"{number}.mp4", number % 4) for number in range(len(VIDEOS))])
    return folder


@pytest.fixture(scope="module")
def clip_model(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.onnx and model.json of the clip network."""
    folder = tmp_path_factory.mktemp("clip")
    run_export(trained_run, folder / "model.onnx")
    return folder


def described(folder: Path, part: str, **values: Any) -> None:
    """Change a part of model.json to what an export with other settings writes; the graph would be the same."""
    description = json.loads((folder / "model.json").read_text()) | {"model": "model.onnx"}
    description[part] |= values
    (folder / "model.json").write_text(json.dumps(description))


def ran(program: str, video: Path | None = None) -> dict[str, Any]:
    """Run a program of the page in the current folder, on `video`; return what it leaves behind."""
    if video is not None:
        Path("video.mp4").unlink(missing_ok=True)
        Path("video.mp4").symlink_to(video)
    found: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), found)
    return found


def evaluated(run: Path, manifest: Path, *overrides: str) -> tuple[NDArray[np.float32], list[str]]:
    """The evaluation's logits of each video, and the names of their classes."""
    trained = open_trained(run, [*overrides, f"data.val={manifest}"])
    found = Scorer(trained.spec, Dataset.open(trained.spec, "val"), World(), CPU).score(trained.network(CPU))
    assert found is not None
    return found.scores, [trained.classes[int(label)] for label in found.scores.argmax(1)]


def test_a_frame_is_what_the_evaluation_sees(clip_model: Path, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clip_model)
    for crop in ((32, 48), (56, 40), (32, 32)):  # the last one is that of the export
        described(clip_model, "preprocessing", crop=list(crop))
        seen = ran(BEGIN)["seen"]
        for number in range(len(VIDEOS)):
            picture = next(av.open(str(videos / f"{number}.mp4")).decode(video=0))
            (ours,) = Renderer(centre_view(32, crop, *upright_size(picture)))(picture)
            expected = Normalise(torch.float32, CPU)(torch.from_numpy(ours)[None, None])[0, 0].numpy()
            assert_near(seen(picture), expected, 1e-6, str(number))


@pytest.mark.parametrize(("kind", "stride", "clips"), [("dense", 1, 1), ("dense", 3, 3), ("uniform", None, 3)])
def test_the_program_of_clips(
    clip_model: Path, videos: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], kind: str, stride: int | None, clips: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(clip_model)
    described(clip_model, "sampling", kind=kind, frame_stride=stride, clips=clips)
    overrides = [f"data.sampling={kind}", f"data.frame_stride={stride or 1}", f"evaluate.clips={clips}"]
    logits, names = evaluated(trained_run, videos / "videos.csv", *overrides)
    for number, expected in enumerate(logits):
        assert_near(ran(BEGIN + CLIP, videos / f"{number}.mp4")["logits"], expected, 1e-5, str(number))
    assert capsys.readouterr().out.split() == names


def test_the_program_of_a_stream(
    videos: Path, trained_run: Path, stream_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """An evaluation in mode stream averages the logits of all frames; here each frame's are told."""
    monkeypatch.chdir(tmp_path)
    for suffix in (".onnx", ".json"):
        shutil.copy(stream_file.with_suffix(suffix), tmp_path / f"model{suffix}")
    described(tmp_path, "sampling", frame_stride=2)
    logits, _ = evaluated(trained_run, videos / "videos.csv", "evaluate.mode=stream", "data.frame_stride=2")
    told = STREAM.replace("    print(", "    everything.append(out['logits'][0])\n    print(")
    capsys.readouterr()
    for number, expected in enumerate(logits):
        found = ran(f"{BEGIN}everything = []\n{told}", videos / f"{number}.mp4")["everything"]
        assert_near(np.mean(found, 0), expected, 1e-5, str(number))
        assert len(capsys.readouterr().out.split()) == len(found) == -(-VIDEOS[number][0] // 2)


def test_the_file_alone_has_labels_normalisation_and_views(clip_model: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(clip_model / "model.onnx", providers=["CPUExecutionProvider"])
    told = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    description = json.loads((clip_model / "model.json").read_text())
    assert told["classes"] == description["classes"] and told["preprocessing"]["mean"][0] == 0.485 * 255
    assert set(told) == {"classes", "classes_are_named", "preprocessing", "sampling"}
    assert told["preprocessing"].keys() == description["preprocessing"].keys()
    assert "2 * clips * i" in told["sampling"]["rule"] or "L = max(0, N" in told["sampling"]["rule"]
