"""Machines whose gradients are wrong."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.models import arithmetic
from summit_train.models.arithmetic import check_arithmetic, error_of_two_frames
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped

CPU = torch.device("cpu")


def _spec(arch: str = "i3d_3x3x3", precision: str = "bf16") -> Spec:
    words = [f"model.arch={arch}", f"precision={precision}", "data.num_frames=16", "model.width=0.125"]
    return load_spec(shipped("configs/kinetics") / "tsm_r50_8f.yaml", [*words, "data.crop=32", "model.dropout=0"])


@pytest.mark.parametrize(
    ("spec", "device", "error", "refused"),
    [
        (_spec(), CPU, float("inf"), True),
        (_spec(), CPU, 0.01, False),
        (_spec(precision="fp32"), CPU, float("inf"), False),
        (_spec("tsm"), CPU, float("inf"), False),
        (_spec("i3d_replace"), CPU, float("inf"), False),  # no stride in time: 16 frames all the way
        (_spec(), torch.device("cuda"), float("inf"), False),
    ],
)
def test_wrong_gradients_are_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, device: torch.device, error: float, refused: bool
) -> None:
    monkeypatch.setattr(arithmetic, "error_of_two_frames", lambda: error)
    message = pytest.raises(UserError, match=r"has two with data.num_frames 16; take precision=fp32")
    with message if refused else nullcontext():
        check_arithmetic(spec, device)


@pytest.mark.parametrize(("spoil", "least"), [(1.0, 0.0), (0.0, 1.0), (float("nan"), float("inf"))])
def test_the_probe_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, spoil: float, least: float) -> None:
    """Without oneDNN the gradient is right; one that comes out as zeros or as NaN is seen."""
    honest = torch.autograd.grad

    def grad(out: torch.Tensor, weight: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (found,) = honest(out, weight, sent)
        return (found * (spoil if found.dtype == torch.bfloat16 else 1),)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with torch.backends.mkldnn.flags(enabled=False):
        assert least <= error_of_two_frames() <= least + (0.01 if least == 0 else 0)
