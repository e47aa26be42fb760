"""Keyed randomness: the same on every machine, different for every key, independent of the order of draws."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest

from summit_train.core import rng


def test_the_stream_is_the_published_one() -> None:
    # Worked out with hashlib alone: a change of the message or the cipher would change every run's data order.
    message = struct.pack("<qI", 7, 5) + b"order" + struct.pack("<I", 2) + struct.pack("<qq", 3, -1)
    digest = hashlib.blake2b(message, digest_size=8, person=b"summit_train").digest()
    assert rng.seed_of(7, "order", 3, -1) == int.from_bytes(digest, "little") // 2
    digest = hashlib.blake2b(message, digest_size=16, person=b"summit_train").digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    assert rng.key(7, "order", 3, -1).bit_generator.random_raw(5).tolist() == philox.random_raw(5).tolist()


def test_values_never_change() -> None:
    assert rng.seed_of(0, "order", 1) == 6273997970845542516
    drawn = rng.key(0, "order", 1).bit_generator.random_raw(2).tolist()
    assert drawn == [1807430458073846506, 4667362220459935954]


def test_no_two_keys_share_a_message() -> None:
    # Zero bytes everywhere, so that only the lengths in the message can tell where purpose and counters end.
    purposes = ["a" * letters + "\0" * zeros for letters in (0, 1) for zeros in range(20)]
    counters = [numbers for length in range(4) for numbers in itertools.product((0, 1), repeat=length)]
    keys = list(itertools.product((0, 1, 97), purposes, counters))
    assert len({rng.seed_of(seed, purpose, *numbers) for seed, purpose, numbers in keys}) == len(keys) == 1800


def test_draws_of_neighbouring_keys_are_uniform_and_uncorrelated() -> None:
    draws = np.array([[rng.key(0, "sampling", epoch, clip).random() for clip in range(100)] for epoch in range(40)])
    # 4,000 uniform numbers: the mean's deviation is 0.0046, that of a correlation of 3,960 pairs 0.016.
    assert abs(draws.mean() - 0.5) < 0.023
    for one, other in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.08


def test_a_counter_beyond_64_bits_is_refused_and_never_cut_off() -> None:
    with pytest.raises(struct.error):
        rng.seed_of(0, "order", 2**63)
