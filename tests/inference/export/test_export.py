"""A trained run becomes an ONNX file with its description, or nothing where the file would be wrong."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript
import pytest
import torch

import summit_train
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import file_sha256
from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.inference.export import export as module
from summit_train.inference.export.export import RULES, SCALING, Export, centre_view, difference
from summit_train.inference.trained import open_trained
from summit_train.models import VideoNetwork
from tests.runs import changed_copy


def run(trained: Path, out: Path, *overrides: str, said: list[str] | None = None, **options: Any) -> dict[str, Any]:
    tell = (said if said is not None else []).append
    return Export(open_trained(trained, overrides), out, tell=tell, **options).run()


@pytest.fixture(scope="module")
def stream_file(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported stream of the trained run; its description lies beside it."""
    out = tmp_path_factory.mktemp("export") / "new" / "stream.onnx"
    assert run(trained_run, out, stream=True) == json.loads(out.with_suffix(".json").read_text())
    return out


@pytest.fixture
def without_exporter(stream_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter, which takes seconds, gives the stream that it gave before."""
    monkeypatch.setattr(module, "exported", lambda *_, stream: stream_file.read_bytes())


def test_the_description_of_a_stream(stream_file: Path, trained_run: Path, motion_set: Path) -> None:
    found = json.loads(stream_file.with_suffix(".json").read_text())
    # 8, 8, 16, 16, 32, 32, 64, 64 channels of a ResNet-18 at an eighth of its width, an eighth of them cached.
    caches = [*3 * [[1, 1, 8, 8]], *2 * [[1, 2, 4, 4]], *2 * [[1, 4, 2, 2]], [1, 8, 1, 1]]
    tensor = lambda name, shape: {"name": name, "shape": shape, "dtype": "float32"}  # noqa: E731
    checks, speed = found.pop("verification"), found.pop("speed")
    for part in (checks["random"], checks["video"]):
        assert 0 <= part.pop("largest_difference") <= 1e-5 * part.pop("largest_logit")
    assert checks == {
        "tolerance": 1e-4,
        "random": {"clips": 1, "frames": 32},
        "video": {"path": "videos/val_000000.mp4", "clips": 1, "frames": 32},
        "note": None,
    }
    assert speed["frames_per_second"] == pytest.approx(1000 / speed["ms_a_call"]) and speed["threads"] == 1
    versions = found.pop("versions")
    assert versions.pop("opset") >= 18 and versions.pop("ir") >= 8
    assert versions == {
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "onnxscript": onnxscript.__version__,
        "summit_train": summit_train.__version__,
    }
    operators = found.pop("operators")
    assert (operators["Conv"], operators["Concat"]) == (20, 8) and "BatchNormalization" not in operators
    assert found == {
        "model": "stream.onnx",
        "sha256": file_sha256(stream_file),
        "bytes": stream_file.stat().st_size,
        "kind": "stream",
        "precision": "fp32",
        "network": "tsm resnet18",
        "checkpoint": str(trained_run / "checkpoints/step_00000020.pt"),
        "step": 20,
        "inputs": [tensor("frame", [1, 3, 32, 32]), *(tensor(f"cache_in_{i}", c) for i, c in enumerate(caches))],
        "outputs": [tensor("logits", [1, 4]), *(tensor(f"cache_out_{i}", c) for i, c in enumerate(caches))],
        "state": {f"cache_in_{number}": f"cache_out_{number}" for number in range(8)},
        "preprocessing": {
            "colours": "RGB",
            "value_range": [0, 255],
            "mean": [0.485 * 255, 0.456 * 255, 0.406 * 255],
            "std": [0.229 * 255, 0.224 * 255, 0.225 * 255],
            "scaling": SCALING,
            "short_side": 32,
            "crop": [32, 32],
        },
        "sampling": {"kind": "dense", "frames": 4, "frame_stride": 1, "clips": 1, "rule": RULES["dense"]},
        "classes": (motion_set / "classes.txt").read_text().split(),
        "classes_are_named": True,
        "conversion": None,
    }
    assert sorted(path.name for path in stream_file.parent.iterdir()) == ["stream.json", "stream.onnx"]


def test_the_clip_network_and_what_eight_bits_cost(trained_run: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "clip.onnx", list[str]()
    options = {"size": (48, 32), "batch": 2, "precision": "int8", "max_videos": 10}
    found = run(trained_run, out, "evaluate.clips=3", "data.sampling=uniform", said=said, **options)
    assert found["inputs"] == [{"name": "clip", "shape": [2, 4, 3, 48, 32], "dtype": "float32"}]
    assert found["outputs"] == [{"name": "logits", "shape": [2, 4], "dtype": "float32"}] and found["state"] == {}
    rule = RULES["uniform"]
    assert found["sampling"] == {"kind": "uniform", "frames": 4, "frame_stride": None, "clips": 3, "rule": rule}
    assert found["operators"]["ConvInteger"] == 20
    checks, conversion = found["verification"], found["conversion"]
    assert checks["random"]["clips"] == 4 and checks["video"]["clips"] == 3
    for part in ("random", "video"):
        assert checks[part]["largest_difference"] < 1e-5 * checks[part]["largest_logit"]
        assert conversion[part]["largest_difference"] > 1e-5 * checks[part]["largest_logit"]
    accuracy = conversion["accuracy"]
    assert (accuracy["videos"], accuracy["unreadable"]) == (10, 0)
    assert 0 <= accuracy["top1"] <= 100 and 0 <= accuracy["top1_fp32"] <= 100 and accuracy["agreement"] >= 50
    assert found["sha256"] == file_sha256(out) and len(said) == 3


def test_the_largest_difference_is_infinite_without_numbers() -> None:
    ours, theirs = np.array([[[1.0, -4.0]]]), np.array([[[1.5, -4.25]]])
    assert difference(ours, theirs) == (0.5, 4.0)
    for wrong in (np.nan, np.inf):
        assert difference(ours, np.array([[[1.0, wrong]]]))[0] == np.inf


def test_large_logits_pass_and_those_of_a_wrong_graph_do_not(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At logits of 1e3 rounding is above 1e-4. A graph whose classifier is off by 1e-3 is wrong."""
    trained = open_trained(trained_run)
    scaled = {name: trained.weights[name] * 1e3 for name in ("fc.weight", "fc.bias")}
    trained = replace(trained, weights=trained.weights | scaled)
    assert Export(trained, tmp_path / "a.onnx").run()["verification"]["random"]["largest_logit"] > 100
    right = module.exported

    def off(network: VideoNetwork, *sizes: int, stream: bool) -> bytes:
        wrong = copy.deepcopy(network)
        wrong.get_parameter("fc.weight").data.mul_(1.001)
        return right(wrong, *sizes, stream=stream)

    monkeypatch.setattr(module, "exported", off)
    (tmp_path / "a.onnx").unlink()
    with pytest.raises(RunFailed, match="the exported graph is wrong: its logits differ"):
        Export(trained, tmp_path / "a.onnx").run()
    assert not (tmp_path / "a.onnx").exists()


def frozen(model: bytes) -> bytes:
    """The graph as an exporter leaves it that takes a cache for a constant: zeros."""
    loaded = onnx.load_from_string(model)
    shape = [value.dim_value for value in loaded.graph.input[1].type.tensor_type.shape.dim]
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), "frozen"))
    for node in loaded.graph.node:
        node.input[:] = ["frozen" if name == "cache_in_0" else name for name in node.input]
    onnx.checker.check_model(loaded)
    return loaded.SerializeToString()


def test_a_broken_graph_is_refused_and_leaves_nothing(
    trained_run: Path, stream_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "exported", lambda *_, stream: frozen(stream_file.read_bytes()))
    wrong = r"not written: the exported graph is wrong: its logits differ .* is allowed, 0.0001 of the largest"
    with pytest.raises(RunFailed, match=wrong) as refused:
        run(trained_run, tmp_path / "new/stream.onnx", stream=True)
    assert "\n" not in str(refused.value) and list(tmp_path.rglob("*.*")) == []
    # An earlier file stays.
    (tmp_path / "stream.onnx").write_bytes(b"before")
    with pytest.raises(RunFailed, match=wrong):
        run(trained_run, tmp_path / "stream.onnx", stream=True)
    assert [path.name for path in tmp_path.glob("*.*")] == ["stream.onnx"]
    assert (tmp_path / "stream.onnx").read_bytes() == b"before"


@pytest.mark.usefixtures("without_exporter")
def test_half_the_digits(trained_run: Path, tmp_path: Path) -> None:
    found = run(trained_run, tmp_path / "half.onnx", stream=True, precision="fp16", max_videos=5)
    assert {info["dtype"] for info in (*found["inputs"], *found["outputs"])} == {"float16"}
    assert 0 < found["conversion"]["random"]["largest_difference"] < 0.05
    assert found["conversion"]["accuracy"]["agreement"] == 100


def biased(model: bytes, *bias: float) -> bytes:
    loaded = onnx.load_from_string(model)
    (old,) = [value for value in loaded.graph.initializer if value.name.endswith("fc.bias")]
    old.CopyFrom(onnx.numpy_helper.from_array(np.array(bias, np.float32), old.name))
    return loaded.SerializeToString()


@pytest.mark.usefixtures("without_exporter")
def test_a_conversion_that_gives_nan_is_refused(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "to_half", lambda model: biased(model, *4 * [np.nan]))
    with pytest.raises(RunFailed, match="in fp16 the network gives NaN"):
        run(trained_run, tmp_path / "a.onnx", stream=True, precision="fp16", max_videos=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_exporter")
def test_the_accuracy_of_a_conversion(
    trained_run: Path, motion_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that always gives label 2, on 3 readable videos of which one has that label."""
    (tmp_path / "torn.mp4").write_bytes(b"no video")
    videos = [f"{motion_set}/videos/val_{number:06}.mp4" for number in range(3)]
    rows = [f"{video},{label}" for video, label in zip(videos, (0, 2, 1), strict=True)]
    (tmp_path / "val.csv").write_text("\n".join(["path,label", f"{tmp_path}/torn.mp4,2", *rows, ""]))
    monkeypatch.setattr(module, "to_half", lambda model: biased(model, 0, 0, 1e4, 0))
    said, words = list[str](), [f"data.val={tmp_path}/val.csv", "data.root=null"]
    found = run(trained_run, tmp_path / "a.onnx", *words, said=said, stream=True, precision="fp16")
    assert found["verification"]["video"]["path"] == videos[0]
    accuracy = found["conversion"]["accuracy"]
    assert (accuracy["videos"], accuracy["unreadable"]) == (3, 1)
    assert accuracy["top1"] == pytest.approx(100 / 3) and accuracy["largest_difference"] == pytest.approx(1e4, rel=0.01)
    assert [round(3 * accuracy[name]) % 100 for name in ("top1_fp32", "agreement")] == [0, 0]
    assert sum(line.startswith(f"left out: {tmp_path}/torn.mp4: is not a video") for line in said) == 2


@pytest.mark.usefixtures("without_exporter")
def test_a_video_of_ones_own_and_a_checkpoint_alone(trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    alone, video = changed_copy(trained_run, tmp_path / "a.pt", classes=None), str(motion_set / "videos/val_000003.mp4")
    found = run(alone, tmp_path / "a.onnx", "data.val=/nowhere.csv", stream=True, video=video)
    assert found["verification"]["video"]["path"] == video
    assert (found["classes"], found["classes_are_named"]) == (["0", "1", "2", "3"], False)


@pytest.mark.usefixtures("without_exporter")
def test_without_a_validation_set_it_is_said(trained_run: Path, tmp_path: Path) -> None:
    found = run(trained_run, tmp_path / "a.onnx", "data.val=/nowhere.csv", stream=True, precision="fp16")
    note = "there is no validation set /nowhere.csv here"
    for part in (found["verification"], found["conversion"]):
        assert part["video"] is None and part["note"] == note
    assert found["conversion"]["accuracy"] is None


@pytest.mark.usefixtures("without_exporter")
@pytest.mark.parametrize(
    ("content", "reason"),
    [("torn.mp4,0\n", "none of the first 1 videos of .*/val.csv can be read"), ("a.mp4,9\n", "9")],
)
def test_a_validation_set_that_cannot_be_used(content: str, reason: str, trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.mp4").write_bytes(b"no video")
    (tmp_path / "val.csv").write_text(f"path,label\n{content}")
    words = [f"data.val={tmp_path}/val.csv", "data.root=null"]
    found = run(trained_run, tmp_path / "a.onnx", *words, stream=True)["verification"]
    assert found["video"] is None and re.search(reason, found["note"])


@pytest.mark.parametrize(
    ("out", "video", "reason"),
    [
        ("model.pt", None, "--out must be a file name that ends in .onnx, got model.pt"),
        ("/dev/null/model.onnx", None, "--out /dev/null/model.onnx: cannot be written: Not a directory"),
        ("folder.onnx", None, "folder.json: cannot be written: is not a regular file"),
        ("a.onnx", "/nowhere.mp4", "/nowhere.mp4: No such file"),
    ],
)
def test_a_wrong_request_is_refused_before_the_work(
    out: str, video: str | None, reason: str, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(module, "exported")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=reason) as refused:
        run(trained_run, Path(out), video=video)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("size", [(340, 256), (256, 340), (161, 121), (64, 64)])
def test_the_square_of_eval(size: tuple[int, int]) -> None:
    assert centre_view(112, (112, 112), *size) == augment.test_views(112, 1, *size)


def test_the_centre_of_a_frame() -> None:
    assert centre_view(256, (224, 224), 340, 256) == [View(340, 256, 58, 16, 224, 224)]
    # 320 pixels across of a frame that is higher than wide: scaled until they are there.
    assert centre_view(256, (256, 320), 240, 320) == [View(320, 426, 0, 85, 320, 256)]
    assert centre_view(256, (256, 320), 320, 240) == [View(341, 256, 10, 0, 320, 256)]
