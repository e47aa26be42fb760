"""`bench allreduce` on two real ranks; what it measures is no test, that it adds up is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from summit_train.bench.allreduce import fits_of, row_of
from summit_train.bench.command import BENCHES, finish
from summit_train.scaling.collectives import NoFit
from summit_train.scaling.machines import load_machine
from tests.worlds import ROOT, command, lines, needs_ranks, succeed

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
