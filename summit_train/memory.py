"""What the process does with memory that it has used."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# Of a process that reads clips: blocks up to this size are kept, and so much of them together.
_KEPT_BLOCK, _KEPT = 32 << 20, 128 << 20


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep large blocks for the next use; False where there is no glibc.

    By itself it gives every block of 32 MiB and more back to the system and takes a new one for the next activation of
    that size, page by page, each zeroed by the kernel. On a CPU that costs more than what is then done in the block:
    copying 51 MB took three times as long. Nor is the heap's end given back (-1: never), which cost up to 0.3 s a step
    where two networks of four clips took turns. Only for processes that train on a CPU; a run's high-water mark stays
    what it was, the memory is just not given back between two steps.
    """
    return _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def keep_freed_frames() -> bool:
    """Let malloc keep 128 MiB of freed blocks for the next clip, none larger than 32 MiB; False without glibc.

    For processes that read clips: a clip's frames are a few MB, taken and freed again and again. Kept, a clip from
    packed JPEGs takes a fifth less.
    """
    return _mallopt({_M_MMAP_THRESHOLD: _KEPT_BLOCK, _M_TRIM_THRESHOLD: _KEPT})


def _mallopt(options: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(option, value) for option, value in options.items())
