from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.bench import weak
from summit_train.bench.weak import measure_ranks, parse_ranks, scaling_rows
from summit_train.core.errors import RunFailed, UserError
from tests.bench.conftest import Bench
from tests.conftest import WriteSpec
from tests.worlds import forked


def _spec(clips_per_second: float, allreduce_s: float, compute_s: float) -> dict[str, Any]:
    def one(value: float) -> dict[str, float]:
        return {"min": value, "median": value, "max": value}

    phases = {"forward": one(compute_s / 3), "backward": one(2 * compute_s / 3), "allreduce": one(allreduce_s)}
    step_s = compute_s + allreduce_s
    spec = {"clips_per_second": one(clips_per_second), "step_s": one(step_s), "phases_s": phases}
    return spec | {"shares": {"allreduce": allreduce_s / step_s}}


def test_efficiency_is_of_ideal_in_the_same_round() -> None:
    # The machine was half as fast in the second round; the efficiency was the same.
    found = {1: [_spec(10, 0, 1), _spec(5, 0, 2)], 2: [_spec(16, 0.25, 1), _spec(8, 0.5, 2)]}
    one, two = scaling_rows(found)
    assert (one["ranks"], one["efficiency"]["min"], one["compute_ratio"]["median"]) == (1, 1.0, 1.0)
    assert two["efficiency"] == {"min": 0.8, "median": 0.8, "max": 0.8}
    assert two["exposed_share"]["median"] == pytest.approx(0.2)
    assert two["exposed_allreduce_s"] == {"min": 0.25, "median": 0.375, "max": 0.5}
    assert two["compute_ratio"]["max"] == pytest.approx(1.0)


def test_without_one_rank_the_smallest_number_is_the_base() -> None:
    two, four = scaling_rows({4: [_spec(30, 0, 1)], 2: [_spec(20, 0, 1)]})
    assert (two["ranks"], two["efficiency"]["median"], four["efficiency"]["median"]) == (2, 1.0, 0.75)


@pytest.mark.parametrize("text", ["1", "", "1,x", "0,1", "1;2"])
def test_ranks_are_numbers_and_two_at_least(text: str) -> None:
    assert parse_ranks("2,1,2") == [1, 2]
    with pytest.raises(UserError, match="--ranks must be two or more numbers above 0"):
        parse_ranks(text)


def test_without_mpirun_it_says_what_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weak, "find_mpirun", lambda: None)
    with pytest.raises(UserError, match=r"^no mpirun .*, or run `summit-train build-horovod`$"):
        weak.run(argparse.Namespace(bench="scaling", spec="s.yaml", ranks="1,2", overrides=[]))


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RunFailed, match=r"bench step on 1 rank: exit status 1"):
        measure_ranks(["missing.yaml"], 1)


def test_scaling_starts_its_ranks(
    write_spec: WriteSpec, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mpirun, in whose place the test forks them, as importing torch takes longer than the steps."""

    def answer(command: list[str], timeout: float, environment: dict[str, str]) -> Any:
        ranks = int(command[command.index("-np") + 1]) if "-np" in command else 0
        status, output = forked(ranks, partial(main, command[command.index("summit_train") + 1 :]))
        assert status == 0 and environment["OMP_NUM_THREADS"] == "1", output
        return json.loads(next(line for line in output.splitlines() if line.startswith("{")))

    monkeypatch.setattr(weak, "answer", answer)
    out = tmp_path / "scaling.svg"
    words = ["scaling", str(write_spec()), "--ranks", "1,2", "--synthetic", "--out", str(out)]
    values = bench(*words, "--repeats", "1", "--steps", "1", "--warm-up", "1")
    (network,) = values["networks"]
    one, two = network["rows"]
    assert (one["ranks"], two["ranks"], network["spec"]["accumulation"]) == (1, 2, 1)
    speeds = (one["clips_per_second"]["median"], two["clips_per_second"]["median"])
    assert two["efficiency"]["median"] == pytest.approx(speeds[1] / (2 * speeds[0]))
    assert one["exposed_share"]["max"] < two["exposed_share"]["min"]
    assert network["spec"]["global_batch"] == 4 and values["settings"]["clips_per_rank"] == 2
    assert json.loads(out.with_suffix(".json").read_text()) == values and b"scalability" in out.read_bytes()
