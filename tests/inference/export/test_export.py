"""A trained run becomes an ONNX file with its description, or nothing where the file would be wrong; `export`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxscript
import pytest
import torch

import summit_train
from summit_train.__main__ import main
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import file_sha256
from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.inference.export import export as module
from summit_train.inference.export.export import RULES, SCALING, Export, centre_view, difference
from summit_train.inference.trained import open_trained
from summit_train.spec import ModelSpec
from tests.inference.export.conftest import run_export
from tests.runs import changed_copy
from tests.worlds import Say


def test_the_description_of_a_stream(stream_file: Path, trained_run: Path, motion_set: Path) -> None:
    found = json.loads(stream_file.with_suffix(".json").read_text())
    # 8, 8, 16, 16, 32, 32, 64, 64 channels of a ResNet-18 at an eighth of its width, an eighth of them cached.
    caches = [*3 * [[1, 1, 8, 8]], *2 * [[1, 2, 4, 4]], *2 * [[1, 4, 2, 2]], [1, 8, 1, 1]]
    tensor = lambda name, shape: {"name": name, "shape": shape, "dtype": "float32"}  # noqa: E731
    checks = found.pop("verification")
    for part in (checks["random"], checks["video"]):
        assert 0 <= part.pop("largest_difference") <= 1e-5 * part.pop("largest_logit")
    assert checks == {
        "tolerance": 1e-4,
        "random": {"clips": 1, "frames": 32},
        "video": {"path": "videos/val_000000.mp4", "clips": 1, "frames": 32},
        "note": None,
    }
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
    }
    assert sorted(path.name for path in stream_file.parent.iterdir()) == ["stream.json", "stream.onnx"]


def test_the_clip_network(trained_run: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "clip.onnx", list[str]()
    overrides = ("evaluate.clips=3", "data.sampling=uniform")
    found = run_export(trained_run, out, *overrides, said=said, size=(48, 32), batch=2)
    assert found["inputs"] == [{"name": "clip", "shape": [2, 4, 3, 48, 32], "dtype": "float32"}]
    assert found["outputs"] == [{"name": "logits", "shape": [2, 4], "dtype": "float32"}] and found["state"] == {}
    rule = RULES["uniform"]
    assert found["sampling"] == {"kind": "uniform", "frames": 4, "frame_stride": None, "clips": 3, "rule": rule}
    checks = found["verification"]
    assert checks["random"]["clips"] == 4 and checks["video"]["clips"] == 3  # the last batch is filled up
    for part in ("random", "video"):
        assert checks[part]["largest_difference"] < 1e-5 * checks[part]["largest_logit"]
    assert found["sha256"] == file_sha256(out) and len(said) == 2


def test_the_largest_difference_is_infinite_without_numbers() -> None:
    ours, theirs = np.array([[[1.0, -4.0]]]), np.array([[[1.5, -4.25]]])
    assert difference(ours, theirs) == (0.5, 4.0)
    for wrong in (np.nan, np.inf):
        assert difference(ours, np.array([[[1.0, wrong]]]))[0] == np.inf


def scaled(model: bytes, factor: float) -> bytes:
    """The graph with another classifier."""
    loaded = onnx.load_from_string(model)
    found = [value for value in loaded.graph.initializer if value.name.endswith(("fc.weight", "fc.bias"))]
    assert len(found) == 2
    for value in found:
        value.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(value) * np.float32(factor), value.name))
    return loaded.SerializeToString()


def frozen(model: bytes) -> bytes:
    """The graph as an exporter leaves it that takes a cache for a constant: zeros."""
    loaded = onnx.load_from_string(model)
    shape = [value.dim_value for value in loaded.graph.input[1].type.tensor_type.shape.dim]
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), "frozen"))
    for node in loaded.graph.node:
        node.input[:] = ["frozen" if name == "cache_in_0" else name for name in node.input]
    onnx.checker.check_model(loaded)
    return loaded.SerializeToString()


def test_a_wrong_graph_is_refused_and_leaves_what_was_there(
    trained_run: Path, stream_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At logits of 1e3 rounding is above 1e-4. A classifier that is off by 1e-3 is wrong, and so is a frozen cache."""
    trained, good = open_trained(trained_run), stream_file.read_bytes()
    large = {name: trained.weights[name] * 1e3 for name in ("fc.weight", "fc.bias")}
    graphs = [scaled(good, factor) for factor in (1.001e3, np.nan, 1e3)] + [frozen(scaled(good, 1e3))]
    monkeypatch.setattr(module, "exported", lambda *_, stream: graphs.pop())
    export = Export(replace(trained, weights=trained.weights | large), tmp_path / "new/stream.onnx", stream=True)
    wrong = r"not written: the exported graph is wrong: its logits differ .* is allowed, 0.0001 of the largest"
    with pytest.raises(RunFailed, match=wrong) as refused:
        export.run()
    assert "\n" not in str(refused.value) and list(tmp_path.rglob("*.*")) == []
    assert export.run()["verification"]["random"]["largest_logit"] > 100
    before = export.out.read_bytes()
    for _ in graphs[:]:
        with pytest.raises(RunFailed, match="the exported graph is wrong: its logits differ"):
            export.run()
    assert export.out.read_bytes() == before and len(list(export.out.parent.iterdir())) == 2


@pytest.mark.usefixtures("without_exporter")
def test_the_check_takes_the_first_video_that_can_be_read(trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    torn, val, good = tmp_path / "torn.mp4", tmp_path / "val.csv", motion_set / "videos/val_000001.mp4"
    torn.write_bytes(b"no video")
    for rows, reason in (
        (f"torn.mp4,0\n{good},1\n", ""),
        ("torn.mp4,0\n", f"none of the first 1 video of {val} can be read"),
        ("a.mp4,9\n", "9"),
        (None, f"data.val: {val} not found"),
    ):
        val.unlink(missing_ok=True)
        if rows is not None:
            val.write_text(f"path,label\n{rows}")
        words, said = [f"data.val={val}", "data.root=null"], list[str]()
        found = run_export(trained_run, tmp_path / "a.onnx", *words, said=said, stream=True)["verification"]
        assert (found["video"] or {}).get("path") == (None if reason else str(good)) and reason in (found["note"] or "")
        left_out = [line for line in said if line.startswith(f"left out: {torn}: is ")]
        assert len(left_out) == ("torn" in (rows or "")) and len(said) == len(left_out) + 2


def test_a_vit_of_fixed_positions_keeps_the_size_it_was_trained_on(trained_run: Path, tmp_path: Path) -> None:
    trained, out = open_trained(trained_run), tmp_path / "model.onnx"
    number = "must be data.crop, 32, for a vit that numbers the patches"
    for adapter, positions, size, reason in (
        ("none", "index", (32, 48), f"{number} of its grid (model.positions index), got 48"),
        ("none", "index", (16, 32), f"{number} of its grid (model.positions index), got 16"),
        ("none", "grid", (32, 40), "must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got 40"),
        ("none", "index", (32, 32), None),
        ("none", "grid", (32, 48), None),
        ("shift", "index", (48, 48), None),
    ):
        model = ModelSpec(arch="vit", backbone="vit_s", num_classes=4, adapter=adapter, positions=positions)
        vit = replace(trained, spec=trained.spec.model_copy(update={"model": model}))
        if reason is None:
            assert Export(vit, out, size=size).crop == size
        else:
            with pytest.raises(UserError) as refused:
                Export(vit, out, size=size)
            assert str(refused.value) == f"--size: each side {reason}"


def test_the_centre_of_a_frame_is_by_default_the_square_of_eval() -> None:
    for size in ((340, 256), (256, 340), (161, 121), (64, 64)):
        assert centre_view(112, (112, 112), *size) == augment.test_views(112, 1, *size)
    assert centre_view(256, (224, 224), 340, 256) == [View(340, 256, 58, 16, 224, 224)]
    # 320 pixels across of a frame that is higher than wide: scaled until they are there.
    assert centre_view(256, (256, 320), 240, 320) == [View(320, 426, 0, 85, 320, 256)]
    assert centre_view(256, (256, 320), 320, 240) == [View(341, 256, 10, 0, 320, 256)]


@pytest.mark.usefixtures("without_exporter")
def test_the_summary(trained_run: Path, tmp_path: Path, say: Say) -> None:
    out, alone = tmp_path / "a.onnx", changed_copy(trained_run, tmp_path / "alone.pt", classes=None)
    status, text, err = say("export", alone, "--out", out, "--stream")
    assert status == 0 and "lacks the names of its classes" in err.splitlines()[0]
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["network"] == "tsm resnet18, 4 classes"
    assert lines["graph"] == "stream, frame 1 x 3 x 32 x 32, 8 caches of 296 elements, 1,184 bytes"
    assert lines["frames"] == "32 x 32, shorter side 32"
    assert lines["check"].startswith("1 clip of 32 frames: logits up to") and "random pixels" in lines["check"]
    assert "videos/val_000000.mp4" in text
    assert lines["written"].startswith(f"{out} (") and out.with_suffix(".json").is_file()


def test_nothing_but_json_on_stdout(trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stream.onnx"
    words = ["--stream", "--size", "32x48", "--batch", "any", "--json", "data.val=/nowhere.csv"]
    assert main(["export", str(trained_run), "--out", str(out), *words]) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert found == json.loads(out.with_suffix(".json").read_text())
    assert found["inputs"][0] == {"name": "frame", "shape": ["batch", 3, 32, 48], "dtype": "float32"}
    assert {tensor["shape"][0] for tensor in (*found["inputs"], *found["outputs"])} == {"batch"}
    assert printed.err.splitlines() == ["exporting the graph", "checking it against the network"]


def test_without_a_package(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("export", "onnx_file"):
        monkeypatch.delitem(sys.modules, f"summit_train.inference.export.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fix = "pip install onnx onnxruntime onnxscript"
    message = f"summit-train: export needs the package onnxscript, which is not installed: {fix}\n"
    assert say("export", "run", "--out", tmp_path / "a.onnx") == (2, "", message)
