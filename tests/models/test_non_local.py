"""Non-local blocks: both forms by hand, where they stand, how they begin, and what they leave as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.models.non_local import NonLocal
from summit_train.models.video import freeze_norms, is_frozen
from tests.closeness import assert_near
from tests.networks import clips

FORMS = ("tsm", "original")
NETWORKS = [
    ("tsm", "resnet50", 2),
    ("tsn", "resnext101_32x4d", 2),
    ("i3d_3x3x3", "resnet50", 16),
    ("i3d_3x1x1", "resnet50", 8),
    ("i3d_replace", "resnet50", 2),
]


def network(arch: str, backbone: str, num_frames: int, **options: object) -> VideoNetwork:
    """A narrow network in double whose logits are of order one."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(arch, backbone, num_frames, 5, width=0.125, generator=generator, **options).double()
    nn.init.normal_(model.fc.weight, generator=torch.Generator().manual_seed(1))
    return model


def block(form: str, num_frames: int | None, channels: int = 6) -> NonLocal:
    """A block whose weights are all of order one."""
    made = NonLocal(channels, form, num_frames).double().eval()
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5 if name.endswith("running_var") else -1.0, 1.0)
    return made


def by_hand(made: NonLocal, x: torch.Tensor, form: str) -> torch.Tensor:
    """Equations 5 and 6 on one volume (C, T, H, W)."""
    weights = {name: tensor.flatten(1) if tensor.dim() > 1 else tensor for name, tensor in made.state_dict().items()}

    def linear(name: str, places: torch.Tensor) -> torch.Tensor:
        return places @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def pooled(volume: torch.Tensor) -> torch.Tensor:
        channels, t, h, w = volume.shape
        corners = volume[:, :, : h // 2 * 2, : w // 2 * 2].reshape(channels, t, h // 2, 2, w // 2, 2)
        return corners.amax(dim=(3, 5))

    def places(volume: torch.Tensor) -> torch.Tensor:
        return volume.flatten(1).T

    def projected(name: str) -> torch.Tensor:
        if form == "original":
            return linear(name, places(pooled(x)))
        full = linear(name, places(x)).T.reshape(-1, *x.shape[1:])
        return places(pooled(full))

    theta, phi, g = linear("theta", places(x)), projected("phi.0"), projected("g.0")
    scale = theta.shape[1] ** -0.5 if form == "original" else 1.0
    products = (scale * theta @ phi.T).exp()
    y = linear("W.0", products / products.sum(1, keepdim=True) @ g)
    y = (y - weights["W.1.running_mean"]) / (weights["W.1.running_var"] + 1e-5).sqrt()
    return x + (y * weights["W.1.weight"] + weights["W.1.bias"]).T.reshape(x.shape)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_by_hand_on_volumes_and_on_frames(form: str) -> None:
    x = torch.randn(2, 6, 3, 5, 4, dtype=torch.double)
    volumes, frames = block(form, None), block(form, 3)
    state = volumes.state_dict()
    frames.load_state_dict({name: state[name].reshape(value.shape) for name, value in frames.state_dict().items()})
    expected = torch.stack([by_hand(volumes, clip, form) for clip in x])
    assert (expected - x).abs().max() > 0.1
    assert_near(volumes(x), expected, 1e-12)
    as_frames = x.transpose(1, 2).flatten(0, 1)
    for given in (as_frames, as_frames.contiguous(memory_format=torch.channels_last)):
        assert_near(frames(given).unflatten(0, (2, 3)).transpose(1, 2), expected, 1e-12)


@pytest.mark.parametrize(("form", "fast"), [("tsm", True), ("original", False)])
@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_at_its_start_the_network_is_the_one_without(
    arch: str, backbone: str, num_frames: int, form: str, fast: bool
) -> None:
    without, with_blocks = (network(arch, backbone, num_frames, non_local=value) for value in (False, form))
    if fast:
        accelerate(without)
        accelerate(with_blocks)
    clip = clips(2, num_frames)
    for training in (True, False):
        expected = without.train(training)(clip)
        assert_near(with_blocks.train(training)(clip), expected, 1e-12)
    assert sum(isinstance(module, NonLocal) for module in with_blocks.modules()) == 5
    freeze_norms(with_blocks, "all")  # all but the blocks' own
    frozen = {name for name, module in with_blocks.named_modules() if is_frozen(module)}
    assert frozen == {name for name, module in without.named_modules() if isinstance(module, _BatchNorm)}


@pytest.mark.parametrize(
    ("backbone", "form", "res3", "res4"),
    [
        ("resnet50", "tsm", (0, 2), (0, 2, 4)),
        ("resnet50", "original", (1, 3), (1, 3, 5)),
        ("resnet101", "original", (1, 3), (6, 13, 20)),
        ("resnet101", "tsm", (0, 2), (0, 7, 14)),
        ("resnext101_32x8d", "tsm", (0, 2), (0, 7, 14)),
        ("resnet152", "tsm", (0, 4), (0, 12, 24)),
        ("resnet152", "original", (3, 7), (11, 23, 35)),
    ],
)
def test_where_the_blocks_stand(backbone: str, form: str, res3: tuple[int, ...], res4: tuple[int, ...]) -> None:
    """The first three rows are published: Lin et al., ops/non_local.py; Wang et al., lib/models/resnet_video.py."""
    for arch in ("tsm", "i3d_3x1x1") if backbone == "resnet50" else ("tsm",):
        with torch.device("meta"):
            model = build_model(arch, backbone, 8, width=0.125, non_local=form)
        places = [name for name, module in model.named_modules() if isinstance(module, NonLocal)]
        assert places == [f"layer2.{i}.nl" for i in res3] + [f"layer3.{i}.nl" for i in res4]


@pytest.mark.parametrize("form", FORMS)
def test_the_names_are_the_authors(form: str) -> None:
    with torch.device("meta"):
        model = build_model("tsm", "resnet50", 8, non_local=form)
    nl = next(module for module in model.modules() if isinstance(module, NonLocal))
    found = {name: tuple(value.shape) for name, value in nl.state_dict().items()}
    inner = {f"{name}.weight": (256, 512, 1, 1) for name in ("theta", "phi.0", "g.0")}
    inner |= {f"{name}.bias": (256,) for name in ("theta", "phi.0", "g.0")}
    norm = {f"W.1.{part}": (512,) for part in ("weight", "bias", "running_mean", "running_var")}
    outer = {"W.0.weight": (512, 256, 1, 1), "W.0.bias": (512,)}
    assert found == inner | outer | norm | {"W.1.num_batches_tracked": ()}


@pytest.mark.parametrize("form", FORMS)
def test_initial_weights(form: str) -> None:
    """Published: PyTorch's own, uniform within 1 / sqrt(C); N(0, 0.01) with zero biases. Both: gamma = beta = 0."""
    model = build_model("tsm", "resnet50", 2, width=0.5, non_local=form, generator=torch.Generator().manual_seed(0))
    nl = [module for module in model.modules() if isinstance(module, NonLocal)][-1]
    assert not nl.W[1].weight.any() and not nl.W[1].bias.any()
    for conv in (nl.theta, nl.phi[0], nl.g[0], nl.W[0]):
        bound = conv.in_channels**-0.5
        if form == "original":
            assert conv.weight.std().item() == pytest.approx(0.01, rel=0.02) and not conv.bias.any()
        else:
            assert conv.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
            assert 0.9 * bound < conv.bias.abs().max() <= bound and conv.weight.abs().max() <= bound


@pytest.mark.parametrize(("form", "fast"), [("tsm", False), ("original", True)])
def test_frames_stay_channels_last(form: str, fast: bool) -> None:
    model = network("tsm", "resnet50", 2, non_local=form).to(memory_format=torch.channels_last)
    if fast:
        accelerate(model)
    seen = []
    for module in model.modules():
        if isinstance(module, NonLocal):
            module.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model(clips(2, 2, 64, 64))
    assert len(seen) == 5 and all(out.is_contiguous(memory_format=torch.channels_last) for out in seen)
