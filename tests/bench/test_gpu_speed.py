"""bench/gpu/speed.py measures what it says: rows, ratios, goals, agreement of executions; rehearsed on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from summit_train.models.shift import TemporalShift
from tests.worlds import bench_script

outcome, rows, agenda, subjects, speed = (
    bench_script(f"gpu/{name}") for name in ("outcome", "rows", "agenda", "subjects", "speed")
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few runs, no compilation, and none of the environment that a part sets."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    monkeypatch.setattr(subjects, "WARM_UP", 1)
    monkeypatch.setattr(subjects, "MOST_RUNS", 1)
    monkeypatch.setattr(speed, "measure_peaks", lambda device, small: dict.fromkeys(speed.PRECISIONS, 1e12))
    monkeypatch.setattr(torch, "compile", lambda function, backend: function)


def measured(monkeypatch: pytest.MonkeyPatch, groups: list[Any], seconds: float = 100) -> Any:
    """The outcome of the part with these groups."""
    monkeypatch.setattr(speed, "agenda", lambda small: groups)
    found = outcome.Outcome()
    speed.part(argparse.Namespace(small=True, seconds=seconds), CPU, found)
    return found


def test_the_part_measures_rows_ratios_and_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [("tsm", "accelerated"), ("tsn", "accelerated"), ("images", "accelerated"), ("tsm", "graph")]
    group = agenda.group("train", "bf16", 16, entries, True, "forms", decides=True, repeats=1)
    found = measured(monkeypatch, [group])
    assert found.values["skipped"] == {"train tsm bf16 batch 2 graph": "CUDA graphs need CUDA"}
    assert [row["network"] for row in found.values["rows"]] == ["tsm", "tsn", "images"]
    for row in found.values["rows"]:
        assert row["clips_per_second"]["median"] == pytest.approx(2 / row["seconds"]["median"])
        assert row["clips_per_second"]["max"] == pytest.approx(2 / row["seconds"]["min"])
    tsm, tsn, images = (row["utilisation"]["median"] * row["seconds"]["median"] for row in found.values["rows"])
    assert tsm == pytest.approx(tsn) == pytest.approx(images)  # the multiply-adds of 2 clips are those of 16 images
    over_tsn, of_images = found.checks
    assert over_tsn.wanted and over_tsn.bound == 1.03 and not over_tsn.at_least
    assert of_images.wanted and of_images.bound == 0.97 and of_images.at_least
    ratio = found.values["ratios"][0]["ratio"]
    assert ratio["min"] <= over_tsn.value == ratio["median"] <= ratio["max"]


def test_executions_that_agree_pass_and_a_shift_that_is_lost_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [("tsm", "accelerated"), ("tsm", "plain"), ("tsm", "compiled"), ("tsm", "official")]
    group = agenda.group("inference", "bf16", 1, entries, True, "graphs", agree=True, repeats=1)
    found = measured(monkeypatch, [group])
    assert len(found.checks) == 3 and found.passes and not any(check.wanted for check in found.checks)
    assert found.values["rows"][2]["compile_s"] >= 0

    def without_one_shift(row: Any, device: torch.device, *, small: bool) -> torch.nn.Module:
        network = rows.network_of(row, device, small=small)
        shifts = [module for module in network.modules() if isinstance(module, TemporalShift)]
        if row.execution == "plain":
            shifts[7].fraction = 0.0
        return network

    monkeypatch.setattr(subjects, "network_of", without_one_shift)
    checks = measured(monkeypatch, [group]).checks
    assert [check.passes for check in checks] == [False, True, True]


def test_the_seconds_end_the_part_and_what_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = agenda.agenda()
    found = measured(monkeypatch, groups, seconds=0)
    assert list(found.values["skipped"]) == [group.title for group in groups]
    assert found.values["rows"] == [] and found.passes


@pytest.mark.parametrize(
    ("of", "over", "ratio", "passes"),
    [
        ("tsm", "tsn", 1.031, False),
        ("tsm", "tsn", 1.029, True),
        ("images", "tsm", 0.969, False),
        ("images", "tsm", 0.971, True),
    ],
)
def test_the_goals_are_those_wanted(of: str, over: str, ratio: float, passes: bool) -> None:
    one, other = (rows.Row(network, "train", "fp16", 16) for network in (of, over))
    values = speed.ratio_values(one, other, {one: [ratio], other: [1.0]})
    check = speed.goal(values)
    assert check.passes == passes and check.wanted
    assert speed.goal(values | {"precision": "fp32"}) is None and speed.goal(values | {"mode": "inference"}) is None


def test_memory_that_is_out_is_noted_and_another_error_fails() -> None:
    row, found = rows.Row("tsm", "train", "fp32", 32), outcome.Outcome(values={"out_of_memory": {}})

    def raising(error: Exception) -> Callable[[], None]:
        def action() -> None:
            raise error

        return action

    assert speed.attempt(row, found, raising(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"))) is None
    assert found.values["out_of_memory"] == {row.name: "CUDA out of memory. Tried"} and found.passes
    assert speed.attempt(row, found, raising(RuntimeError("an illegal memory access"))) is None
    assert not found.passes and "an illegal memory access" in found.checks[0].note


def test_the_agenda_is_whole() -> None:
    for groups in (agenda.agenda(), agenda.agenda(small=True)):
        assert [group.decides for group in groups[:2]] == [True, True]
        assert len({group.title for group in groups}) == len(groups)
        for group in groups:
            assert len({(row.mode, row.precision, row.batch) for row in group.rows}) == 1
            assert all(row in group.rows for pair in group.pairs for row in pair)
        every = {row for group in groups for row in group.rows}
        assert {row.mode for row in every} == {"train", "inference", "pass"}
        executions = {"accelerated", "plain", "official", "weights_last", "compiled", "graph"}
        assert {row.execution for row in every} == executions
    wanted = {
        rows.Row(network, mode, precision, batch)
        for network in agenda.NETWORKS
        for precision in ("fp32", "tf32", "fp16", "bf16")
        for mode, batches in (("train", (8, 16, 32)), ("inference", (1, 8, 32)))
        for batch in batches
    }
    assert wanted <= {row for group in agenda.agenda() for row in group.rows}


def test_tf32_is_on_for_tf32_alone_and_the_switches_come_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    seen = {}
    for precision in ("fp32", "tf32", "bf16"):
        with rows.arithmetic(precision):
            seen[precision] = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before
    assert seen == {"fp32": (False, "highest"), "tf32": (True, "high"), "bf16": before}


def test_images_are_pictures_of_the_same_number_and_size() -> None:
    clips, images = (rows.spec_of(rows.Row(network, "train", "bf16", 4)) for network in ("tsm", "images"))
    assert images.data.num_frames == 1 and images.scale.clips_per_gpu == 4 * clips.data.num_frames == 32
    assert images.data.crop == clips.data.crop == 224
