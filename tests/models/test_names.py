"""Files under the names of the TSM authors and of mmaction2, built from their layouts: no key is left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.models import VideoNetwork, build_model
from summit_train.models.names import our_names
from summit_train.models.weights import LoadReport
from tests.closeness import assert_near
from tests.networks import load, random_network

Tensors = dict[str, torch.Tensor]
NON_LOCAL = ("layer2.0", "layer2.2", "layer3.0", "layer3.2", "layer3.4")
# Sandler et al., Table 2: blocks of each of the seven layers.
MOBILENET = (1, 2, 3, 4, 3, 3, 1)
# Blocks of MobileNetV2 with a shift, 0-based (online_demo/mobilenet_v2_tsm.py).
SHIFTED = (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)


def assert_all_loaded(report: LoadReport, model: VideoNetwork, source: VideoNetwork) -> None:
    assert {(row.fate, row.note) for row in report.rows} <= {("loaded", ""), ("counter", "")}
    for (name, found), expected in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


def authors(state: Tensors, shifted: bool = False) -> Tensors:
    """ops/models.py: base_model and new_fc; TemporalShift.net; NL3DWrapper.block and .nl; consensus of TRN."""

    def theirs(name: str) -> str:
        if name.startswith(("consensus.", "fc.")):
            return re.sub(r"^fc\.", "new_fc.", name)
        block = ".".join(name.split(".")[:2])
        if any(other.startswith(f"{block}.nl.") for other in state) and ".nl." not in name:
            name = name.replace(block, f"{block}.block")
        name = re.sub(r"(?<=\.)conv1(?=\.)", "conv1.net", name) if shifted else name
        return f"base_model.{name}"

    return {f"module.{theirs(name)}": value for name, value in state.items()}


def mmactions(state: Tensors, shifted: bool = False) -> Tensors:
    """backbones/resnet.py, resnet_tsm.py and resnet3d.py, heads/tsn_head.py, i3d_head.py and trn_head.py.

    Each convolution and its norm are one module, conv and bn.
    """
    wrapped = "|".join(re.escape(name.partition(".nl.")[0]) for name in state if ".nl." in name and shifted) or "$"
    rules = (
        (rf"^({wrapped})\.(?!nl)", r"\1.block."),
        (r"^(fc|consensus)\.", r"cls_head.\1."), (r"^cls_head\.fc\.", "cls_head.fc_cls."),
        (r"^(?!cls_head)", "backbone."), (r"\.conv(\d)\.", r".conv\1.conv."), (r"\.bn(\d)\.", r".conv\1.bn."),
        (r"(?<=\d\.)conv1\.conv\.|(?<=block\.)conv1\.conv\.", "conv1.conv.net." if shifted else "conv1.conv."),
        (r"\.downsample\.0\.", ".downsample.conv."), (r"\.downsample\.1\.", ".downsample.bn."),
        (r"\.nl\.W\.0\.", ".non_local_block.conv_out.conv."), (r"\.nl\.W\.1\.", ".non_local_block.conv_out.bn."),
        (r"\.nl\.(theta|phi\.0|g\.0)\.", r".non_local_block.\1.conv."),
    )  # fmt: skip
    names = {name: name for name in state}
    for pattern, replacement in rules:
        names = {name: re.sub(pattern, replacement, new) for name, new in names.items()}
    return {new: state[name] for name, new in names.items()}


def with_layers(state: Tensors, layers: Mapping[str, str]) -> Tensors:
    return {f"{layers[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value for name, value in state.items()}


def flat_mobilenet(state: Tensors, shifted: bool = False) -> Tensors:
    """archs/mobilenet_v2.py: conv.0 to conv.7, ReLUs numbered; the first block, which does not expand, to conv.4."""
    layers = {"features.0.0": "features.0.0", "features.0.1": "features.0.1"}
    layers |= {f"features.1.conv.{ours}": f"features.1.conv.{theirs}"
               for ours, theirs in {"0.0": 0, "0.1": 1, "1": 3, "2": 4}.items()}  # fmt: skip
    for number in range(2, 18):
        first = "0.net" if shifted and number - 1 in SHIFTED else "0"
        places = {"0.0": first, "0.1": "1", "1.0": "3", "1.1": "4", "2": "6", "3": "7"}
        layers |= {
            f"features.{number}.conv.{ours}": f"features.{number}.conv.{their}" for ours, their in places.items()
        }
    layers |= {"features.18.0": "features.18.0", "features.18.1": "features.18.1", "classifier.1": "classifier"}
    return with_layers(state, layers)


def mmaction_mobilenet(state: Tensors) -> Tensors:
    """backbones/mobilenet_v2.py: conv1, layer1 to layer7 of numbered blocks, conv2; conv and bn are one module."""
    layers = {"features.0.0": "backbone.conv1.conv", "features.0.1": "backbone.conv1.bn"}
    layers |= {"features.18.0": "backbone.conv2.conv", "features.18.1": "backbone.conv2.bn"}
    layers["classifier.1"] = "cls_head.fc_cls"
    blocks = [f"backbone.layer{layer}.{index}" for layer, depth in enumerate(MOBILENET, 1) for index in range(depth)]
    for ours, block in enumerate(blocks, 1):
        last = 1 if ours == 1 else 2
        for part in range(last):
            net = ".net" if part == 0 and ours - 1 in SHIFTED else ""
            layers[f"features.{ours}.conv.{part}.0"] = f"{block}.conv.{part}{net}.conv"
            layers[f"features.{ours}.conv.{part}.1"] = f"{block}.conv.{part}{net}.bn"
        layers[f"features.{ours}.conv.{last}"] = f"{block}.conv.{last}.conv"
        layers[f"features.{ours}.conv.{last + 1}"] = f"{block}.conv.{last}.bn"
    return with_layers(state, layers)


def whole_blocks(state: Tensors) -> Tensors:
    """The authors' shift_place=block: the whole block is `net`; no convolution has a shift of its own."""
    file = {re.sub(r"^(layer\d\.\d+)\.", r"\1.net.", name): value for name, value in state.items()}
    return {re.sub(r"^base_model\.fc\.", "new_fc.", f"base_model.{name}"): value for name, value in file.items()}


def offline_mobilenet(state: Tensors) -> Tensors:
    file = flat_mobilenet(state, shifted=True)
    return {re.sub(r"^base_model\.classifier", "new_fc", f"base_model.{name}"): value for name, value in file.items()}


def imagenet_within_mmaction(state: Tensors) -> Tensors:
    """mmcls' ResNeXt-101 has torchvision's names behind `backbone.`."""
    return {re.sub(r"^backbone\.fc\.", "cls_head.fc_cls.", f"backbone.{name}"): value for name, value in state.items()}


@pytest.mark.parametrize(
    ("backbone", "options", "write", "has"),
    [
        ("resnet50", {}, lambda state: authors(state, True), "module.base_model.layer3.0.conv1.net.weight"),
        (
            "resnet50",
            {"non_local": "tsm"},
            lambda state: {  # theirs are convolutions of volumes
                name: value.unsqueeze(2) if ".nl." in name and value.dim() == 4 else value
                for name, value in authors(state, True).items()
            },
            "module.base_model.layer2.0.block.conv1.net.weight",
        ),
        ("resnet50", {"shift_place": "in_place"}, whole_blocks, "base_model.layer1.0.net.conv1.weight"),
        ("mobilenet_v2", {"shift_direction": "past"}, flat_mobilenet, "features.1.conv.4.bias"),
        ("mobilenet_v2", {}, offline_mobilenet, "base_model.features.3.conv.0.net.weight"),
        ("resnet50", {}, lambda state: mmactions(state, True), "backbone.layer1.0.conv1.conv.net.weight"),
        ("resnet50", {"arch": "tsn"}, mmactions, "backbone.layer1.0.downsample.bn.running_var"),
        ("mobilenet_v2", {}, mmaction_mobilenet, "backbone.layer2.1.conv.0.net.conv.weight"),
        ("resnext101_32x4d", {}, imagenet_within_mmaction, "backbone.layer1.0.conv1.weight"),
        ("resnet50", {"arch": "trn", "num_frames": 3}, authors, "module.new_fc.weight"),
        ("resnet50", {"arch": "trn", "num_frames": 3}, mmactions, "cls_head.consensus.fc_fusion_scales.1.3.bias"),
    ],
)
def test_a_published_layout_is_loaded_whole(
    tmp_path: Path, backbone: str, options: dict[str, Any], write: Callable[[Tensors], Tensors], has: str
) -> None:
    source, model = (random_network(**{"arch": "tsm", "backbone": backbone, "seed": seed} | options) for seed in (1, 2))
    file = write(source.state_dict())
    assert has in file and len(file) == len(source.state_dict())
    content = {"epoch": 50, "meta": {"arch": backbone}, "state_dict": file, "best_prec1": torch.ones(())}
    assert_all_loaded(load(model, content, tmp_path), model, source)


def test_mmactions_non_local_blocks_have_no_bias_behind(tmp_path: Path) -> None:
    """mmcv's ConvModule leaves out the bias of a convolution in front of a norm; here it is there and 0."""
    source, model = (random_network("tsm", "resnet50", seed=seed, non_local="tsm") for seed in (1, 2))
    file = mmactions(source.state_dict(), shifted=True)
    assert {f"backbone.layer2.0.{n}.weight" for n in ("block.conv1.conv.net", "non_local_block.g.0.conv")} < set(file)
    report = load(
        model, {name: value for name, value in file.items() if not name.endswith("conv_out.conv.bias")}, tmp_path
    )
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    biases = [f"{block}.nl.W.0.bias" for block in NON_LOCAL]
    notes = {row.name: row.note for row in report.rows if row.note}
    assert notes == dict.fromkeys(biases, "0, since the file's layer has no bias")
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.zeros_like(value) if name in biases else source.state_dict()[name]), name


@pytest.mark.parametrize(
    ("arch", "write"),
    [
        ("tsn", authors),
        ("tsm", dict),
        ("i3d_3x3x3", mmactions),
        ("i3d_3x1x1", dict),
        ("i3d_replace", authors),
        ("trn", mmactions),
    ],
)
def test_a_2d_file_of_each_convention_is_loaded_whole(
    tmp_path: Path, arch: str, write: Callable[[Tensors], Tensors]
) -> None:
    """Kernels in time are inflated; TRN's linear layer of a frame has another size, and its relations are its own."""
    source = random_network("tsn", "resnet50", seed=1)
    model = random_network(arch, "resnet50", 16 if arch == "i3d_3x3x3" else 8, seed=2)
    report = load(model, {"state_dict": write(source.state_dict())}, tmp_path)
    own = [name for name in model.state_dict() if name.startswith("consensus.")]
    assert (list(report.names("missing")), report.names("unexpected")) == (own, ())
    assert report.names("mismatched") == (("fc.weight", "fc.bias") if arch == "trn" else ())
    for name, expected in source.state_dict().items():
        found = model.state_dict()[name]
        found = found.sum(2) if found.dim() == 5 else found
        if not (arch == "trn" and name.startswith("fc.")):
            assert_near(found, expected, 1e-6, name)


def test_mmactions_i3d_needs_its_own_pool1(tmp_path: Path) -> None:
    """resnet3d.py: pool1 is 1x3x3; no tensor shows it. Where the other form is built, the file is refused."""
    i3d = partial(random_network, "i3d_3x1x1", "resnet50", 8)
    source, model = (i3d(seed=seed, pool1="1x3x3") for seed in (1, 2))
    file = mmactions(source.state_dict())
    assert_all_loaded(load(model, file, tmp_path), model, source)
    for other in ("2x3x3", "2x3x3_unpadded"):
        with pytest.raises(UserError, match=rf"its pool1 is 1x3x3 and here {other}, .*; set model\.pool1=1x3x3"):
            load(i3d(pool1=other), file, tmp_path)
    # Its non-local blocks stand where "original" has them (0101, 010101) and compute as "tsm" does.
    model = i3d(pool1="1x3x3", non_local="original")
    with pytest.raises(UserError, match="non-local blocks pool after phi and g and do not scale, unlike model"):
        load(model, mmactions(model.state_dict()), tmp_path)


def test_an_i3d_whose_pool1_the_file_does_not_say_is_reported(tmp_path: Path) -> None:
    """Wang et al.'s weights have torchvision's names where they are converted; our checkpoints have a spec."""
    source, model = (random_network("i3d_3x1x1", "resnet50", 8, seed=seed) for seed in (1, 2))
    state = source.state_dict()
    assert str(load(model, state, tmp_path)).endswith(
        "the file does not say its pool1; taken as 2x3x3, see model.pool1"
    )
    with pytest.raises(UserError, match="its pool1 is 1x3x3 and here 2x3x3"):
        load(model, {"model": state, "spec": {"model": {"arch": "i3d_3x1x1", "pool1": "1x3x3"}}}, tmp_path)
    old = {"model": state, "spec": {"model": {"arch": "i3d_3x1x1"}}}
    assert load(model, old, tmp_path).pool1 is None
    assert load(model, mmactions(random_network("tsn", "resnet50", seed=3).state_dict()), tmp_path).pool1 is None


@pytest.mark.parametrize(
    ("arch", "write"),
    [("eco_lite", dict), ("slowfast", authors), ("x3d_m", mmactions), ("ir_csn", authors), ("ir_csn", mmactions)],
)
def test_networks_without_a_convention_refuse_a_resnets_file(
    tmp_path: Path, arch: str, write: Callable[[Tensors], Tensors]
) -> None:
    source, model = random_network("tsn", "resnet50", seed=1), random_network(arch, None, 8, seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"^[^\n]*(no tensor fits this model|weights of another network)[^\n]*$"):
        load(model, {"state_dict": write(source.state_dict())}, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_tensors_under_one_name_are_refused(tmp_path: Path) -> None:
    file = authors(random_network("tsm", "resnet18", seed=1).state_dict())
    file["module.base_model.fc.weight"] = file["module.new_fc.weight"]
    message = r"module\.new_fc\.weight and module\.base_model\.fc\.weight are both fc\.weight"
    with pytest.raises(UserError, match=message):
        load(random_network("tsm", "resnet18", seed=2), {"state_dict": file}, tmp_path)


def test_a_network_with_blocks_starts_from_one_without_and_not_from_the_other_form(tmp_path: Path) -> None:
    forms = (False, "tsm", "original")
    without, tsm, original = (random_network("tsm", "resnet50", non_local=form) for form in forms)
    report = load(original, without.state_dict(), tmp_path)
    assert not report.names("unexpected")
    assert report.names("missing") and all(".nl." in name for name in report.names("missing"))
    report = load(without, tsm.state_dict(), tmp_path)
    assert not report.names("missing")
    assert report.names("unexpected") and all(".nl." in name for name in report.names("unexpected"))
    with pytest.raises(UserError, match=r"after layer2\.0, layer2\.2, .*4 and layer2\.1, .* here: the other form"):
        load(original, tsm.state_dict(), tmp_path)


@pytest.mark.parametrize("backbone", ["resnet50", "resnext101_32x4d", "mobilenet_v2"])
def test_our_own_names_stay(backbone: str) -> None:
    with torch.device("meta"):
        names = list(build_model("tsm", backbone, non_local=False if "mobile" in backbone else "tsm").state_dict())
    assert our_names(names, "fc") == {name: name for name in names}
    assert list(our_names([f"module._orig_mod.{name}" for name in names], "fc").values()) == names
    assert our_names([], "fc") == {}
