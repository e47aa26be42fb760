"""`summit-train bench` on tiny networks: what is measured fits together. How long anything takes is never asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.bench.commands.compare import PAPERS
from summit_train.bench.measure import training_multiply_adds
from summit_train.scaling.published import label_of, table_1_row
from summit_train.spec import load_spec
from summit_train.training.stopwatch import PHASES
from tests.conftest import WriteSpec
from tests.networks import counted
from tests.worlds import needs_ranks, run, succeed

SHORT = ("--repeats", "2", "--steps", "1", "--warm-up", "1")
TINY = counted("tsm", "resnet18", frames=4, crop=32, width=0.125, classes=4)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def _check_step(spec: dict[str, Any], peak: float | None) -> None:
    assert set(spec["phases_s"]) == set(PHASES)
    assert sum(spec["shares"].values()) == pytest.approx(1)
    for i, rank in enumerate(spec["repeats_s"]):
        steps = [sum(phases.values()) for phases in rank]
        assert max(steps) <= spec["step_s"]["max"] * (1 + 1e-9), f"rank {i} took longer than the slowest"
    work = spec["global_batch"] * training_multiply_adds(TINY)
    assert spec["multiply_adds_per_step"] == work
    assert spec["clips_per_second"]["max"] == pytest.approx(spec["global_batch"] / spec["step_s"]["min"])
    assert spec["multiply_adds_per_second"]["max"] == pytest.approx(work / spec["step_s"]["min"])
    if peak is None:
        assert spec["mfu"] is None
    else:
        assert spec["mfu"]["max"] == pytest.approx(work / spec["step_s"]["min"] / peak)
    # A micro-batch at a time, whatever the accumulation.
    assert spec["activation_bytes"] == pytest.approx(spec["clips_per_gpu"] * TINY.activation_bytes(), rel=0.05)


def test_step_on_real_clips_leaves_the_run_directory_alone(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = _bench(capsys, "step", str(write_spec(data={"workers": 1})), "--peak", "1e9", *SHORT)
    (spec,) = values["specs"]
    _check_step(spec, 1e9)
    assert (spec["ranks"], spec["accumulation"], spec["global_batch"]) == (1, 4, 8)
    assert not spec["synthetic"] and spec["workers"] == 1 and spec["phases_s"]["data_wait"]["min"] > 0
    assert values["peaks"][0]["shape"] is None and values["ratios"] is None
    assert values["peak_memory_bytes"] > spec["activation_bytes"]
    assert values["environment"]["torch"] and not (tmp_path / "runs").exists()


def test_step_compares_two_specs_in_turn(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    tsm, tsn = write_spec("one"), write_spec("other", model={"arch": "tsn"})
    words = ["step", str(tsm), "--compare", str(tsn), "--synthetic", "--peak", "0", *SHORT]
    values = _bench(capsys, *words)
    for spec in values["specs"]:
        _check_step(spec, None)
        assert spec["synthetic"] and spec["phases_s"]["data_wait"]["max"] < spec["step_s"]["min"]
    first, second = ([sum(phases.values()) for phases in spec["repeats_s"][0]] for spec in values["specs"])
    assert values["ratios"]["step"]["max"] == pytest.approx(max(a / b for a, b in zip(first, second, strict=True)))
    assert main(["bench", *words]) == 0
    text = capsys.readouterr().out
    assert "RANDOM CLIPS" in text and "one over other, median (min .. max) of 2 pairs" in text


def test_the_peak_is_measured_in_the_same_run(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    values = _bench(capsys, "step", str(write_spec(precision="bf16")), "--synthetic", *SHORT)
    (peak,) = values["peaks"]
    assert peak["precision"] == "bf16" and len(peak["tried"]) > 1 and len(peak["shape"]) == 3
    best = max(peak["tried"], key=lambda product: product["multiply_adds_per_second"])
    assert (peak["shape"], peak["multiply_adds_per_second"]) == (best["shape"], best["multiply_adds_per_second"])
    assert values["specs"][0]["mfu"]["max"] < 1


def test_step_on_two_ranks(write_spec: WriteSpec) -> None:
    output = succeed(2, "bench", "step", str(write_spec()), "--peak", "1e9", "--json", *SHORT)
    values = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    (spec,) = values["specs"]
    _check_step(spec, 2e9)  # of both ranks
    assert (spec["ranks"], spec["accumulation"], len(spec["repeats_s"])) == (2, 2, 2)
    assert spec["phases_s"]["allreduce"]["min"] > 0


@needs_ranks
def test_scaling_starts_its_ranks(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "scaling.svg"
    words = ["scaling", str(write_spec()), "--ranks", "1,2", "--synthetic", "--out", str(out)]
    values = _bench(capsys, *words, "--repeats", "1", "--steps", "1", "--warm-up", "1")
    (network,) = values["networks"]
    one, two = network["rows"]
    assert (one["ranks"], two["ranks"], network["spec"]["accumulation"]) == (1, 2, 1)
    speeds = (one["clips_per_second"]["median"], two["clips_per_second"]["median"])
    assert two["efficiency"]["median"] == pytest.approx(speeds[1] / (2 * speeds[0]))
    assert one["exposed_share"]["max"] < two["exposed_share"]["min"]
    assert network["spec"]["global_batch"] == 4 and values["settings"]["clips_per_rank"] == 2
    assert json.loads(out.with_suffix(".json").read_text()) == values and b"scalability" in out.read_bytes()


def test_table_1_of_other_networks(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    specs = [str(write_spec("one")), str(write_spec("other", model={"arch": "tsn"}))]
    out = tmp_path / "table1.png"
    values = _bench(capsys, "table1", "--specs", *specs, "--batch", "3", "--peak", "1e9", "--out", str(out), *SHORT)
    for row in values["rows"]:
        assert (row["parameters"], row["multiply_adds"]) == (TINY.parameters, TINY.multiply_adds)
        assert row["published"] is None and row["input_bytes"] == 4 * 3 * 32**2
        assert row["clips_per_second"]["max"] == pytest.approx(3 / row["pass_s"]["min"])
        assert row["utilisation"]["max"] == pytest.approx(3 * TINY.multiply_adds / row["pass_s"]["min"] / 1e9)
    assert values["rows"][1]["relative_throughput"] == {"min": 1, "median": 1, "max": 1}
    assert out.read_bytes().startswith(b"\x89PNG") and json.loads((tmp_path / "table1.json").read_text()) == values


def test_the_papers_values_stand_beside_the_papers_networks_alone() -> None:
    paths = [f"configs/kinetics/{name}.yaml" for name in PAPERS]
    published = [table_1_row(load_spec(path)) for path in paths]
    assert [row and row["clips_per_second"] for row in published] == [63.1, 41.9, 84.8]
    for other in ("data.crop=112", "model.non_local=tsm"):
        assert table_1_row(load_spec(paths[2], [other])) is None
    assert label_of(load_spec(paths[2])) == "TSM, 8 frames"


@pytest.mark.parametrize("measured", [True, False])
def test_figure_3b_takes_the_wait_from_the_step_or_from_a_rate(
    measured: bool, write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    specs = [str(write_spec("one")), str(write_spec("other", model={"arch": "tsn"}))]
    words = ["fig3", "b", "--specs", *specs, "--batch", "2", "--out", str(tmp_path / "b.svg"), *SHORT]
    values = _bench(capsys, *words, *([] if measured else ["--frames-per-second", "1"]))
    for row, spec in zip(values["rows"], values["steps"], strict=True):
        assert row["step_s"] == pytest.approx(row["busy_s"] + row["data_wait_s"])
        assert (row["clips_per_step"], row["frames_per_step"]) == (2, 8)
        if measured:
            assert row["data_wait_s"] == spec["phases_s"]["data_wait"]["median"] > 0
        else:
            assert row["step_s"] == pytest.approx(8)  # 8 frames at one a second
    assert values["projection"] is not measured and ("PROJECTION" in values["source"]) is not measured
    assert b"wait for data" in (tmp_path / "b.svg").read_bytes()


def test_what_cannot_be_measured_is_the_users_mistake(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(data={"train": "missing.csv"}))
    for words, said in (
        (["step", spec], "data.train: there is no missing.csv"),
        (["step", spec, "--synthetic", "--steps", "0"], "--steps 0: a number above 0"),
        (["step", spec, "--synthetic", "--peak", "nan"], "--peak nan"),
        (["scaling", spec], "data.train: there is no missing.csv"),
        (["scaling", spec, "--synthetic", "--ranks", "2"], "two numbers at least"),
        (["table1", "--specs", spec, "--out", "table.txt"], "--out table.txt"),
        (["table1", "--specs", spec, "--batch", "0"], "--batch 0"),
        (["fig3", "b", "--specs", spec, "--frames-per-second", "-1"], "--frames-per-second -1"),
    ):
        assert main(["bench", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_shift_bench_measures_networks_that_agree() -> None:
    words = ["--backbone", "resnet18", "--width", "0.25", "--batch", "1", "--frames", "4", "--size", "32"]
    status, output = run(0, "bench/shift.py", *words, "--repeats", "1", "--precision", "fp32", "bf16", "--json")
    assert status == 0, output
    values = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for result in values["results"].values():
        assert result["logits_differ"] < 1e-5
        for part in ("forward", "step"):
            seconds = {name: times["median"] for name, times in result[part]["seconds"].items()}
            assert set(seconds) == {"2d", "2d plain", "tsm", "tsm +norms", "tsm +shift", "tsm plain", "official"}
            for pair, ratio in result[part]["ratios"].items():
                above, below = pair.split(" / ")
                assert ratio["median"] == pytest.approx(seconds[above] / seconds[below])
