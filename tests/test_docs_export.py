"""The program in docs/export.md runs as it stands, and gives the network's logits."""

from __future__ import annotations

import re
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from summit_train.__main__ import main
from summit_train.inference.trained import open_trained
from summit_train.inference.verify import normalised
from summit_train.models.online import StreamNetwork

PAGE = Path(__file__).resolve().parents[1] / "docs/export.md"


@torch.inference_mode()
def test_the_program_of_the_page(
    trained_run: Path,
    motion_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(program.splitlines()) <= 20
    video = motion_set / "videos/val_000000.mp4"
    (tmp_path / "video.mp4").symlink_to(video)
    monkeypatch.chdir(tmp_path)
    # Every second of eight frames.
    assert main(["export", str(trained_run), "--out", "stream.onnx", "--stream", "data.frame_stride=2"]) == 0
    capsys.readouterr()
    found: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), found)
    frames = np.stack([frame.to_ndarray(format="rgb24") for frame in av.open(str(video)).decode(video=0)])[::2]
    trained = open_trained(trained_run)
    stream, caches, names = StreamNetwork(trained.network(torch.device("cpu"), ready=False)), [], []
    for frame in normalised(torch.from_numpy(frames)[None])[0]:
        logits, caches = stream(frame[None], caches)
        names.append(trained.classes[int(logits.argmax())])
    assert capsys.readouterr().out.split() == names and len(names) == 4
    np.testing.assert_allclose(found["out"]["logits"], logits, atol=1e-4)  # type: ignore[index]
