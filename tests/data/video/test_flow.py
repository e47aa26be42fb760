"""The code of optical flow by hand, and both methods on motions that are known."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.video.flow import MIN_SIDE, decode, encode, flow_method, grey


def textured(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth random picture uint8 (H, W): a sum of waves of 8 to 60 pixels, scaled to 0 .. 255."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    angles, lengths, phases = generator.uniform(0, [[2 * np.pi], [1], [2 * np.pi]], (3, 40))
    wave = 2 * np.pi / (8 + 52 * lengths)
    total = np.cos(
        wave * (np.cos(angles) * x[..., None] + np.sin(angles) * y[..., None]) + phases,
    ).sum(-1)
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


def test_decoding_keeps_zero_and_signs() -> None:
    code = np.arange(256, dtype=np.uint8)
    flow = decode(code)
    assert flow[128] == 0 and flow[0] == -20 and flow[255] == pytest.approx(127 * 40 / 255)
    assert flow[129] == pytest.approx(0.157, abs=5e-4)  # one step
    assert (flow[1:128] == -flow[:128:-1]).all()  # v and 256 - v
    assert decode(code, bound=8) == pytest.approx(flow * 8 / 20, rel=1e-6)


def test_coding_costs_up_to_one_step() -> None:
    flow = np.linspace(-20, 20, 10_001, dtype=np.float32)
    lost = flow - decode(encode(flow))
    step = 40 / 255
    assert lost.min() > -1e-4 and lost.max() < step + 1e-4
    assert lost.mean() == pytest.approx(step / 2, abs=1e-3)


@pytest.mark.parametrize(("method", "preset"), METHODS)
def test_a_shift_is_found_and_survives_the_code(method: str, preset: str) -> None:
    flow = decode(encode(flow_method(method, preset)(*shifted(3, -2))))
    assert flow.shape == (96, 128, 2)
    middle = flow[16:-16, 16:-16]
    assert np.abs(middle - [3, -2]).max() < 0.5


@pytest.mark.parametrize(("method", "preset"), METHODS)
def test_a_method_keeps_nothing_between_pairs(method: str, preset: str) -> None:
    pair, other = shifted(3, -2), shifted(-5, 4)
    compute = flow_method(method, preset)
    first = compute(*pair)
    compute(*other)
    assert (compute(*pair) == first).all() and (flow_method(method, preset)(*pair) == first).all()


@pytest.mark.parametrize(("method", "preset"), METHODS)
def test_mirrored_flow_is_the_flow_of_the_mirrored_pair(method: str, preset: str) -> None:
    compute, pair = flow_method(method, preset), shifted(3, -2)
    code = encode(compute(*pair))[16:-16, 16:-16].astype(int)
    mirrored = encode(compute(*(picture[:, ::-1].copy() for picture in pair)))[16:-16, 16:-16]
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


def test_without_opencv_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r"needs OpenCV .*pip install 'summit_train\[flow\]'") as raised:
        flow_method("dis")
    assert "\n" not in str(raised.value)


def test_an_opencv_without_tvl1_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", type(sys)("cv2"))
    with pytest.raises(UserError, match=r"has no TV-L1 .*opencv-contrib-python-headless"):
        flow_method("tvl1")
