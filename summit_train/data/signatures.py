"""Perceptual hashes of clips, and the pairs of clips of two lists that are copies of each other.

A clip has a hash of its scene, the mean of its frames, and hashes of its motion, the differences of frames that lie
_STEP * _APART frames apart, every _STEP frames. A hash has a bit for each of the 64 lowest frequencies of the DCT of a
small grey picture, except the mean: whether its coefficient is positive. A mirrored picture has the opposite bits for
the odd frequencies across. Motion distinguishes clips with the same scene, as of a studio or a fixed camera.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import file_sha256
from summit_train.data.loading import show_open
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.augment import View
from summit_train.data.video.clips import Frames, Numbers, SpanClip, VideoClip, open_folder
from summit_train.data.video.source import NO_HURRY, DecodeError, load_video

NEAR = 7.0  # bits; chosen by the table in docs/tested.md
_SIDE = 40  # pixels of the small picture
_MARGIN = 2  # pixels left out at each side in the second of two hashes, which a copy cropped by 10 % resembles
_STEP, _APART = 2, 4
_MOST_FRAMES = 1024  # of a longer clip the first ones are hashed
_STILL = 1.0  # of 255: differences with a smaller root mean square are noise, and their hash is 0
_BLOCK = 1 << 22  # pairs compared at once
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
# (across, down) of each bit, the lowest sums first.
_FREQUENCIES = np.array(sorted(product(range(11), repeat=2), key=lambda pair: (sum(pair), pair))[1:65])

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Signature:
    """The hashes of a clip: of the whole picture, and of its centre. scene: (2,). motion: (2, K), K may be 0."""

    scene: Hashes
    motion: Hashes


@dataclass(frozen=True)
class Near:
    """Two clips, by their places in their lists. distance: of 64 bits. mirrored: one is the other's mirror image."""

    first: int
    second: int
    distance: float
    mirrored: bool


def digest(root: str, path: str) -> bytes | DecodeError:
    """Return the SHA-256 of a file, zeros for a folder of pictures, or why the file cannot be read."""
    file = os.path.join(root, path)
    try:
        return bytes(32) if os.path.isdir(file) else bytes.fromhex(file_sha256(file))
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))


def sign(root: str, clip: Clip) -> Signature | DecodeError:
    """Decode a clip and hash it, or return why it cannot be read."""
    path = os.path.join(root, clip.path)
    try:
        is_folder = os.path.isdir(path)
        video = open_folder(path, None, NO_HURRY) if is_folder else VideoClip(load_video(path, None), limits=NO_HURRY)
        with SpanClip(video, clip.span, path) as opened:
            frames = show_open(opened, _sample, _crop).pixels[0]
    except DecodeError as error:
        return DecodeError(clip.path, error.reason, clip.span)
    return signature(frames[::-1] if clip.is_reversed else frames)


def _sample(num_frames: int) -> Numbers:
    return np.arange(0, min(num_frames, _MOST_FRAMES), _STEP)[None]


def _crop(width: int, height: int) -> list[View]:
    return [View(_SIDE, _SIDE, 0, 0, _SIDE, _SIDE)]


def signature(frames: Frames) -> Signature:
    """Hash RGB frames (T, _SIDE, _SIDE, 3), _STEP frames of the clip apart."""
    grey = frames.astype(np.float32) @ _LUMA
    centre = grey[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN]
    scene = [_hashes(one.mean(0, keepdims=True)) for one in (grey, centre)]
    motion = [one[_APART:] - one[:-_APART] for one in (grey, centre)]
    moves = (motion[0] ** 2).mean((1, 2)) >= _STILL**2
    return Signature(np.concatenate(scene), np.stack([np.where(moves, _hashes(one), 0) for one in motion]))


def _hashes(pictures: NDArray[np.float32]) -> Hashes:
    """Return the hash of each square picture (K, side, side)."""
    across, down = _FREQUENCIES.T
    places = (np.arange(pictures.shape[-1]) + 0.5) * np.pi / pictures.shape[-1]
    waves = np.cos(np.outer(np.arange(_FREQUENCIES.max() + 1), places)).astype(np.float32)
    bits = (waves @ pictures @ waves.T)[:, down, across] > 0
    return np.packbits(bits.reshape(-1)).view(np.uint64)


def near_pairs(
    first: Sequence[Signature], second: Sequence[Signature], limit: float, *, rising: bool = False
) -> tuple[list[Near], int]:
    """Return the pairs at a distance of up to `limit`, nearest first, and the number of others of one scene.

    The distance is the mean of two numbers of differing bits: those of the scenes' hashes, and the mean over the frames
    of the motions', at the alignment in time with the least of it. Whole pictures are compared, and the centre of each
    with the whole of the other. Others of one scene: the scenes differ by up to `limit`, and the motion by more.
    rising: only pairs whose first number is below the second, for pairs within one list.
    """
    found, others = dict[tuple[int, int], tuple[float, bool]](), 0
    if not first or not second:
        return [], 0
    ours, theirs = (np.stack([one.scene for one in side]) for side in (first, second))
    rows = max(1, _BLOCK // len(theirs))
    for mirrored, (a, b) in product((True, False), ((0, 1), (1, 0), (0, 0))):
        turned = _mirrored(theirs[:, b]) if mirrored else theirs[:, b]
        for start in range(0, len(ours), rows):
            bits = np.bitwise_count(ours[start : start + rows, None, a] ^ turned)
            # The motion's part is 0 or more, so no pair within the limit is left out.
            near, places = np.nonzero(np.triu(bits <= 2 * limit, start + 1 if rising else -rows))
            for chunk in np.array_split(np.arange(len(near)), -(-len(near) // 4096)) if len(near) else ():
                pairs = list(zip((near[chunk] + start).tolist(), places[chunk].tolist(), strict=True))
                scene = bits[near[chunk], places[chunk]].astype(np.float64)
                moves = [(first[i].motion[a], second[j].motion[b]) for i, j in pairs]
                motion = _motion_distances([(one, _mirrored(two) if mirrored else two) for one, two in moves])
                distances = (scene + np.where(np.isnan(motion), scene, motion)) / 2
                for pair, distance, of_scene in zip(pairs, distances.tolist(), scene.tolist(), strict=True):
                    if distance <= min(limit, found.get(pair, (limit, False))[0]):
                        found[pair] = (distance, mirrored)
                    # Whole pictures, not mirrored, come last: by now all else is found.
                    elif not (mirrored or a or b or pair in found) and of_scene <= limit:
                        others += 1
    ordered = sorted((distance, pair, mirrored) for pair, (distance, mirrored) in found.items())
    return [Near(*pair, distance, mirrored) for distance, pair, mirrored in ordered], others


def _mirrored(hashes: Hashes) -> Hashes:
    odd = np.packbits(_FREQUENCIES[:, 0] % 2 == 1).view(np.uint64)[0]
    return np.where(hashes != 0, hashes ^ odd, hashes)


def _motion_distances(pairs: Sequence[tuple[Hashes, Hashes]]) -> NDArray[np.float64]:
    """Return for each pair of sequences the least mean number of differing bits over all alignments.

    An alignment overlaps half of the shorter sequence, and three hashes where there are three. NaN: one is empty, or
    nothing moves in either.
    """
    (one, ours), (two, theirs) = (_padded([pair[side] for pair in pairs]) for side in (0, 1))
    shorter = np.minimum(ours, theirs)
    least = np.clip(shorter, 1, np.maximum(3, (shorter + 1) // 2))
    best = np.full(len(pairs), np.inf)
    for offset in range(1 - one.shape[1], two.shape[1]):
        start, stop = max(0, -offset), min(one.shape[1], two.shape[1] - offset)
        overlap = np.minimum(ours, theirs - offset) - start
        bits = np.bitwise_count(one[:, start:stop] ^ two[:, start + offset : stop + offset])
        total = np.where(np.arange(stop - start) < overlap[:, None], bits, 0).sum(1)
        best = np.where(overlap >= least, np.minimum(best, total / np.maximum(1, overlap)), best)
    return np.where((shorter > 0) & (one.any(1) | two.any(1)), best, np.nan)


def _padded(rows: Sequence[Hashes]) -> tuple[Hashes, NDArray[np.int64]]:
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), np.uint64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded, lengths
