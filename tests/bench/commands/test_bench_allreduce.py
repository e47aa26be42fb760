"""`summit-train bench allreduce` on two real ranks; what it measures is no test, that it adds up is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.bench.allreduce import Sample, Setting
from summit_train.bench.commands.allreduce import report
from summit_train.scaling.machines import load_machine
from summit_train.scaling.network import NoFit
from tests.worlds import lines, needs_ranks, succeed

ROOT = Path(__file__).resolve().parents[3]
SPEC = str(ROOT / "configs/motion/tsm.yaml")
SETTING = Setting(2, 2, 2, 0.1, "cpu", "motion_tsm", 1 << 20)


@needs_ranks
def test_two_ranks_give_one_object_and_a_figure(tmp_path: Path) -> None:
    figure = tmp_path / "mine.png"
    options = ["--seconds", "0.1", "--max-bytes", "262144", "--out", str(figure), "--json"]
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
    assert figure.read_bytes().startswith(b"\x89PNG")


def measured(seconds_of: Callable[[int], float]) -> list[Sample]:
    """What a world would have measured whose allreduces of n bytes take seconds_of(n), by both libraries."""
    return [
        Sample(library, size, 5, seconds_of(size), seconds_of(size), seconds_of(size))
        for library in ("horovod", "mpi4py")
        for size in (4, 4096, 1 << 20, 1 << 24)
    ]


def test_a_machine_is_written_that_simulate_reads(tmp_path: Path) -> None:
    machine = tmp_path / "mine.yaml"
    args = argparse.Namespace(write=str(machine), json=False)
    report(args, SETTING, measured(lambda size: 1e-4 + size / 2e9), None)
    written = load_machine(machine)
    assert (written.name, written.gpus_per_node, written.network.inter) == ("mine", 2, None)
    assert written.network.intra.bytes_per_second == pytest.approx(2e9)
    rate = ["--clips-per-second", "10", "--clips", "240", "--videos", "10", "--json"]
    simulated = json.loads(succeed(0, "simulate", SPEC, "--site", str(machine), "--nodes", "1", *rate))
    assert simulated["rows"][0]["step_s"] >= 8 / 10


def test_times_that_do_not_grow_are_shown_and_no_machine_is_made_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Noise: the largest message took the least time.
    samples = measured(lambda size: 1e-3 / (1 + size))
    machine, figure = tmp_path / "mine.yaml", tmp_path / "mine.png"
    args = argparse.Namespace(write=str(machine), json=False)
    with pytest.raises(NoFit, match="no machine can be written"):
        report(args, SETTING, samples, figure)
    shown = capsys.readouterr().out
    assert "horovod: no latency and bandwidth: the times do not grow" in shown and "16 MB" in shown
    assert figure.read_bytes().startswith(b"\x89PNG") and not machine.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one rank has nobody to talk to"),
        (["--seconds", "0"], "above 0"),
        (["--write", "mine.txt"], "ends in .yaml"),
        (["--out", "mine.jpg"], "ends in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "allreduce", SPEC, *options]) == 2
    assert message in capsys.readouterr().err
