"""The networks that build_model makes: names, sizes, what time does in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.models.shift import TemporalShift, temporal_shift
from summit_train.spec.catalog import ARCHITECTURES, BACKBONES, VIT_BACKBONES
from tests.closeness import assert_near
from tests.networks import clips, random_network

GOLDEN = Path(__file__).parent.parent / "golden"
# The smallest network of each architecture, with its number of frames.
SMALL = [
    ("tsn", "resnet18", 4),
    ("tsm", "resnet18", 4),
    ("tsm", "resnet50", 3),
    ("tsm", "resnext101_32x4d", 2),
    ("tsm", "mobilenet_v2", 3),
    ("i3d_replace", "resnet50", 2),
    ("i3d_3x3x3", "resnet18", 16),
    ("i3d_3x1x1", "resnet50", 8),
    ("trn", "resnet18", 3),
    ("eco_lite", None, 4),
    ("slowfast", "resnet50", 8),
    ("x3d_m", None, 2),
    ("ir_csn", "resnet152", 8),
]
NETWORKS = [*SMALL, ("vit", "vit_s", 4)]
PLAIN = [("tsm", "resnet18", 4, False), ("i3d_3x1x1", "resnet50", 8, False), ("x3d_m", None, 2, False)]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def converted(model: VideoNetwork) -> VideoNetwork:
    """The network with its kernels stored channels last."""
    for kernel in model.parameters():
        if kernel.dim() in CHANNELS_LAST:
            kernel.data = kernel.contiguous(memory_format=CHANNELS_LAST[kernel.dim()])
    return model


def stem(model: nn.Module) -> nn.Module:
    """The first convolution."""
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d))


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
@pytest.mark.parametrize("arch", ["tsn", "tsm"])
def test_2d_networks_have_torchvisions_names_and_shapes(arch: str, backbone: str) -> None:
    """The golden lists are the state dicts of torchvision's models, in its order."""
    lines = (GOLDEN / f"torchvision_{backbone}.txt").read_text().splitlines()
    names = [line.split()[0] for line in lines]
    shapes = [tuple(map(int, "x".join(line.split()[1:]).split("x"))) for line in lines if " " in line]
    with torch.device("meta"):
        state = build_model(arch, backbone, 8, 1000).state_dict()
    assert list(state) == names
    assert [tuple(value.shape) for value in state.values() if value.dim()] == shapes


@pytest.mark.parametrize("arch", ["i3d_3x3x3", "i3d_3x1x1", "i3d_replace", "ir_csn"])
def test_inflated_networks_have_the_same_names(arch: str) -> None:
    backbone = ARCHITECTURES[arch].usual_backbone
    with torch.device("meta"):
        flat, inflated = (build_model(a, backbone, 16).state_dict() for a in ("tsn", arch))
    assert list(flat) == list(inflated)
    for name, value in flat.items() if arch != "ir_csn" else ():
        other = tuple(inflated[name].shape)
        assert (other[:2] + other[3:] if value.dim() == 4 else other) == tuple(value.shape)


@pytest.mark.parametrize(("backbone", "layer3"), [("resnet50", (0, 2, 4)), ("resnet101", range(0, 23, 2))])
def test_i3d_3x1x1_inflates_the_published_blocks(backbone: str, layer3: Sequence[int]) -> None:
    inflated = {"layer1": (0, 1, 2), "layer2": (0, 2), "layer3": layer3, "layer4": (1,)}
    expected = {f"{layer}.{block}.conv1": 3 for layer, blocks in inflated.items() for block in blocks}
    with torch.device("meta"):
        model = build_model("i3d_3x1x1", backbone, 32)
    spans = {name: module.kernel_size[0] for name, module in model.named_modules() if isinstance(module, nn.Conv3d)}
    assert {name: span for name, span in spans.items() if span > 1} == {"conv1": 5, **expected}


@pytest.mark.parametrize(
    ("backbone", "place", "depths"),
    [
        # The blocks of Lin et al.'s code (ops/models.py), 0-based and without the stem: 10 of 17.
        ("mobilenet_v2", "residual", (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)),
        ("resnet50", "residual", (3, 4, 6, 3)),
        ("resnet101", "in_place", (3, 4, 23, 3)),
        # 23 blocks or more in a stage: every second block.
        ("resnet101", "residual", (2, 2, 12, 2)),
        ("resnet152", "residual", (2, 4, 18, 2)),
        ("resnext101_32x4d", "residual", (2, 2, 12, 2)),
        ("resnext101_32x8d", "residual", (2, 2, 12, 2)),
    ],
)
def test_where_the_shifts_sit(backbone: str, place: str, depths: tuple[int, ...]) -> None:
    step = 1 if backbone == "resnet50" or place == "in_place" else 2
    expected = [f"layer{stage}.{step * number}" for stage, depth in enumerate(depths, 1) for number in range(depth)]
    if backbone == "mobilenet_v2":
        expected = [f"features.{block + 1}" for block in depths]
    with torch.device("meta"):
        model = build_model("tsm", backbone, shift_place=place)
    assert [n.rpartition(".")[0] for n, m in model.named_modules() if isinstance(m, TemporalShift)] == expected


@pytest.mark.parametrize("place", ["residual", "in_place"])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_the_shortcut_is_shifted_in_place_only(backbone: str, place: str) -> None:
    block = random_network("tsm", backbone, 4, shift_place=place).layer2[0]
    seen: dict[nn.Module, torch.Tensor] = {}
    for module in (block.conv1, block.downsample):
        module.register_forward_pre_hook(lambda module, inputs: seen.update({module: inputs[0].clone()}))
    x = torch.randn(8, block.conv1.in_channels, 8, 8)
    block(x)
    shifted = temporal_shift(x, 4)
    assert not torch.equal(shifted, x) and torch.equal(seen[block.conv1], shifted)
    assert torch.equal(seen[block.downsample], x if place == "residual" else shifted)


@pytest.mark.parametrize(("arch", "backbone", "num_frames", "fast"), [*((*one, True) for one in SMALL), *PLAIN])
def test_frames_are_not_copied_on_their_way_in(arch: str, backbone: str | None, num_frames: int, fast: bool) -> None:
    """Frames stored (N, T, H, W, 3) reach conv1 as a view and stay channels-last, whatever the weights."""
    model = random_network(arch, backbone, num_frames)
    if fast:
        accelerate(converted(model))
    # With fewer than 16 clips torch takes, on one CPU thread, a 3D convolution that returns NCTHW.
    clip = clips(16, num_frames, 16, 16).float()
    seen: list[bool] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # Each convolution's result goes into a normalisation.
        seen.append(all(x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]) for x in (*inputs, output)))
        if module is stem(model):
            assert inputs[0].data_ptr() == clip.data_ptr()
            assert inputs[0].is_contiguous(memory_format=model.memory_format)

    for module in model.modules():
        if module is stem(model) or isinstance(module, nn.modules.batchnorm._BatchNorm | TemporalShift):
            module.register_forward_hook(note)
    model(clip)
    assert len(seen) >= 20 and all(seen)


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_logits_and_gradients_do_not_depend_on_the_memory_format(
    arch: str, backbone: str | None, num_frames: int
) -> None:
    model = random_network(arch, backbone, num_frames).double()
    clip = clips(2, num_frames)
    model.reseed(0)
    logits = model(clip)
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    model.reseed(0)
    plain = converted(model)(clip.contiguous())
    (plain_grad,) = torch.autograd.grad(plain.square().sum(), stem(model).weight)
    assert logits.shape == (2, 5)
    assert_near(plain, logits, 1e-9)
    assert_near(plain_grad, stem(model).weight.grad, 1e-7)


@pytest.mark.parametrize("training", [True, False])
def test_tsn_cannot_tell_the_order_of_frames(training: bool) -> None:
    """Equal to rounding: the same numbers are summed over T, in another order (hence double and 1e-12)."""
    clip = clips(2, 4)
    logits = {}
    for arch in ("tsn", "tsm"):
        model = random_network(arch, "resnet18", 4).double().train(training)
        logits[arch] = (model(clip), model(clip.flip(1)))
    forwards, backwards = logits["tsn"]
    scale = forwards.abs().max()
    assert (forwards - backwards).abs().max() <= 1e-12 * scale
    forwards, backwards = logits["tsm"]
    assert (forwards - backwards).abs().max() > 1e-3 * scale


@pytest.mark.parametrize(("pool1", "side", "sees_odd"), [("2x3x3", 56, 1), ("2x3x3_unpadded", 55, 1), ("1x3x3", 56, 0)])
def test_the_forms_of_pool1(pool1: str, side: int, sees_odd: int) -> None:
    """conv1 leaves 112 pixels of 224. 1x3x3 with a stride of 2 reads the even frames alone."""
    model = build_model("i3d_3x1x1", "resnet50", 8, 5, width=0.125, pool1=pool1)
    volume = torch.zeros(1, 8, 4, 112, 112)
    volume[:, :, 1::2] = 1.0
    assert torch.equal(model.maxpool(volume), torch.full((1, 8, 2, side, side), float(sees_odd)))
    assert list(model.state_dict()) == list(build_model("i3d_3x1x1", "resnet50", 8, 5, width=0.125).state_dict())


@pytest.mark.parametrize("arch", ["tsm", "trn"])
def test_bf16_logits_are_summed_in_fp32(arch: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert random_network(arch, "resnet18", 4)(clips(1, 4).float()).dtype == torch.float32


def test_channels_and_initial_weights() -> None:
    """Convolutions N(0, 2 / fan_out), norms 1 and 0, classifier N(0, 0.001) and 0."""
    narrow = build_model("tsn", "resnet18", 1, 5, width=0.3)
    # 64, 128, 256, 512 times 0.3: 19.2, 38.4, 76.8, 153.6, to multiples of 8.
    assert [narrow.get_submodule(f"layer{i}")[0].conv1.out_channels for i in (1, 2, 3, 4)] == [16, 40, 80, 152]
    model = build_model("tsn", "resnet18", 1, 400)
    kernel = model.layer4[0].conv2.weight
    assert kernel.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert abs(kernel.mean().item()) < 1e-4
    assert model.fc.weight.std().item() == pytest.approx(0.001, rel=0.02)
    assert not model.fc.bias.any()
    squeeze = build_model("x3d_m", None, 1, 2, width=0.125).layer1[0].se.fc1
    assert squeeze.weight.any() and not squeeze.bias.any()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all((norm.weight == 1).all() and not norm.bias.any() for norm in norms)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_come_from_the_generator_alone(arch: str) -> None:
    non_local = "tsm" if ARCHITECTURES[arch].non_local else False
    backbone = "resnet50" if non_local else None
    first, second = (
        build_model(
            arch, backbone, 16, 5, width=0.125, non_local=non_local, generator=torch.Generator().manual_seed(0)
        ).state_dict()
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet51"}, "backbone.*: Input should be 'resnet18', 'resnet34'"),
        ({"num_frames": 0}, "must be at least 1 for"),
        ({"in_channels": 0}, "in_channels must be 1 or more, got 0"),
        ({"freeze_bn": "all"}, "freeze_bn.*: Extra inputs are not permitted"),
        ({"drop_path": 0.1}, r"model\.drop_path: must be 0\.0 with model\.arch tsm: only arch vit reads"),
    ],
)
def test_wrong_choices_name_the_right_ones(options: dict, message: str) -> None:
    """tests/spec/specs.txt has the others."""
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_model("tsm", **options)


def test_the_catalog_builds() -> None:
    """Every architecture on every backbone that the catalog gives it, at its fewest frames."""
    for arch, known in ARCHITECTURES.items():
        assert set(known.backbones) <= {*BACKBONES, *VIT_BACKBONES}
        for backbone in known.backbones or (None,):
            with torch.device("meta"):
                model = build_model(arch, backbone, known.minimum_frames, 3, width=0.125).eval()
                if arch == "tsm" or backbone in known.backbones[:1]:
                    assert model(torch.empty(2, known.minimum_frames, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("shape", [(2, 3, 3, 32, 32), (2, 4, 1, 32, 32), (8, 3, 32, 32)])
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes \(N, 4, 3, H, W\); this input is"):
        random_network("tsm", "resnet18", 4)(torch.zeros(shape))


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), SMALL)
def test_zero_init_residual_makes_every_block_its_shortcut(arch: str, backbone: str | None, num_frames: int) -> None:
    if arch == "eco_lite":
        pytest.skip("its branches end in a sum; the spec refuses the key")
    model = build_model(arch, backbone, num_frames, width=0.125, zero_init_residual=True)
    blocks = [m for m in model.modules() if hasattr(m, "zero_init_last")]
    assert len(blocks) in (8, 16, 17, 26, 32, 33, 50)
    for block in blocks:
        norms = [m for m in block.children() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        last = norms[-1] if norms else block.conv[-1]
        assert not last.weight.any() and last.weight.requires_grad
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert sum(bool(norm.weight.any()) for norm in norms) == len(norms) - len(blocks)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_network_takes_clips_of_other_channels(arch: str) -> None:
    frames = max(8, ARCHITECTURES[arch].minimum_frames)
    with torch.device("meta"):
        model = build_model(arch, None, frames, 5, width=0.125, in_channels=4).eval()
        plain = build_model(arch, None, frames, 5, width=0.125)
        assert model(torch.empty(1, frames, 4, 32, 32)).shape == (1, 5)
    # Nothing else of the network differs.
    changed = {f"{layer}.weight" for layer in model.stem}
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    assert {name for name, value in model.state_dict().items() if value.shape != shapes[name]} == changed
