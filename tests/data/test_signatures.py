"""Perceptual hashes of clips: their bits and distances by hand, and copies of clips that move."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.data.manifest.clip import Clip
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.data.signatures import (
    _APART,
    _FREQUENCIES,
    _MARGIN,
    _SIDE,
    _STEP,
    NEAR,
    Near,
    Signature,
    digest,
    near_pairs,
    sign,
    signature,
)
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import Span
from tests.data.clips import all_of, read_clip

Bits = NDArray[np.uint64]


def _picture(signs: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A grey picture whose lowest frequencies, all of one strength, have these signs, in RGB."""
    places = (np.arange(_SIDE) + 0.5) * np.pi / _SIDE
    waves = np.cos(np.outer(np.arange(11), places))
    grey = 128 + 1.5 * sum(sign * np.outer(waves[down], waves[across]) for sign, (across, down) in signs_of(signs))
    return np.repeat(np.rint(grey).astype(np.uint8)[..., None], 3, -1)


def signs_of(signs: NDArray[np.float64]) -> list[tuple[float, tuple[int, int]]]:
    return [(float(sign), (int(across), int(down))) for sign, (across, down) in zip(signs, _FREQUENCIES, strict=True)]


def _bits(numbers: Sequence[int] | Bits) -> NDArray[np.bool_]:
    """The bits of hashes, (K, 64), in the order of the frequencies."""
    return np.unpackbits(np.array(numbers, np.uint64).view(np.uint8)).reshape(-1, 64).astype(bool)


def _signature(scene: Sequence[int], motion: Sequence[Sequence[int]]) -> Signature:
    return Signature(np.array(scene, np.uint64), np.array(motion, np.uint64).reshape(2, -1))


def test_the_frequencies_are_the_64_lowest_without_the_mean() -> None:
    pairs = [tuple(pair) for pair in _FREQUENCIES.tolist()]
    assert len(set(pairs)) == 64 and (0, 0) not in pairs
    # 2 + 3 + ... + 10 = 54 pairs have a sum of 1 to 9, and ten of the eleven with a sum of 10 follow.
    assert sum(sum(pair) <= 9 for pair in pairs) == 54 and max(map(sum, pairs)) == 10


def test_a_hash_has_a_bit_for_each_frequency_that_is_positive() -> None:
    rng = np.random.default_rng(0)
    signs = [rng.choice([-1.0, 1.0], 64) for _ in range(2)]
    pictures = np.stack([_picture(one) for one in signs])
    found = signature(np.repeat(pictures[:1], _APART + 1, 0))
    assert np.array_equal(_bits(found.scene[:1])[0], signs[0] > 0)
    assert not found.motion.any()  # nothing moves
    # a a ... b b: the differences are b - a, whose signs are those of b where they differ.
    found = signature(pictures[[0] * _APART + [1] * _APART])
    differ = signs[0] != signs[1]
    assert found.motion.shape == (2, _APART)
    assert all(np.array_equal(row[differ], (signs[1] > 0)[differ]) for row in _bits(found.motion[0]))


def test_the_second_hash_is_that_of_the_centre() -> None:
    inner = _SIDE - 2 * _MARGIN
    centre = np.random.default_rng(1).integers(0, 256, (1, inner, inner, 3), np.uint8)
    framed = np.pad(centre, [(0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)])
    assert signature(framed).scene[1] == signature(centre).scene[0]
    assert inner == round(0.9 * _SIDE)  # what a copy that is cropped by 10 % shows


def _pairs(one: Signature, two: Signature, limit: float = 64) -> list[tuple[float, bool]]:
    return [(pair.distance, pair.mirrored) for pair in near_pairs([one], [two], limit)[0]]


def test_the_distance_is_the_mean_of_scene_and_motion_at_the_best_alignment() -> None:
    rng = np.random.default_rng(2)
    noise = [int(value) for value in rng.integers(1, 2**63, 12)]
    far = [int(value) for value in rng.integers(1, 2**63, 2)]
    # Clip 2 begins four hashes later; its scene differs by 5 bits, one of its six hashes by 6 bits: 1 on average.
    other = noise[4:10]
    other[2] ^= 0b111111
    one = _signature([0b11111, far[0]], [noise, noise[::-1]])
    two = _signature([0, far[1]], [other, far * 3])
    assert _pairs(one, two) == [((5 + 1) / 2, False)] == _pairs(two, one)
    assert _pairs(one, two, 2.9) == []
    # An overlap of less than half of the shorter one says nothing: here two of six hashes are the same.
    three = _signature([0, far[1]], [[*noise[10:], *far, *far], far * 3])
    assert _pairs(one, three)[0][0] > 10


def test_clips_without_motion_are_compared_by_their_scenes() -> None:
    far = 0xFFFF_0000_FFFF_0000
    still, like, moves = (
        _signature([scene, far], [[motion] * 5] * 2) for scene, motion in ((0b1111, 0), (0, 0), (0, 0xFFFF))
    )
    assert _pairs(still, like) == [(4.0, False)]  # nothing moves in either
    assert _pairs(still, moves) == [((4 + 16) / 2, False)]
    short = _signature([0, 1 << 40], [[], []])
    assert near_pairs([_signature([0b111, 1 << 50], [[], []])], [short], 3.5)[0] == [Near(0, 0, 1.0, False)]


def test_other_clips_of_a_scene_are_counted() -> None:
    rng = np.random.default_rng(3)
    clips = [_signature([7, 7], rng.integers(1, 2**63, (2, 9)).tolist()) for _ in range(3)]
    found, others = near_pairs(clips, clips, NEAR)
    assert [(pair.first, pair.second, pair.distance) for pair in found] == [(0, 0, 0.0), (1, 1, 0.0), (2, 2, 0.0)]
    assert others == 6 and near_pairs(clips, clips, NEAR, rising=True) == ([], 3)
    assert near_pairs([], clips, NEAR) == ([], 0)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips of an object that moves over its own background."""
    folder = tmp_path_factory.mktemp("moving")
    list(write_motion_set(folder, 3, 2, MotionSet(96, 40, num_classes=2, difficulty=0.5)))
    return folder


def test_copies_are_near_and_strangers_are_not(moving: Path) -> None:
    names = sorted(str(path.relative_to(moving)) for path in (moving / "videos").glob("train*.mp4"))
    first = moving / names[0]
    frames = read_clip(first, lambda n: np.arange(n), all_of)
    small = frames[:, ::2, ::2]
    copies = {
        "coarse": (frames, 36), "small": (small, 30), "cropped": (frames[:, 5:-5, 5:-5], 28),
        "mirrored": (frames[:, :, ::-1], 28), "cut": (frames[6:33], 28),
    }  # fmt: skip
    for name, (pixels, quality) in copies.items():
        write_video(moving / f"{name}.mp4", np.ascontiguousarray(pixels), quality=quality)
    ours = [sign(str(moving), Clip(name)) for name in names]
    theirs = [sign(str(moving), Clip(f"{name}.mp4")) for name in copies]
    assert all(isinstance(one, Signature) for one in [*ours, *theirs])
    found, _ = near_pairs(ours, theirs, NEAR)  # type: ignore[arg-type]
    assert sorted((pair.first, pair.second, pair.mirrored) for pair in found) == [
        (0, number, name == "mirrored") for number, name in enumerate(copies)
    ]
    backwards, span = (
        sign(str(moving), clip) for clip in (Clip(names[0], is_reversed=True), Clip(names[0], Span(6, 33)))
    )
    assert isinstance(backwards, Signature) and isinstance(span, Signature)
    assert near_pairs([ours[0]], [backwards], NEAR)[0] == []  # type: ignore[list-item]
    assert near_pairs([span], [theirs[-1]], NEAR)[0]  # type: ignore[list-item]
    assert span.motion.shape[1] == -(-27 // _STEP) - _APART


def test_what_cannot_be_read_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    (tmp_path / "folder").mkdir()
    found = sign(str(tmp_path), Clip("bad.mp4"))
    assert isinstance(found, DecodeError) and found.path == "bad.mp4"
    missing = digest(str(tmp_path), "missing.mp4")
    assert isinstance(missing, DecodeError) and missing.reason == "No such file or directory"
    assert digest(str(tmp_path), "folder") == bytes(32)
    assert digest(str(tmp_path), "bad.mp4") == hashlib.sha256(b"no video").digest()
