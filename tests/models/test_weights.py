"""Loading weights: names, wrappers, inflation, and files that are no weights."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shlex
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from summit_train.core.errors import UserError
from summit_train.core.run_folder import checkpoint_path
from summit_train.models.weights import load_pretrained
from summit_train.training.checkpoint import save_checkpoint
from tests.closeness import assert_near
from tests.networks import load, random_network

tsn = partial(random_network, "tsn", "resnet18")


def _same(model: nn.Module, state: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> bool:
    ours = model.state_dict()
    return all(torch.equal(ours[name], value) for name, value in state.items() if name not in but)


WRAPPERS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "plain": lambda state: state,
    "our checkpoint": lambda state: {"model": state, "optimizer": {"state": {}}, "step": 7},
    "state_dict, module.": lambda state: {
        "state_dict": {f"module.{name}": value for name, value in state.items()},
        "epoch": 3,
    },
    "compiled": lambda state: {"model": {f"module._orig_mod.{name}": value for name, value in state.items()}},
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_files_people_have(tmp_path: Path, wrap: Callable[[dict[str, torch.Tensor]], object]) -> None:
    source, model = tsn(seed=1).state_dict(), random_network("tsm", "resnet18")
    report = load(model, wrap(source), tmp_path)
    assert _same(model, source)
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    # 20 convolutions, 20 norms of 4 tensors each, and the classifier's 2.
    assert len(report.names("loaded")) == 20 + 20 * 4 + 2


def test_norm_counters_are_nobodys_business(tmp_path: Path) -> None:
    """Files from before torch 0.4.1 have no num_batches_tracked: nothing is missing then."""
    state = {n: v for n, v in tsn(seed=1).state_dict().items() if not n.endswith("num_batches_tracked")}
    assert load(tsn(), state, tmp_path).names("missing") == ()
    model = tsn()
    counters = {"other.num_batches_tracked": torch.tensor(3), "bn1.num_batches_tracked": torch.tensor(3.0)}
    assert load(model, state | counters, tmp_path).names("unexpected") == ()
    assert model.state_dict()["bn1.num_batches_tracked"].tolist() == 3 and _same(model, state)


def test_every_key_that_did_not_fit_is_named(tmp_path: Path) -> None:
    state = tsn(seed=1).state_dict()
    state["head.weight"] = state.pop("fc.weight")
    state["note"] = torch.tensor(1.0)
    report = load(tsn(), {**state, "arch": "resnet18"}, tmp_path)
    assert report.names("missing") == ("fc.weight",)
    assert set(report.names("unexpected")) == {"head.weight", "note"}
    assert all(word in str(report) for word in ("101 of the model's 102", "fc.weight", "head.weight", "note"))


def test_what_was_inflated_is_named(tmp_path: Path) -> None:
    flat, model = random_network("tsn", "resnet50", seed=1), random_network("i3d_3x1x1", "resnet50", 8)
    report = load(model, flat.state_dict(), tmp_path)
    made = {"conv1.weight": "inflated over 5 frames"}
    for stage, blocks in (("layer1", (0, 1, 2)), ("layer2", (0, 2)), ("layer3", (0, 2, 4)), ("layer4", (1,))):
        made |= {f"{stage}.{block}.conv1.weight": "inflated over 3 frames" for block in blocks}
    assert {row.name: row.note for row in report.rows if row.note} == made
    assert "inflated over 5 frames: conv1.weight; inflated over 3 frames: layer1.0.conv1.weight, layer1" in str(report)
    model.in_channels, model.conv1 = 2, nn.Conv3d(2, 8, (5, 7, 7), bias=False)
    notes = {row.name: row.note for row in load(model, flat.state_dict(), tmp_path).rows}
    assert notes["conv1.weight"] == "averaged over 3 input channels, inflated over 5 frames"
    expected = flat.conv1.weight.mean(1, keepdim=True).unsqueeze(2).expand(8, 2, 5, 7, 7) / 5
    assert_near(model.conv1.weight, expected, 1e-6)


def test_the_first_convolution_alone_is_averaged_for_other_channels(tmp_path: Path) -> None:
    """Five flow fields of two channels in place of RGB (Wang et al., TSN, section 3.2)."""
    source, model = tsn(seed=1), tsn(in_channels=10)
    report = load(model, source.state_dict(), tmp_path)
    assert {row.name: row.note for row in report.rows if row.note} == {"conv1.weight": "averaged over 3 input channels"}
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    assert_near(model.conv1.weight, source.conv1.weight.mean(1, keepdim=True).expand(8, 10, 7, 7), 1e-6)
    assert _same(model, source.state_dict(), but=("conv1.weight",))


NAMES = ["bend", "jack", "jump", "run", "walk"]
UNKNOWN = "classifier kept, for as many classes, whose names are not known on both sides"
OTHERS = "classifier left as initialised, for other classes (label 1 is 'jack' there and 'jump' here): fc.weight, fc."


@pytest.mark.parametrize(
    ("theirs", "ours", "is_kept", "words"),
    [
        (NAMES, NAMES, True, "classifier kept, for the same 5 classes"),
        (None, NAMES, True, UNKNOWN),
        (NAMES, None, True, UNKNOWN),
        (NAMES, ["bend", "jump", "jack", "run", "walk"], False, OTHERS),
    ],
)
def test_the_classifier_is_kept_for_the_same_classes(
    tmp_path: Path, theirs: list[str] | None, ours: list[str] | None, is_kept: bool, words: str
) -> None:
    rgb, model = tsn(seed=1), tsn(in_channels=10)
    before = model.fc.weight.detach().clone()
    report = load(model, {"model": rgb.state_dict(), "step": 1, "classes": theirs}, tmp_path, ours)
    assert torch.equal(model.fc.weight, rgb.fc.weight if is_kept else before)
    assert _same(model, rgb.state_dict(), but=("conv1.weight", "fc.weight", "fc.bias"))
    assert words in str(report)
    assert f"{102 if is_kept else 100} of the model's 102 tensors loaded" in str(report)
    assert {row.fate for row in report.rows} <= {"loaded", "counter", "fresh"}


def test_a_last_layer_that_does_not_fit_is_left(tmp_path: Path) -> None:
    seven, model = tsn(num_classes=7, seed=1).state_dict(), tsn()
    fresh = model.fc.weight.clone()
    report = load(model, {"model": seven, "step": 1, "classes": list("abcdefg")}, tmp_path, NAMES)
    assert (report.names("fresh"), report.classes) == ((), "") and "classifier" not in str(report)
    assert report.names("mismatched") == ("fc.weight", "fc.bias")
    weight = "fc.weight (the model has (5, 64), the file (7, 64))"
    assert f"different shape, left as initialised: {weight}, fc.bias (the model has (5,), the file (7,))" in str(report)
    assert torch.equal(model.fc.weight, fresh) and _same(model, seven, but=("fc.weight", "fc.bias"))
    of_other_features = tsn().state_dict() | {"fc.weight": torch.zeros(5, 32)}
    report = load(tsn(), {"model": of_other_features, "step": 1, "classes": NAMES}, tmp_path, NAMES)
    assert report.names("mismatched") == ("fc.weight",) and "classifier" not in str(report)


NARROW = r"layer1\.0\.conv1\.weight \(the model has \(8, 8, 3, 3\)"


@pytest.mark.parametrize(
    ("backbone", "model", "reason"),
    [
        ("resnet101", "resnet50", "layer3 has 23 blocks there and 6 in this model"),
        ("resnet50", "resnet101", "layer3 has 6 blocks there and 23 in this model"),
        ("resnet50", "resnet34", NARROW + r", the file \(8, 8, 1, 1\)\)"),
        ("resnext101_32x4d", "resnet101", r"layer1\.0\.conv1\.weight"),
        ("mobilenet_v2", "resnet50", "no tensor fits this model"),
        ("resnet18", "mobilenet_v2", "no tensor fits this model"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path: Path, backbone: str, model: str, reason: str) -> None:
    ours = random_network("tsm", model)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    content = random_network("tsn", backbone, num_classes=1000, seed=1).state_dict()
    with pytest.raises(UserError, match=rf"^\S*w\.pth: [^\n]*{reason}[^\n]*$"):
        load(ours, content, tmp_path)
    assert _same(ours, before)


def test_another_width_and_other_blocks_are_another_network(tmp_path: Path) -> None:
    inflated = random_network("i3d_3x3x3", "resnet18", 16).state_dict()
    for model, more, reason in (
        (tsn(width=0.25), {}, r"layer1\.0\.conv1\.weight \(the model has \(16, 16, 3, 3\)"),
        (tsn(), {"layer2.0.se.weight": torch.ones(8)}, r"it has layer2\.0\.se\.weight, which this model does not"),
        (tsn(), inflated, NARROW),
    ):
        with pytest.raises(UserError, match=f"another network: {reason}"):
            load(model, tsn().state_dict() | more, tmp_path)


def test_an_imagenet_backbone_without_its_classifier(tmp_path: Path) -> None:
    """MobileNetV2 as it is often shared."""
    state = random_network("tsn", "mobilenet_v2", seed=1).state_dict()
    backbone = {name: value for name, value in state.items() if name.startswith("features.")}
    model = random_network("tsm", "mobilenet_v2")
    report = load(model, backbone, tmp_path)
    assert report.names("missing") == ("classifier.1.weight", "classifier.1.bias")
    assert {(row.fate, row.note) for row in report.rows} == {("loaded", ""), ("counter", ""), ("missing", "")}
    assert _same(model, backbone) and len(report.names("loaded")) == 52 * 5


def test_half_precision_and_memory_format(tmp_path: Path) -> None:
    source, model = tsn(seed=1).half(), tsn().to(memory_format=torch.channels_last)
    load(model, source.state_dict(), tmp_path)
    assert model.conv1.weight.dtype == torch.float32
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.conv1.weight, source.conv1.weight.float())


def test_a_run_directory_gives_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    for step in range(3):
        save_checkpoint(
            checkpoint_path(run, step), {"model": tsn(seed=step).state_dict(), "optimizer": {}, "step": step}
        )
    torn = checkpoint_path(run, 2)
    torn.write_bytes(torn.read_bytes()[:-1])
    (torn.parent / "step_00000003.pt.tmp").write_bytes(b"half a file")
    model = tsn(seed=9)
    report = load_pretrained(model, run)
    assert report.path.endswith("step_00000001.pt") and f"passed over: {torn}: the file is damaged" in str(report)
    assert _same(model, tsn(seed=1).state_dict())
    checkpoint_path(run, 0).replace(checkpoint_path(run, 1))
    with pytest.raises(UserError, match=r"step_00000001\.pt: the file is damaged"):
        load_pretrained(model, checkpoint_path(run, 1))


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_what_is_no_weights_file_is_refused_by_name(tmp_path: Path) -> None:
    weights = tsn(seed=1).state_dict()
    torch.save(weights, tmp_path / "good.pth")
    whole = (tmp_path / "good.pth").read_bytes()
    bomb = pickle.dumps({"conv1.weight": _Bomb(tmp_path / "bombed")}, protocol=2)
    bad = {}
    for name, content in {"empty": b"", "text": b"I am not a network\n", "cut": whole[:-999], "code": bomb}.items():
        (tmp_path / name).write_bytes(content)
        bad[name] = "cannot be read as a file of torch's"
    others = {"encoder.weight": torch.ones(3), "bn1.num_batches_tracked": torch.tensor(1)}
    for name, saved, reason in (
        ("list", [1, 2], "must contain tensors by name, got a list"),
        ("numbers", {"epoch": 3}, "must contain tensors by name, got none"),
        ("other", others, r"no tensor fits.*encoder\.weight.*conv1\.weight"),
        (
            "whole",
            weights | {"fc.bias": weights["fc.bias"].long()},
            r"fc\.bias must be torch\.float32, got torch\.int64",
        ),
    ):
        torch.save(saved, tmp_path / name)
        bad[name] = reason
    (tmp_path / "empty_run").mkdir()
    model = tsn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, reason in (bad | {"empty_run": "no checkpoints/step_", "absent": "no such file"}).items():
        with pytest.raises(UserError, match=rf"^\S*{name}: [^\n]*{reason}[^\n]*$"):
            load_pretrained(model, tmp_path / name)
    assert _same(model, before) and not (tmp_path / "bombed").exists()


def _legacy_tar(path: Path) -> None:
    """The members of a file as torch wrote it before 2017; the reader looks at no more than that before it refuses."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps({"protocol_version": 1000}, 2)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["legacy tar", "module", "arguments"])
def test_formats_that_could_run_code_come_with_the_way_to_convert(tmp_path: Path, kind: str) -> None:
    path, model = tmp_path / "it's.pth", tsn()
    if kind == "legacy tar":
        _legacy_tar(path)
    elif kind == "module":
        torch.save(model, path, _use_new_zipfile_serialization=False)
    else:  # a checkpoint with the program's arguments in it, as many trainers write it
        torch.save({"state_dict": model.state_dict(), "args": argparse.Namespace(lr=0.1)}, path)
    problem = "legacy tar format" if kind == "legacy tar" else "pickled objects besides tensors"
    with pytest.raises(UserError, match=rf"^[^\n]*{problem}[^\n]*weights_only=False[^\n]*$") as caught:
        load_pretrained(model, path)
    if kind != "legacy tar":  # the command that it names does it
        command = shlex.split(str(caught.value).partition("convert it once: ")[2])
        assert command[:2] == ["python", "-c"] and len(command) == 3
        exec(command[2], {})
        assert len(load_pretrained(model, f"{path}.converted").names("loaded")) == 20 + 20 * 4 + 2


def test_legacy_files_of_tensors_alone_are_read(tmp_path: Path) -> None:
    source, model = tsn(seed=1).state_dict(), tsn()
    torch.save(source, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    load_pretrained(model, tmp_path / "legacy.pth")
    assert _same(model, source)
