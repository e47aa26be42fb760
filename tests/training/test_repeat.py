"""Equal runs on the same ranks end in equal bits, on 3 and 6 ranks too, where the order of a sum shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state
from tests.worlds import PATIENCE_S, needs_ranks, train_each

pytestmark = needs_ranks


@contextmanager
def _other_work() -> Iterator[None]:
    """Keep a core busy within the block."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("ranks", "epochs", "backend"), [(3, 2, "horovod"), (3, 2, "torch"), (6, 1, "horovod"), (6, 1, "torch")]
)
def test_equal_runs_end_in_equal_bits(
    write_spec: WriteSpec,
    eight_videos: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    epochs: int,
    backend: str,
) -> None:
    """Of 11 MB of gradients: one bucket, and one of 1 MB at the end.

    On 3 ranks of Horovod the second run has other work beside it and looks for what is ready at other moments.
    """
    specs = [
        write_spec(
            name,
            model={"width": 0.5},
            data=eight_videos | {"num_frames": 2},
            scale={"gpus": ranks, "clips_per_gpu": 1},
            schedule={"epochs": epochs},
        )
        for name in ("first", "second")
    ]
    if (ranks, backend) != (3, "horovod"):
        train_each(ranks, specs, backend)
    else:
        train_each(ranks, specs[:1], backend)
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", "7")
        with _other_work():
            train_each(ranks, specs[1:], backend)
    first, second = (final_state(tmp_path / "runs" / name) for name in ("first", "second"))
    assert str(first["backend"]).startswith(backend)
    assert_bit_equal(first, second)
