"""Training is refused where this machine's gradients are wrong, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from summit_train.training import arithmetic
from summit_train.training.arithmetic import check_arithmetic, error_of_two_frames

CPU = torch.device("cpu")


def _spec(arch: str = "i3d_3x3x3", precision: str = "bf16", frames: int = 16) -> Spec:
    words = [f"model.arch={arch}", f"precision={precision}", f"data.num_frames={frames}", "model.width=0.125"]
    return load_spec(shipped("configs/kinetics") / "tsm_r50_8f.yaml", [*words, "data.crop=32", "model.dropout=0"])


@pytest.mark.parametrize(
    ("spec", "device", "refused"),
    [
        (_spec(), CPU, True),
        (_spec(precision="fp32"), CPU, False),
        (_spec("tsm", frames=16), CPU, False),
        (_spec("i3d_replace", frames=16), CPU, False),  # no stride in time: 16 frames all the way
        (_spec(), torch.device("cuda"), False),
    ],
)
def test_what_a_wrong_library_refuses(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, device: torch.device, refused: bool
) -> None:
    monkeypatch.setattr(arithmetic, "error_of_two_frames", lambda: float("inf"))
    if refused:
        with pytest.raises(UserError, match=r"has two with data.num_frames 16; take precision=fp32"):
            check_arithmetic(spec, device)
    else:
        check_arithmetic(spec, device)


def test_a_right_library_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "error_of_two_frames", lambda: 0.01)
    check_arithmetic(_spec(), CPU)


def test_the_probe_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN the gradient is right; where one comes out as NaN or as zeros, it is seen."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert error_of_two_frames() < 0.01
    honest = arithmetic._weight_gradient
    for spoil, least in ((0.0, 1.0), (float("nan"), float("inf"))):
        monkeypatch.setattr(
            arithmetic,
            "_weight_gradient",
            lambda clips, grad, spoil=spoil: honest(clips, grad) * (spoil if clips.dtype == torch.bfloat16 else 1),
        )
        with torch.backends.mkldnn.flags(enabled=False):
            assert error_of_two_frames() == least
