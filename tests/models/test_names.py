"""Files under the names of the TSM authors and of mmaction2, built from their layouts: no key is left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.models import VideoNetwork, build_model
from summit_train.models.names import our_names
from summit_train.models.weights import LoadReport, load_pretrained
from tests.closeness import assert_near

Pair = tuple[str, str]  # a module in their file, the same in ours
Tensors = dict[str, torch.Tensor]
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
NON_LOCAL = ("layer2.0", "layer2.2", "layer3.0", "layer3.2", "layer3.4")
# Sandler et al., Table 2: blocks of each of the seven layers.
MOBILENET = (1, 2, 3, 4, 3, 3, 1)
# Blocks of MobileNetV2 with a shift, 0-based (online_demo/mobilenet_v2_tsm.py).
SHIFTED = (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)


def network(
    backbone: str | None, seed: int, classes: int = 5, arch: str = "tsm", frames: int = 2, **options: object
) -> VideoNetwork:
    """A narrow network, all of whose tensors are random."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(arch, backbone, frames, classes, width=0.125, generator=generator, **options)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.fill_(seed)
    return model


def renamed(model: VideoNetwork, layers: list[Pair], norms: list[Pair]) -> dict[str, torch.Tensor]:
    """The file: `layers` have a weight and maybe a bias, `norms` five tensors. Each tensor of the model is used."""
    state = model.state_dict()
    pairs = [(f"{theirs}.{part}", f"{ours}.{part}") for theirs, ours in layers for part in ("weight", "bias")]
    pairs += [(f"{theirs}.{part}", f"{ours}.{part}") for theirs, ours in norms for part in NORM]
    file = {theirs: state[ours] for theirs, ours in pairs if ours in state}
    assert len(file) == len(state)
    return file


def loaded(model: VideoNetwork, file: object, path: Path) -> LoadReport:
    torch.save(file, path)
    return load_pretrained(model, path)


def assert_all_loaded(report: LoadReport, model: VideoNetwork, source: VideoNetwork) -> None:
    assert (report.missing, report.unexpected, report.mismatched, report.made) == ((), (), (), {})
    for (name, found), expected in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


def torchvisions(state: Tensors) -> Tensors:
    return dict(state)


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


@pytest.mark.parametrize("non_local", [False, "tsm"])
def test_the_authors_resnets(tmp_path: Path, non_local: object) -> None:
    source, model = (network("resnet50", seed, non_local=non_local) for seed in (1, 2))
    file = authors(source.state_dict(), shifted=True)
    for name, value in file.items():  # theirs are convolutions of volumes
        if ".nl." in name and value.dim() == 4:
            file[name] = value.unsqueeze(2)
    assert "module.base_model.layer3.0.conv1.net.weight" in file or non_local
    assert ("module.base_model.layer2.0.block.conv1.net.weight" in file) == bool(non_local)
    report = loaded(
        model,
        {"epoch": 50, "arch": "resnet50", "state_dict": file, "best_prec1": torch.ones(())},
        tmp_path / "w.pth.tar",
    )
    assert_all_loaded(report, model, source)


def test_their_shift_in_front_of_whole_blocks(tmp_path: Path) -> None:
    """shift_place=block: the whole block is `net`; no convolution has a shift of its own."""
    source, model = (network("resnet50", seed, shift_place="in_place") for seed in (1, 2))
    file = {}
    for name, value in source.state_dict().items():
        stage, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        theirs = f"{stage}.{number}.net.{inner}" if stage.startswith("layer") else name
        file[f"new_fc.{rest}" if stage == "fc" else f"base_model.{theirs}"] = value
    assert_all_loaded(loaded(model, {"state_dict": file}, tmp_path / "w.pth"), model, source)


def flat_mobilenet(shifted: bool) -> tuple[list[Pair], list[Pair]]:
    """archs/mobilenet_v2.py: conv.0 to conv.7, ReLUs numbered; the first block, which does not expand, to conv.4."""
    layers, norms = [("features.0.0", "features.0.0")], [("features.0.1", "features.0.1")]
    layers += [("features.1.conv.0", "features.1.conv.0.0"), ("features.1.conv.3", "features.1.conv.1")]
    norms += [("features.1.conv.1", "features.1.conv.0.1"), ("features.1.conv.4", "features.1.conv.2")]
    for number in range(2, 18):
        block = f"features.{number}.conv"
        net = ".net" if shifted and number - 1 in SHIFTED else ""
        layers += [(f"{block}.0{net}", f"{block}.0.0"), (f"{block}.3", f"{block}.1.0"), (f"{block}.6", f"{block}.2")]
        norms += [(f"{block}.1", f"{block}.0.1"), (f"{block}.4", f"{block}.1.1"), (f"{block}.7", f"{block}.3")]
    return [*layers, ("features.18.0", "features.18.0")], [*norms, ("features.18.1", "features.18.1")]


def test_the_authors_online_mobilenet(tmp_path: Path) -> None:
    source, model = (network("mobilenet_v2", seed, 27, shift_direction="past") for seed in (1, 2))
    layers, norms = flat_mobilenet(shifted=False)
    file = renamed(source, [*layers, ("classifier", "classifier.1")], norms)
    assert len(file) == 314  # as many as the published file has
    assert_all_loaded(loaded(model, file, tmp_path / "w.pth"), model, source)


def test_the_authors_offline_mobilenet(tmp_path: Path) -> None:
    source, model = (network("mobilenet_v2", seed) for seed in (1, 2))
    layers, norms = ([(f"base_model.{theirs}", ours) for theirs, ours in pairs] for pairs in flat_mobilenet(True))
    file = renamed(source, [*layers, ("new_fc", "classifier.1")], norms)
    assert "base_model.features.3.conv.0.net.weight" in file
    file = {"state_dict": {f"module.{name}": value for name, value in file.items()}}
    assert_all_loaded(loaded(model, file, tmp_path / "w.pth"), model, source)


@pytest.mark.parametrize("shifted", [True, False], ids=["tsm", "tsn"])
def test_mmactions_resnets(tmp_path: Path, shifted: bool) -> None:
    source, model = (network("resnet50", seed) for seed in (1, 2))
    file = mmactions(source.state_dict(), shifted)
    assert "backbone.layer1.0.downsample.bn.running_var" in file
    assert ("backbone.layer1.0.conv1.conv.net.weight" in file) == shifted
    report = loaded(model, {"meta": {"epoch": 50}, "state_dict": file, "message_hub": {}}, tmp_path / "w.pth")
    assert_all_loaded(report, model, source)


def test_mmactions_non_local_blocks_have_no_bias_behind(tmp_path: Path) -> None:
    """mmcv's ConvModule leaves out the bias of a convolution in front of a norm; here it is there and 0."""
    source, model = (network("resnet50", seed, non_local="tsm") for seed in (1, 2))
    file = mmactions(source.state_dict(), shifted=True)
    assert {f"backbone.layer2.0.{name}.weight" for name in ("block.conv1.conv.net", "non_local_block.g.0.conv")} < set(
        file
    )
    file = {name: value for name, value in file.items() if not name.endswith("conv_out.conv.bias")}
    report = loaded(model, {"state_dict": file}, tmp_path / "w.pth")
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    biases = [f"{block}.nl.W.0.bias" for block in NON_LOCAL]
    assert report.made == dict.fromkeys(biases, "0, since the file's layer has no bias")
    for name, value in model.state_dict().items():
        expected = torch.zeros_like(value) if name in biases else source.state_dict()[name]
        assert torch.equal(value, expected), name


def mmaction_mobilenet() -> Iterator[tuple[str, str, str]]:
    """backbones/mobilenet_v2.py: conv1, layer1 to layer7 of numbered blocks, conv2 -> (theirs, our conv, our norm)."""
    yield "backbone.conv1", "features.0.0", "features.0.1"
    ours = 0
    for layer, num_blocks in enumerate(MOBILENET, 1):
        for index in range(num_blocks):
            ours += 1
            parts = 2 if ours == 1 else 3
            for part in range(parts):
                net = ".net" if part == 0 and ours - 1 in SHIFTED else ""
                theirs, conv = f"backbone.layer{layer}.{index}.conv.{part}{net}", f"features.{ours}.conv"
                last = part == parts - 1
                yield (
                    theirs,
                    f"{conv}.{part}" if last else f"{conv}.{part}.0",
                    f"{conv}.{part + 1}" if last else f"{conv}.{part}.1",
                )
    yield "backbone.conv2", "features.18.0", "features.18.1"


def test_mmactions_mobilenet(tmp_path: Path) -> None:
    source, model = (network("mobilenet_v2", seed) for seed in (1, 2))
    layers = [(f"{theirs}.conv", conv) for theirs, conv, _ in mmaction_mobilenet()]
    norms = [(f"{theirs}.bn", norm) for theirs, _, norm in mmaction_mobilenet()]
    file = renamed(source, [*layers, ("cls_head.fc_cls", "classifier.1")], norms)
    assert "backbone.layer2.1.conv.0.net.conv.weight" in file
    assert_all_loaded(loaded(model, {"state_dict": file}, tmp_path / "w.pth"), model, source)


def test_an_imagenet_file_of_mmcls_within_mmaction(tmp_path: Path) -> None:
    """Its ResNeXt-101 has torchvision's names behind `backbone.`."""
    source, model = (network("resnext101_32x4d", seed) for seed in (1, 2))
    file = {f"backbone.{name}": value for name, value in source.state_dict().items() if not name.startswith("fc.")}
    file |= {f"cls_head.fc_cls.{part}": source.state_dict()[f"fc.{part}"] for part in ("weight", "bias")}
    assert_all_loaded(loaded(model, {"state_dict": file}, tmp_path / "w.pth"), model, source)


Write = Callable[[Tensors], Tensors]


@pytest.mark.parametrize(
    ("arch", "write"),
    [
        ("tsn", authors),
        ("tsm", torchvisions),
        ("i3d_3x3x3", mmactions),
        ("i3d_3x1x1", torchvisions),
        ("i3d_replace", authors),
        ("trn", mmactions),
    ],
)
def test_a_2d_file_of_each_convention_is_loaded_whole(tmp_path: Path, arch: str, write: Write) -> None:
    """Kernels in time are inflated; TRN's linear layer of a frame has another size, and its relations are its own."""
    source, model = (
        network("resnet50", 1, arch="tsn"),
        network("resnet50", 2, arch=arch, frames=16 if arch == "i3d_3x3x3" else 8),
    )
    report = loaded(model, {"state_dict": write(source.state_dict())}, tmp_path / "w.pth")
    own = [name for name in model.state_dict() if name.startswith("consensus.")]
    assert (list(report.missing), report.unexpected) == (own, ())
    assert [mismatch.name for mismatch in report.mismatched] == (["fc.weight", "fc.bias"] if arch == "trn" else [])
    for name, expected in source.state_dict().items():
        found = model.state_dict()[name]
        found = found.sum(2) if found.dim() == 5 else found
        if not (arch == "trn" and name.startswith("fc.")):
            assert_near(found, expected, 1e-6, name)


@pytest.mark.parametrize("write", [authors, mmactions])
def test_a_trn_of_each_convention_is_loaded_whole(tmp_path: Path, write: Write) -> None:
    source, model = (network("resnet50", seed, arch="trn", frames=3) for seed in (1, 2))
    file = write(source.state_dict())
    assert {"module.new_fc.weight", "cls_head.consensus.fc_fusion_scales.1.3.bias"} & set(file)
    assert_all_loaded(loaded(model, {"state_dict": file}, tmp_path / "w.pth"), model, source)


def test_mmactions_i3d_needs_its_own_pool1(tmp_path: Path) -> None:
    """resnet3d.py: pool1 is 1x3x3; no tensor shows it. Where the other form is built, the file is refused."""
    options = {"arch": "i3d_3x1x1", "frames": 8}
    source = network("resnet50", 1, pool1="1x3x3", **options)
    file = {"state_dict": mmactions(source.state_dict())}
    model = network("resnet50", 2, pool1="1x3x3", **options)
    assert_all_loaded(loaded(model, file, tmp_path / "w.pth"), model, source)
    for other in ("2x3x3", "2x3x3_unpadded"):
        with pytest.raises(UserError, match=rf"its pool1 is 1x3x3 and here {other}, .*; set model\.pool1=1x3x3"):
            loaded(network("resnet50", 2, pool1=other, **options), file, tmp_path / "w.pth")


def test_mmactions_non_local_i3d_is_of_neither_form(tmp_path: Path) -> None:
    """Its blocks stand where "original" has them (0101, 010101) and compute as "tsm" does: pool behind, no scale."""
    source, model = (
        network("resnet50", seed, arch="i3d_3x1x1", frames=8, pool1="1x3x3", non_local="original") for seed in (1, 2)
    )
    with pytest.raises(UserError, match="non-local blocks pool after phi and g and do not scale, unlike model"):
        loaded(model, {"state_dict": mmactions(source.state_dict())}, tmp_path / "w.pth")


def test_an_i3d_whose_pool1_the_file_does_not_say_is_reported(tmp_path: Path) -> None:
    """Wang et al.'s weights have torchvision's names where they are converted; our checkpoints have a spec."""
    source, model = (network("resnet50", seed, arch="i3d_3x1x1", frames=8) for seed in (1, 2))
    said = str(loaded(model, source.state_dict(), tmp_path / "w.pth"))
    assert said.endswith("the file does not say its pool1; taken as 2x3x3, see model.pool1")
    spec = {"model": {"arch": "i3d_3x1x1", "pool1": "1x3x3"}}
    with pytest.raises(UserError, match="its pool1 is 1x3x3 and here 2x3x3"):
        loaded(model, {"model": source.state_dict(), "spec": spec}, tmp_path / "w.pth")
    del spec["model"]["pool1"]  # a checkpoint of before
    assert loaded(model, {"model": source.state_dict(), "spec": spec}, tmp_path / "w.pth").pool1 is None
    flat = network("resnet50", 3, arch="tsn")
    assert loaded(model, mmactions(flat.state_dict()), tmp_path / "w.pth").pool1 is None


@pytest.mark.parametrize(
    ("arch", "write"),
    [
        ("eco_lite", torchvisions),
        ("slowfast", authors),
        ("x3d_m", mmactions),
        ("ir_csn", authors),
        ("ir_csn", mmactions),
    ],
)
def test_networks_without_a_convention_refuse_a_resnets_file(tmp_path: Path, arch: str, write: Write) -> None:
    source, model = network("resnet50", 1, arch="tsn"), network(None, 2, arch=arch, frames=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"^[^\n]*(no tensor fits this model|weights of another network)[^\n]*$"):
        loaded(model, {"state_dict": write(source.state_dict())}, tmp_path / "w.pth")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_tensors_under_one_name_are_refused(tmp_path: Path) -> None:
    file = authors(network("resnet18", 1).state_dict())
    file["module.base_model.fc.weight"] = file["module.new_fc.weight"]
    with pytest.raises(
        UserError, match=r"module\.new_fc\.weight and module\.base_model\.fc\.weight are both fc\.weight"
    ):
        loaded(network("resnet18", 2), {"state_dict": file}, tmp_path / "w.pth")


def test_another_number_of_classes_and_keys_of_nobody_are_reported(tmp_path: Path) -> None:
    source, model = network("resnet50", 1, classes=7), network("resnet50", 2)
    fresh = model.fc.weight.clone()
    file = authors(source.state_dict(), shifted=True)
    file["module.extra.weight"] = torch.ones(1)
    report = loaded(model, {"state_dict": file}, tmp_path / "w.pth")
    assert [mismatch.name for mismatch in report.mismatched] == ["fc.weight", "fc.bias"]
    assert (report.missing, report.unexpected) == ((), ("module.extra.weight",))
    assert torch.equal(model.fc.weight, fresh) and torch.equal(model.conv1.weight, source.conv1.weight)


def test_a_network_with_blocks_starts_from_one_without_and_not_from_the_other_form(tmp_path: Path) -> None:
    without, tsm, original = (network("resnet50", 1, non_local=form) for form in (False, "tsm", "original"))
    report = loaded(original, without.state_dict(), tmp_path / "w.pth")
    assert report.missing and all(".nl." in name for name in report.missing) and not report.unexpected
    report = loaded(without, tsm.state_dict(), tmp_path / "w.pth")
    assert report.unexpected and all(".nl." in name for name in report.unexpected) and not report.missing
    with pytest.raises(UserError, match=r"after layer2\.0, layer2\.2, .*4 and layer2\.1, .* here: the other form"):
        loaded(original, tsm.state_dict(), tmp_path / "w.pth")


@pytest.mark.parametrize("backbone", ["resnet50", "resnext101_32x4d", "mobilenet_v2"])
def test_our_own_names_stay(backbone: str) -> None:
    with torch.device("meta"):
        names = list(build_model("tsm", backbone, non_local=False if "mobile" in backbone else "tsm").state_dict())
    assert our_names(names, "fc") == {name: name for name in names}
    wrapped = [f"module._orig_mod.{name}" for name in names]
    assert list(our_names(wrapped, "fc").values()) == names
    assert our_names([], "fc") == {}
