"""Keyed randomness: a random draw is a function of what it is for, never of when or where it is made.

`key(seed, "augment", epoch, clip)` gives the same generator on every rank, in every worker, and in a run that was
resumed: the counters name the thing that is drawn for, so no generator state has to be saved.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np


def _digest(seed: int, purpose: str, counters: tuple[int, ...], num_bytes: int) -> bytes:
    """Hash the key's parts. Lengths are part of the message, so no two keys share a message."""
    name = purpose.encode()
    message = struct.pack(f"<qI{len(name)}sI{len(counters)}q", seed, len(name), name, len(counters), *counters)
    return hashlib.blake2b(message, digest_size=num_bytes, person=b"summit_train").digest()


def seed_of(seed: int, purpose: str, *counters: int) -> int:
    """Return a 63-bit seed for a generator that takes an integer, such as `torch.Generator.manual_seed`."""
    return int.from_bytes(_digest(seed, purpose, counters, 8), "little") >> 1


def key(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return a generator for one purpose: Philox, a counter-based cipher, keyed by 128 bits of the hash.

    `purpose` separates the uses of one seed ("order", "sampling", "augment", ...). `counters` identify the draw within
    it (epoch, step, clip, virtual GPU), each within 64 bits.
    """
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(seed, purpose, counters, 16), "little")))
