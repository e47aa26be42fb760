"""`bench scaling` and `bench allreduce` on real ranks; what they measure is no test, that it adds up is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from summit_train.bench import weak
from summit_train.bench.allreduce import fits_of, row_of
from summit_train.bench.command import BENCHES, finish
from summit_train.bench.weak import measure_ranks, parse_ranks, scaling_rows
from summit_train.core.errors import RunFailed, UserError
from summit_train.scaling.collectives import NoFit
from summit_train.scaling.machines import load_machine
from tests.bench.conftest import Bench
from tests.conftest import WriteSpec
from tests.worlds import ROOT, command, lines, needs_ranks, succeed


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
        weak.run(argparse.Namespace(bench="scaling", out=None, spec="s.yaml", ranks="1,2", overrides=[]))


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RunFailed, match=r"bench step on 1 rank: exit status 1"):
        measure_ranks(["missing.yaml"], 1)


@pytest.mark.usefixtures("forked_ranks")
def test_scaling_starts_its_ranks(write_spec: WriteSpec, bench: Bench) -> None:
    words = ["scaling", str(write_spec()), "--ranks", "1,2", "--synthetic"]
    values = bench(*words, "--repeats", "1", "--steps", "1", "--warm-up", "1")
    (network,) = values["networks"]
    one, two = network["rows"]
    assert (one["ranks"], two["ranks"], network["spec"]["accumulation"]) == (1, 2, 1)
    speeds = (one["clips_per_second"]["median"], two["clips_per_second"]["median"])
    assert two["efficiency"]["median"] == pytest.approx(speeds[1] / (2 * speeds[0]))
    assert one["exposed_share"]["max"] < two["exposed_share"]["min"]
    assert network["spec"]["global_batch"] == 4 and values["settings"]["clips_per_rank"] == 2


SPEC = str(ROOT / "configs/motion/tsm.yaml")


@needs_ranks
def test_two_ranks_give_one_object() -> None:
    options = ["--seconds", "0.1", "--max-bytes", "262144", "--json"]
    output = succeed(2, "bench", "allreduce", SPEC, *options, comm="horovod")
    found = json.loads(lines(output)[-1])
    assert (found["ranks"], found["hosts"], found["ranks_per_host"]) == (2, 1, 2)
    assert found["oversubscribed"] == (found["cores"] < 2)
    sizes = [row["num_bytes"] for row in found["rows"] if row["library"] == "mpi4py"]
    assert sizes == sorted(sizes) and {4, 262_144, found["gradient_bytes"]} <= set(sizes)
    for row in found["rows"]:
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"] and row["repeats"] >= 5
        assert row["bus_bandwidth"] == pytest.approx(row["num_bytes"] / row["median_s"])  # 2(p-1)/p is 1 for 2
    assert set(found["fits"]) == {"horovod", "mpi4py"}


@needs_ranks
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement() -> None:
    options = ["--seconds", "0.1", "--max-bytes", "4096", "--write", "/dev/null/mine.yaml"]
    status, said = command(2, "bench", "allreduce", SPEC, *options)
    assert status == 2 and said.count("--write /dev/null/mine.yaml: cannot be written: Not a directory") == 1, said
    assert "bus GB/s" not in said


def measured(seconds_of: Callable[[int], float]) -> dict[str, Any]:
    """What a world would have measured whose allreduces of n bytes take seconds_of(n), by both libraries."""
    sizes = (4, 4096, 1 << 20, 1 << 24)
    rows = [row_of(2, library, size, [seconds_of(size)]) for library in ("horovod", "mpi4py") for size in sizes]
    about = {"ranks": 2, "ranks_per_host": 2, "hosts": 1, "cores": 2, "load": 0.1, "device": "cpu"}
    about |= {"oversubscribed": False, "spec": "motion_tsm", "gradient_bytes": 1 << 20}
    return about | {"rows": rows, "fits": fits_of(rows)}


def test_a_machine_is_written_that_simulate_reads(tmp_path: Path) -> None:
    machine = tmp_path / "mine.yaml"
    args = argparse.Namespace(write=str(machine), json=False)
    finish(args, BENCHES["allreduce"], measured(lambda size: 1e-4 + size / 2e9), None)
    written = load_machine(machine)
    assert (written.name, written.gpus_per_node, written.network.inter) == ("mine", 2, None)
    assert written.network.intra.bytes_per_second == pytest.approx(2e9)
    rate = ["--clips-per-second", "10", "--clips", "240", "--videos", "10", "--json"]
    simulated = json.loads(succeed(0, "simulate", SPEC, "--machine", str(machine), "--nodes", "1", *rate))
    assert simulated["rows"][0]["step_s"] >= 8 / 10


def test_times_that_do_not_grow_are_shown_and_no_machine_is_made_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Noise: the largest message took the least time.
    values, machine = measured(lambda size: 1e-3 / (1 + size)), tmp_path / "mine.yaml"
    with pytest.raises(NoFit, match="no machine can be written"):
        finish(argparse.Namespace(write=str(machine), json=False), BENCHES["allreduce"], values, None)
    shown = capsys.readouterr().out
    assert "horovod: no latency and bandwidth: the times do not grow" in shown and "16 MB" in shown
    assert not machine.exists()
