"""`bench step` and `loader` on tiny networks: what is measured fits together.

How long anything takes is never asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.__main__ import main
from summit_train.bench.loader import PARTS, verdict
from summit_train.bench.measure import Turns, training_multiply_adds
from summit_train.bench.steps import (
    StepBench,
    as_text,
    experiment_of,
    mean_phases,
    step_ratios,
    step_seconds,
    step_values,
)
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.models import build_model
from summit_train.models.fast import accelerate
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.training.timer import PHASES
from tests.bench.conftest import SHORT, TINY, Bench
from tests.conftest import WriteSpec
from tests.held import held_bytes
from tests.networks import counted
from tests.worlds import succeed


def _phases(wait: float, forward: float, backward: float, allreduce: float = 0.0) -> dict[str, float]:
    return {"data_wait": wait, "forward": forward, "backward": backward, "allreduce": allreduce}


def test_a_step_is_as_long_as_on_the_slowest_rank_and_its_parts_sum_to_1(write_spec: WriteSpec) -> None:
    # A loader that gives two batches at once: every second step waits, and half of the wait is each one's.
    assert mean_phases([_phases(3.0, 1.0, 2.0), _phases(0.0, 1.0, 2.0)]) == _phases(1.5, 1.0, 2.0)
    fast = (_phases(0.0, 1.0, 2.0, 1.0), _phases(0.0, 1.0, 2.0, 2.0))
    slow = (_phases(0.5, 1.5, 2.0, 0.0), _phases(1.0, 2.0, 2.0, 0.0))
    found = step_seconds((fast, slow))
    assert (found["step"], found["forward"], found["allreduce"]) == ([4.0, 5.0], [1.25, 1.5], [0.5, 1.0])
    shares = step_values((fast, slow), make_plan(load_spec(write_spec()), 2, 80), 1, None)["shares"]
    assert sum(shares.values()) == pytest.approx(1) and shares["backward"] == pytest.approx(4 / 9)


def test_ratios_are_of_the_step_and_of_phases_that_matter(write_spec: WriteSpec) -> None:
    plan = make_plan(load_spec(write_spec()), 1, 80)
    one = step_values([(_phases(0.001, 2.0, 4.0), _phases(0.0, 4.0, 8.0))], plan, 1, None)
    other = step_values([(_phases(0.0, 1.0, 4.0), _phases(0.0, 2.0, 4.0))], plan, 1, None)
    ratios = step_ratios(one, other)
    assert set(ratios) == {"step", "forward", "backward"}
    assert ratios["forward"] == {"min": 2.0, "median": 2.0, "max": 2.0}
    assert ratios["backward"] == {"min": 1.0, "median": 1.5, "max": 2.0}


def test_utilisation_is_work_over_seconds_over_peak(write_spec: WriteSpec) -> None:
    plan = make_plan(load_spec(write_spec()), 2, 80)
    ranks = [[_phases(1.0, 1.0, 2.0)]] * 2
    values = step_values(ranks, plan, 5 * plan.network.multiply_adds, peak=1e9)
    assert values["multiply_adds_per_step"] == 8 * 5 * plan.network.multiply_adds
    assert values["clips_per_second"]["median"] == 8 / 4
    assert values["mfu"]["median"] == pytest.approx(8 * 5 * plan.network.multiply_adds / 4 / 1e9)
    assert step_values(ranks, plan, 1, None)["mfu"] is None


@pytest.mark.parametrize("arch", ["tsm", "tsn"])
def test_a_network_holds_what_the_plan_says(arch: str) -> None:
    model = build_model(arch, "resnet18", 4, 5, width=0.5)
    accelerate(model)
    clips = torch.randn(2, 4, 64, 64, 3).permute(0, 1, 4, 2, 3)
    with held_bytes(model.parameters()) as held:
        model(clips).sum().backward()
    planned = 2 * counted(arch, "resnet18", frames=4, crop=64, width=0.5, classes=5).activation_bytes()
    assert max(held) == pytest.approx(planned, rel=0.01)  # besides, the norms' statistics per channel


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


def test_step_on_real_clips_leaves_the_run_directory_alone(write_spec: WriteSpec, bench: Bench, tmp_path: Path) -> None:
    values = bench("step", str(write_spec(data={"workers": 1})), "--peak", "1e9", *SHORT)
    (spec,) = values["specs"]
    _check_step(spec, 1e9)
    assert (values["bench"], spec["ranks"], spec["accumulation"], spec["global_batch"]) == ("step", 1, 4, 8)
    assert not spec["synthetic"] and spec["workers"] == 1 and spec["phases_s"]["data_wait"]["min"] > 0
    assert values["peaks"][0]["shape"] is None and values["ratios"] is None
    assert values["peak_memory_bytes"] > 2**26
    assert values["environment"]["torch"] and not (tmp_path / "runs").exists()


def test_step_compares_two_specs_in_turn(write_spec: WriteSpec, bench: Bench) -> None:
    tsm, tsn = write_spec("one"), write_spec("other", model={"arch": "tsn"})
    values = bench("step", str(tsm), "--compare", str(tsn), "--synthetic", "--peak", "0", *SHORT)
    for spec in values["specs"]:
        _check_step(spec, None)
        assert spec["synthetic"] and spec["phases_s"]["data_wait"]["max"] < spec["step_s"]["min"]
    first, second = ([sum(phases.values()) for phases in spec["repeats_s"][0]] for spec in values["specs"])
    assert values["ratios"]["step"]["max"] == pytest.approx(max(a / b for a, b in zip(first, second, strict=True)))
    text = as_text(values)
    assert "RANDOM CLIPS" in text and "one over other, median (min .. max) of 2 pairs" in text


class _Votes(World):
    """A rank that keeps the names of the votes which have begun and were not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = list[str]()

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        if not name.startswith("votes"):
            return lambda: None
        assert name not in self.unread
        self.unread.append(name)
        return partial(self.unread.remove, name)


def test_a_bench_reads_its_last_vote_before_another_ones_turn(write_spec: WriteSpec) -> None:
    experiment = experiment_of(load_spec(write_spec()), 1, synthetic=True)
    world = _Votes()
    turns = Turns(repeats=1, steps=2, warm_up=1)
    with Watchdog(world, None) as watchdog:
        bench = StepBench(experiment, world, torch.device("cpu"), watchdog)
        bench.turn(turns, alone=False)
        assert world.unread == []
        bench.turn(turns, alone=True)
        assert len(world.unread) == 1
        bench.close()
    assert world.unread == []


def test_step_on_three_ranks_one_of_which_has_two_virtual_gpus(write_spec: WriteSpec) -> None:
    output = succeed(3, "bench", "step", str(write_spec()), "--peak", "1e9", "--json", *SHORT)
    values = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    (spec,) = values["specs"]
    _check_step(spec, 3e9)  # of all ranks
    assert (spec["ranks"], spec["accumulation"], len(spec["repeats_s"])) == (3, 2, 3)
    assert spec["phases_s"]["allreduce"]["min"] > 0


FEW = ("--clips", "3", "--repeats", "2", "--workers", "1")


@pytest.mark.parametrize(
    ("core", "gpu", "there", "needed", "keeps_up"),
    [(20.0, 99.0, 7, 5, True), (20.0, 100.0, 6, 5, True), (20.0, 100.1, 6, 6, False), (20.0, 0.1, None, 1, None)],
)
def test_cores_of_a_rank(core: float, gpu: float, there: int | None, needed: int, keeps_up: bool | None) -> None:
    assert verdict(core, gpu, there) == {
        "gpu_clips_per_second": gpu,
        "cores_per_gpu": needed,
        "cores_per_rank": needed + 1,
        "cores_there": None if there is None else there - 1,
        "keeps_up": keeps_up,
    }


def test_a_sample_is_measured_raw_and_packed_beside_the_networks_own_rate(write_spec: WriteSpec, bench: Bench) -> None:
    values = bench("loader", str(write_spec()), *FEW, "--measure")
    assert values["network"] == "tsm resnet18" and values["gpu"]["source"].startswith("measured here, c")
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed bytes", "packed jpeg", "packed video"]
    for kind in values["kinds"]:
        speeds = [kind[f"clips_per_second_{of}"] for of in ("core", "all")]
        assert all(0 < speed["min"] <= speed["median"] <= speed["max"] for speed in speeds)
        # A core of several gives no more than one alone.
        rate = kind["clips_per_second_per_core"]
        assert kind["clips"] == 3 and rate == min(speed["median"] for speed in speeds)
        assert kind["verdict"] == verdict(rate, values["gpu"]["clips_per_second"], None)
        whole = kind["parts_ms"].pop("sum")
        assert list(kind["parts_ms"]) == [*PARTS, "other"] and sum(kind["parts_ms"].values()) == pytest.approx(whole)
        assert kind["parts_ms"]["decode"] > 0 and min(kind["parts_ms"].values()) >= 0
        assert kind["kind"] != "packed jpeg" or kind["parts_ms"]["open"] == 0  # a picture has no container
    assert sys.getprofile() is None


def test_a_packed_set_is_measured_as_it_is(
    write_spec: WriteSpec, motion_set: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    packed = str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "train.csv"), packed, "--kind", "jpeg", "--workers", "0"]) == 0
    assert main(["bench", "loader", str(write_spec()), f"data.train={packed}", *FEW]) == 0
    text = capsys.readouterr().out
    assert "packed jpeg: a core for each " in text and "add --measure, --rate or --site" in text and "raw" not in text


def test_a_site_says_whether_its_cores_suffice(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(write_spec()), *FEW, "--rate", "0.01", "--site", "summit"]) == 0
    text, said = capsys.readouterr()
    for by in ("one core", "1 worker"):
        assert [said.count(f"{kind}, {by}: ") for kind in ("raw", "packed bytes", "packed jpeg", "packed video")] == [
            2
        ] * 4
    assert "a rank trains tsm resnet18 at 0.01 clips/s (--rate)" in text
    assert "raw: 2 cores a rank, 1 for the loader (data.workers=1); summit has 6 for it: keeps up" in text
