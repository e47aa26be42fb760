"""How many gradients share a message. The cost model uses it too, without torch."""

from __future__ import annotations

from collections.abc import Sequence

# A larger message uses a network better. The last one is small, as it starts when the backward pass has ended: all of
# it is waited for.
BUCKET_BYTES = 25 * 2**20
LAST_BUCKET_BYTES = 2**20


def bucket_counts(sizes: Sequence[int]) -> list[int]:
    """Return the number of gradients in each bucket. sizes: of the gradients in bytes, in their order.

    A bucket has at most BUCKET_BYTES, the last one LAST_BUCKET_BYTES, or one larger gradient.
    """
    counts = list[int]()
    filled = 0
    for size in reversed(sizes):
        bound = LAST_BUCKET_BYTES if len(counts) <= 1 else BUCKET_BYTES
        if not counts or filled + size > bound:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts[::-1]
