"""The code of optical flow by hand, and both methods on motions that are known."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.video.flow import MIN_SIDE, encode, flow_method, grey
from tests.flows import decode


def textured(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth random picture uint8 (H, W): a sum of waves of 8 to 60 pixels, scaled to 0 .. 255."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    angles, lengths, phases = generator.uniform(0, [[2 * np.pi], [1], [2 * np.pi]], (3, 40))
    wave = 2 * np.pi / (8 + 52 * lengths)
    total = np.cos(wave * (np.cos(angles) * x[..., None] + np.sin(angles) * y[..., None]) + phases).sum(-1)
    total = (total - total.min()) / (total.max() - total.min())
    return np.rint(255 * total).astype(np.uint8)


def shifted(right: int, down: int, height: int = 96, width: int = 128) -> list[NDArray[np.uint8]]:
    """Two pictures; what is in the first is `right` and `down` pixels further in the second."""
    large = textured(height + 40, width + 40)
    return [large[20 - dy : 20 - dy + height, 20 - dx : 20 - dx + width].copy() for dx, dy in ((0, 0), (right, down))]


METHODS = [("tvl1", "fast"), ("dis", "ultrafast"), ("dis", "fast"), ("dis", "medium")]


def test_the_code_by_hand() -> None:
    flow = np.array([0, 20, -20, 10, -10, 35, -1e9, 0.1, 1 / 3], np.float32)
    # 255 (f + 20) / 40: 127.5 is rounded to even; 191.25; 63.75; 128.14; 129.6.
    assert encode(flow).tolist() == [128, 255, 0, 191, 64, 255, 0, 128, 130]
    assert encode(np.array([8, -8, 0], np.float32), bound=8).tolist() == [255, 0, 128]


def test_decoding_keeps_zero_and_signs_and_costs_up_to_one_step() -> None:
    code = np.arange(256, dtype=np.uint8)
    flow = decode(code)
    assert flow[128] == 0 and flow[0] == -20 and flow[255] == pytest.approx(127 * 40 / 255)
    assert flow[129] == pytest.approx(0.157, abs=5e-4)  # one step
    assert (flow[1:128] == -flow[:128:-1]).all()  # v and 256 - v
    assert decode(code, bound=8) == pytest.approx(flow * 8 / 20, rel=1e-6)
    every = np.linspace(-20, 20, 10_001, dtype=np.float32)
    lost, step = every - decode(encode(every)), 40 / 255
    assert lost.min() > -1e-4 and lost.max() < step + 1e-4
    assert lost.mean() == pytest.approx(step / 2, abs=1e-3)


@pytest.mark.parametrize(("method", "preset"), METHODS)
def test_a_shift_is_found_and_nothing_is_kept_between_pairs(method: str, preset: str) -> None:
    compute, pair = flow_method(method, preset), shifted(3, -2)
    first = compute(*pair)
    middle = decode(encode(first))[16:-16, 16:-16]
    assert first.shape == (96, 128, 2) and np.abs(middle - [3, -2]).max() < 0.5
    compute(*shifted(-5, 4))
    assert (compute(*pair) == first).all() and (flow_method(method, preset)(*pair) == first).all()
    mirrored = encode(compute(*(picture[:, ::-1].copy() for picture in pair)))[16:-16, 16:-16]
    code = encode(first)[16:-16, 16:-16].astype(int)
    turned = np.stack([256 - code[:, ::-1, 0], code[:, ::-1, 1]], -1)
    # One value by rounding about 127.5, and one because the methods are not symmetric.
    assert np.abs(turned - mirrored).max() <= 2
    assert np.abs(turned - mirrored)[..., 1].max() <= 1


@pytest.mark.parametrize("method", ["tvl1", "dis"])
def test_small_pictures_are_refused(method: str) -> None:
    compute = flow_method(method)
    assert compute(*shifted(1, 0, MIN_SIDE, MIN_SIDE)).shape == (32, 32, 2)
    with pytest.raises(UserError, match="200 x 31 pixels is too small for flow: a side must have 32"):
        compute(*shifted(1, 0, MIN_SIDE - 1, 200))


def test_grey_is_brightness() -> None:
    picture = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], np.uint8)
    assert grey(picture).tolist() == [[76, 150, 29, 255]]  # 0.299, 0.587, 0.114


@pytest.mark.parametrize(
    ("library", "method", "message"),
    [
        (None, "dis", r"needs OpenCV .*pip install 'summit_train\[flow\]'"),
        (type(sys)("cv2"), "tvl1", r"has no TV-L1 .*opencv-contrib-python-headless"),
    ],
)
def test_without_opencv_or_its_tvl1_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, library: object, method: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", library)
    with pytest.raises(UserError, match=message) as raised:
        flow_method(method)
    assert "\n" not in str(raised.value)
