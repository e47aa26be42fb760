"""Every network of the catalog against double precision on the CPU, in each precision; the shift, to the bit.

An error is ||x - ref|| / ||ref||, of the logits and of all gradients as one vector; the reference is the plain network
with the same weights and clips, in training mode. Bounds, by what sets the error:

- Logits: the roundings of the activations, 2^-24 (fp32), 2^-11 (TF32, fp16), 2^-8 (bf16), some ten times larger after
  50 layers.
- Gradients: a rounding that changes the sign of an activation switches its gradient on or off. A part e of the signs
  changes where the activations have an error of e, and the gradient's error is about its square root. So it is large
  however good the arithmetic is: in bf16 PyTorch's own autocast has 0.4 and more. A wrong gradient has 1 or 1.4.
- Therefore, too: no execution may be far worse than the plain network in the same precision on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from summit_train.models import VideoNetwork
from summit_train.models.fast import accelerate
from summit_train.models.precision import mixed_precision
from summit_train.models.resnet import ResidualBlock
from summit_train.models.shift import TemporalShift, temporal_shift
from summit_train.spec.catalog import ARCHITECTURES
from summit_train.training.step import LossScale
from tests.gpu.devices import CPU, flat, on_devices, relative_error, tf32
from tests.gpu.networks import CASES, CLASSES, Case, build
from tests.models.test_shift import shifted_by_hand

# precision -> largest error of the logits, of the gradients
BOUNDS = {"fp32": (1e-4, 3e-2), "tf32": (3e-2, 0.5), "fp16": (3e-2, 0.5), "bf16": (0.15, 0.9)}
# The other networks: few values per channel in their normalisations, or single channels in their convolutions.
LOOSE = {"fp32": (1e-3, 5e-2), "tf32": (0.1, 1.5), "fp16": (0.1, 1.5), "bf16": (0.6, 5.0)}
RATIO = 1.5  # to the plain network in the same precision: other kernels round in another order
FLOOR = 0.2  # of the bound, which is always allowed: a ratio of two tiny errors tells nothing
MAIN = ("tsm", "tsn", "i3d_3x3x3")  # run in every execution
Answer = tuple[torch.Tensor, torch.Tensor]  # logits, gradients; double precision, CPU
Accelerate = Callable[[VideoNetwork], object]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("direction", ["both", "past"])
def test_the_shift_and_its_gradient_are_indexing_to_the_bit(
    device: torch.device,
    direction: str,
    memory: torch.memory_format,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(12, 20, 5, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    there = x.to(device).contiguous(memory_format=memory).requires_grad_()
    out = temporal_shift(there, 4, 0.125, direction)
    (grad,) = torch.autograd.grad(out, there, out.detach())
    expected = shifted_by_hand(x, 4, 2, direction)
    assert torch.equal(out.detach().cpu(), expected)
    # The gradient moves the other way: as a shift of frames in reverse.
    assert torch.equal(grad.cpu(), shifted_by_hand(expected.flip(0), 4, 2, direction).flip(0))
    assert out.is_contiguous(memory_format=memory)


def answer(model: VideoNetwork, case: Case, precision: str, *, channels_last: bool) -> Answer:
    """Run a network forward and backward once. fp16 with a loss scale, which halves until the gradient is finite."""
    place = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    # The numbers are those of fp16, so that no precision rounds the input; stored channels last as from the loader.
    stored = torch.randn(case.clips, case.frames, case.crop, case.crop, 3, generator=generator).half()
    clips = stored.permute(0, 1, 4, 2, 3).to(place.device, place.dtype)
    labels = torch.randint(CLASSES, (case.clips,), generator=generator).to(place.device)
    scale = LossScale(precision == "fp16", place.device)
    while True:
        model.zero_grad()
        model.reseed(3)
        with tf32(precision == "tf32"):
            with mixed_precision(precision, place.device):
                logits = model(clips if channels_last else clips.contiguous())
            torch.autograd.backward(functional.cross_entropy(logits, labels) * scale.scale)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        found = flat(gradients) / float(scale.scale)
        if bool(torch.isfinite(found).all()) or float(scale.scale) <= 1:
            return logits.detach().double().cpu(), found
        scale.update(torch.ones((), device=place.device))


def problems(name: str, device: torch.device, precisions: list[str], make_fast: Accelerate = accelerate) -> list[str]:
    """Compare one network in all its executions with double precision; return what is too far off."""
    case, found = CASES[name].on(device), list[str]()
    reference = answer(build(case), case, "fp64", channels_last=True)
    for precision in precisions:
        bounds = (BOUNDS if name in ("tsm", "tsn") else LOOSE)[precision]
        plain: tuple[float, ...] = ()
        for fast in (False, True):
            for channels_last in (False, True) if name in MAIN else (True,):
                model = build(case).to(device=device, dtype=torch.float32)
                if fast:
                    make_fast(model)
                own = answer(model, case, precision, channels_last=channels_last)
                errors = tuple(relative_error(*pair) for pair in zip(own, reference, strict=True))
                plain = plain or errors
                for what, error, beside, bound in zip(("logits", "gradients"), errors, plain, bounds, strict=True):
                    if not error <= min(bound, RATIO * beside + FLOOR * bound):  # a NaN is not
                        kind = f"{precision}, {'fast' if fast else 'plain'}, {'NHWC' if channels_last else 'NCHW'}"
                        found.append(f"{kind}: {what} are {error:.2g} off; plain {beside:.2g}, bound {bound:g}")
    return found


@pytest.mark.parametrize(("name", "device"), on_devices(CASES, rehearsed=["tsm", "tsm mobilenet_v2"]))
def test_a_network_is_that_of_double_precision_in_every_precision(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        precisions = ["fp32", "bf16", "fp16", *(["tf32"] if name in MAIN else [])]
    else:
        precisions = ["fp32", "bf16"]  # fp16 takes a CPU minutes
    assert problems(name, device, precisions) == []


def test_a_shift_in_the_other_direction_is_found() -> None:
    def wrong(model: VideoNetwork) -> None:
        for block in model.modules():
            if isinstance(block, ResidualBlock) and isinstance(block.shift, TemporalShift):
                block.shift = TemporalShift(block.shift.num_frames, direction="past")

    found = problems("tsm", CPU, ["fp32"], wrong)
    assert [line.split(" are")[0] for line in found] == [
        f"fp32, fast, {order}: {what}" for order in ("NCHW", "NHWC") for what in ("logits", "gradients")
    ]


def test_one_filter_that_is_a_third_too_large_and_a_nan_are_found() -> None:
    def scaled(by: float) -> Accelerate:
        def change(model: VideoNetwork) -> None:
            with torch.no_grad():
                model.get_submodule("layer2.0.conv1").get_parameter("weight")[0].mul_(by)

        return change

    assert any("gradients are" in line for line in problems("tsm", CPU, ["fp32"], scaled(1.3)))
    assert any("logits are nan" in line for line in problems("tsm", CPU, ["fp32"], scaled(math.nan)))


def test_every_architecture_is_among_the_cases() -> None:
    assert {case.arch for case in CASES.values()} == set(ARCHITECTURES)
