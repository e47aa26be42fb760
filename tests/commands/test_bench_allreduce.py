"""`summit-train bench allreduce` on two real ranks; what it measures is no test, that it adds up is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.scaling.machines import load_machine
from tests.worlds import lines, needs_ranks, succeed

ROOT = Path(__file__).resolve().parents[2]
SPEC = str(ROOT / "configs/motion/tsm.yaml")


@needs_ranks
def test_two_ranks_give_one_object_a_machine_and_a_figure(tmp_path: Path) -> None:
    machine, figure = tmp_path / "mine.yaml", tmp_path / "mine.png"
    options = ["--seconds", "0.1", "--max-bytes", "262144", "--write", str(machine), "--out", str(figure), "--json"]
    output = succeed(2, "bench", "allreduce", SPEC, *options)
    found = json.loads(lines(output)[-1])
    assert (found["ranks"], found["hosts"], found["ranks_per_host"]) == (2, 1, 2)
    assert found["oversubscribed"] == (found["cores"] < 2)
    sizes = [row["num_bytes"] for row in found["rows"] if row["library"] == "mpi4py"]
    assert sizes == sorted(sizes) and {4, 262_144, found["gradient_bytes"]} <= set(sizes)
    for row in found["rows"]:
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"] and row["repeats"] >= 5
        assert row["bus_bandwidth"] == pytest.approx(row["num_bytes"] / row["median_s"])  # 2(p-1)/p is 1 for 2
    assert figure.read_bytes().startswith(b"\x89PNG")
    written = load_machine(machine)
    assert (written.name, written.gpus_per_node, written.network.inter) == ("mine", 2, None)
    fitted = found["fits"]["horovod"]["bytes_per_second"]
    assert written.network.intra.bytes_per_second == pytest.approx(fitted)
    rate = ["--clips-per-second", "10", "--clips", "240", "--videos", "10", "--json"]
    simulated = json.loads(succeed(0, "simulate", SPEC, "--site", str(machine), "--nodes", "1", *rate))
    assert simulated["rows"][0]["step_s"] >= 8 / 10


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
