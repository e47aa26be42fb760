"""What a run costs on a site: against the paper's own table, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from summit_train.cluster.estimate import Estimate, check_ranks, estimate, save_often, scored_clips
from summit_train.cluster.site import Site, load_site
from summit_train.core.errors import UserError
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.detectors import detector_spec

KINETICS = Path(__file__).resolve().parents[2] / "configs/kinetics"
# Table 3 of "Training Kinetics in 15 Minutes": nodes -> hours. 16 clips a GPU on one node, 8 on the others.
TABLE_3 = {
    1: 49 + 55 / 60, 8: 7 + 7 / 60, 16: 3 + 38 / 60, 32: 1 + 50 / 60, 64: 55.93 / 60, 128: 28.23 / 60, 256: 14.22 / 60,
    384: 10.15 / 60,
}  # fmt: skip


def _cost(name: str, nodes: int, *overrides: str, site: Site | None = None, **asked: float) -> Estimate:
    site = site or load_site("summit")
    spec = load_spec(KINETICS / f"{name}.yaml", overrides)
    plan = make_plan(spec, check_ranks(site, spec, nodes), 240_000)
    return estimate(site, plan, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", TABLE_3)
def test_summits_cost_is_the_papers(nodes):
    cost = _cost("tsm_r50_8f", nodes, f"scale.gpus={6 * nodes}", f"scale.clips_per_gpu={16 if nodes == 1 else 8}")
    # Rounded speeds, and clips that are dropped at the end of an epoch: 2.7 % of them on 256 nodes.
    assert cost.hours == pytest.approx(TABLE_3[nodes], rel=0.035)
    assert cost.node_hours == pytest.approx(nodes * TABLE_3[nodes], rel=0.035)
    assert "Table 3" in (cost.source or "")


def test_the_256_node_run_is_one_job():
    cost = _cost("tsm_r50_8f_1536gpu", 256)
    # 1,900 steps of 12,288 clips at 1,536 x 18.3 clips/s: 830.6 s; 20 % and 15 min on top.
    assert cost.hours == pytest.approx(830.6 / 3600, rel=1e-3)
    assert (cost.ranks, cost.jobs, cost.walltime_minutes) == (1536, 1, 17 + 15)
    assert cost.most_node_hours == pytest.approx(256 * 32 / 60 * (1 + 3))  # it may requeue itself 3 times
    assert _cost("tsm_r50_8f_1536gpu", 256, max_requeues=0).most_node_hours == pytest.approx(256 * 32 / 60)


@pytest.mark.parametrize(
    ("nodes", "asked", "jobs", "minutes"),
    [
        # Summit gives 2 hours to jobs of up to 45 nodes, and the paper's took 7h07m, 3h38m and 1h50m there.
        (8, None, 5, 120), (16, None, 3, 120), (32, None, 2, 120), (64, None, 1, 83),
        # 8 nodes: 25,641 s of work with 20 % on top are 513 min; 15 min of each job are start and end.
        (8, 90, 7, 90), (8, 120, 5, 120), (8, 121, 5, 120), (8, 600, 5, 120), (8, 601, 6, 120), (8, 20, 52, 20),
    ],
)  # fmt: skip
def test_a_walltime_above_the_cap_is_a_chain(nodes, asked, jobs, minutes):
    more: dict[str, Any] = {} if asked is None else {"walltime": asked}
    cost = _cost("tsm_r50_8f", nodes, f"scale.gpus={6 * nodes}", "scale.clips_per_gpu=8", **more)
    assert (cost.jobs, cost.walltime_minutes) == (jobs, minutes)


def test_the_speed_of_the_next_larger_number_of_nodes_is_taken():
    spec = ("scale.gpus=6144", "scale.clips_per_gpu=8")
    found = {nodes: _cost("tsm_r50_8f", nodes, *spec).clips_per_second for nodes in (2, 4, 8, 256, 512, 1024)}
    assert found == {2: 19.5, 4: 19.5, 8: 19.5, 256: 18.3, 512: 17.1, 1024: 17.1}


@pytest.mark.parametrize(("name", "factor"), [("i3d_3x3x3_r50_16f", 1.6), ("i3d_3x1x1_r50_32f", 2.9)])
def test_the_other_networks_are_slower_as_in_figure_6(name, factor):
    tsm, other = (_cost(n, 256, "scale.gpus=1536").hours for n in ("tsm_r50_8f", name))
    assert tsm and other and other / tsm == pytest.approx(factor, rel=0.02)


NOT_MEASURED = ("arch=tsn", "backbone=resnet101", "non_local=tsm", "width=0.5")


@pytest.mark.parametrize("key", [*(f"model.{key}" for key in NOT_MEASURED), "data.num_frames=16", "data.crop=112"])
def test_a_network_that_was_not_measured_has_no_estimate(key):
    cost = _cost("tsm_r50_8f", 1, key)
    assert (cost.clips_per_second, cost.source, cost.hours, cost.node_hours) == (None, None, None, None)
    assert (cost.jobs, cost.walltime_minutes) == (1, 120)  # the site's own
    rows = dict(_cost("tsm_r50_8f", 1, key, price=2.5, max_requeues=1).rows())
    assert "no measurement of this network; give --speed" in rows["training"]
    unknown = "at least one job of 2:00; node-hours unknown without a speed, at most 4.0 with 1 requeue"
    unknown += " (another bound: max_requeues, or --speed)"
    assert (rows["walltime"], rows["price"]) == (unknown, "unknown without a speed, at most 10.00, at 2.5 a node-hour")
    chain = dict(_cost("tsm_r50_8f", 2, key, "scale.gpus=12", walltime=300, max_requeues=0).rows())["walltime"]
    many = "at least a chain of 3 jobs of 2:00; node-hours unknown without a speed, at most 12.0 with 0 requeues"
    assert chain == f"{many} (another bound: max_requeues, or --speed)"


def test_the_speed_of_a_classifier_is_not_a_detectors():
    """Nor where its frames have the classifier's size."""
    model = {"arch": "tsm", "shift_direction": "past", "backbone": "resnet50", "width": 1.0}
    data = {"num_frames": 8, "short_side": [224, 224]}
    spec = detector_spec(precision="fp32", model=model, data=data, scale={"gpus": 6})
    cost = estimate(load_site("summit"), make_plan(spec, 6, 480))
    assert (cost.clips_per_second, cost.hours) == (None, None)


def test_a_price_counts_training_and_evaluation_and_the_limit():
    """2 nodes of 4 ranks of 100 clips a second: 24 million clips in 30,000 s, 13,000 clips of one validation in 16."""
    asked = {"site": load_site("slurm_generic"), "speed": 100.0, "price": 3.0}
    keys = ("scale.gpus=8", "evaluate.every_epochs=0", "evaluate.last_checkpoints=1", "evaluate.clips=1")
    alone, both = (_cost("tsm_r50_8f", 2, *keys, **asked, **more) for more in ({}, {"videos": 13_000}))
    assert alone.cost == pytest.approx(3 * 2 * 30_000 / 3600, rel=1e-3)
    assert both.cost == pytest.approx(3 * 2 * 30_016.25 / 3600, rel=1e-4)
    # 10 h of training, 20 % on top and 15 min; 3 requeues.
    assert both.values()["most_cost"] == pytest.approx(3 * 2 * 4 * both.walltime_minutes / 60)
    assert dict(alone.rows())["price"].startswith(f"{alone.cost:,.2f} for training, at most ")
    assert dict(both.rows())["price"].startswith(f"{both.cost:,.2f} for training and evaluation, at most ")
    here = _cost("tsm_r50_8f", 1, site=load_site("local"), speed=2.0, price=1.0)
    assert dict(here.rows())["price"] == f"{here.cost:,.2f} for training, at 1 a node-hour"
    assert _cost("tsm_r50_8f", 1).values()["cost"] is _cost("tsm_r50_8f", 1).values()["most_cost"] is None


def test_a_speed_of_ones_own_goes_before_the_sites():
    # 100 epochs of 240,000 clips on 6 ranks of 100 clips a second: 40,000 s.
    cost = _cost("tsm_r50_8f", 1, speed=100.0)
    assert cost.hours == pytest.approx(40_000 / 3600)
    assert (cost.source, cost.jobs) == ("--speed", 8)  # 800 min with 20 % on top, 105 in each job


def test_the_largest_share_costs_its_time():
    """1,536 virtual GPUs: three on some of 600 ranks, three at most on 516 too, two on 768, four on half of those."""
    hours = {nodes: _cost("tsm_r50_8f_1536gpu", nodes, speed=100.0).hours for nodes in (100, 86, 128)}
    assert hours[100] == hours[86] == pytest.approx(1.5 * hours[128])
    half = _cost("tsm_r50_8f_1536gpu", 128, site=load_site("summit", ["gpus_per_node=3"]), speed=100.0)
    assert half.hours == pytest.approx(2 * hours[128])


def test_fewer_nodes_need_a_batch_of_their_own():
    site = load_site("slurm_generic", ["min_nodes=2"])
    spec = load_spec(KINETICS / "tsm_r50_8f.yaml", ["scale.gpus=null"])
    assert check_ranks(site, spec, 2) == 8 and check_ranks(load_site("summit"), spec, 5) == 30
    with pytest.raises(UserError, match=r"scale\.gpus must be set with min_nodes, .*; try scale\.gpus=12"):
        check_ranks(site, spec, 3)


@pytest.mark.parametrize("background", [True, False])
def test_a_sites_failures_say_how_often_to_save(background):
    """By Young's sqrt(2 d M), to first order: 1,536 GPUs at Llama 3's rate, M = 33 h."""
    keys = [f"checkpoint.background={background}", "checkpoint.every_epochs=50"]
    spec, site = load_spec(KINETICS / "tsm_r50_8f_1536gpu.yaml", keys), load_site("summit")
    plan = make_plan(spec, 1536, 240_000)
    assert save_often(site, spec, plan) == (spec, [])
    often = site.model_copy(update={"failure_gpu_hours": 50_700.0})
    saved, ((name, row),) = save_often(often, spec, plan)
    stall_s = plan.checkpoint_bytes * (1 / 1.3e9 + (0 if background else 1 / 4e8))
    minutes = math.sqrt(2 * stall_s * 50_700 * 3600 / 1536) / 60
    assert saved.checkpoint.every_minutes == pytest.approx(minutes, rel=0.05)
    assert (name, saved.checkpoint.every_epochs) == ("checkpoints", 50)
    assert row.startswith(f"also every {saved.checkpoint.every_minutes:g} min, best for a failure every 33 h")
    for named in ("null", "7"):  # the user's word
        spec = load_spec(KINETICS / "tsm_r50_8f_1536gpu.yaml", [f"checkpoint.every_minutes={named}"])
        assert save_often(often, spec, plan) == (spec, [])


@pytest.mark.parametrize(("nodes", "jobs", "requeues"), [(64, 1, 3), (32, 2, 4), (8, 5, 10)])
def test_requeues_follow_from_the_time_unless_the_site_or_the_command_says_how_many(nodes, jobs, requeues):
    keys, own = (f"scale.gpus={6 * nodes}", "scale.clips_per_gpu=8"), load_site("summit", ["max_requeues=1"])
    cost = _cost("tsm_r50_8f", nodes, *keys)
    assert (cost.jobs, cost.max_requeues) == (jobs, requeues)
    assert _cost("tsm_r50_8f", nodes, *keys, site=own).max_requeues == 1
    assert _cost("tsm_r50_8f", nodes, *keys, site=own, max_requeues=0).max_requeues == 0
    # The time is unknown: jobs of 2 hours, for a day.
    assert _cost("tsm_r50_8f", nodes, *keys, "data.crop=112").max_requeues == 11
    day = _cost("tsm_r50_8f", nodes, *keys, "data.crop=112", site=load_site("slurm_generic"), walltime=1440)
    assert day.max_requeues == 1


def test_the_rows_for_people():
    rows = dict(_cost("tsm_r50_8f", 8, "scale.gpus=48", "scale.clips_per_gpu=8").rows())
    assert rows["training"].startswith("7:08, 57.0 node-hours at 19.5 clips/s a rank (Training Kinetics")
    chain = "a chain of 5 jobs of 2:00: 80.0 node-hours; at most 240.0 with 10 requeues"
    assert rows["walltime"] == chain
    one = replace(_cost("tsm_r50_8f", 8, "scale.gpus=48"), jobs=1)
    assert dict(one.rows())["walltime"].startswith("one job of 2:00: 16.0 node-hours; at most 176.0 with")
    here = _cost("tsm_r50_8f", 1, site=load_site("local"), speed=2.0)  # this machine has no walltime
    assert [name for name, _ in here.rows()] == ["training", "evaluation"]
    uncapped = _cost("tsm_r50_8f", 1, "scale.gpus=4", site=load_site("slurm_generic"), walltime=10_000)
    assert (uncapped.jobs, uncapped.walltime_minutes) == (1, 10_000)


def test_the_walltime_counts_the_validations_and_the_final_evaluation():
    """6 ranks of 100 clips a second, 600,000 training clips a pass of 1,000 s; 10 epochs and 6,000 videos."""
    keys = ("schedule.epochs=10", "schedule.warmup_epochs=1", "checkpoint.every_epochs=2", "checkpoint.keep=9")
    views = ("evaluate.every_epochs=3", "evaluate.last_checkpoints=9", "evaluate.clips=10", "evaluate.crops=3")
    site = load_site("slurm_generic")
    without = _cost("tsm_r50_8f", 1, "scale.gpus=4", *keys, *views, site=site, speed=100.0)
    assert without.evaluation_hours is None
    assert dict(without.rows())["evaluation"] == "not counted: the number of videos in data.val is unknown"
    cost = _cost("tsm_r50_8f", 1, "scale.gpus=4", *keys, *views, site=site, speed=100.0, videos=6_000)
    # After epochs 3, 6, 9 and 10; the checkpoints of 2, 4, .. 10: 6,000 x (4 + 5 x 30) clips.
    assert cost.evaluation_hours == pytest.approx(924_000 / 400 / 3600)
    assert cost.hours == without.hours == pytest.approx(2_400_000 / 400 / 3600, rel=1e-3)
    assert (without.walltime_minutes, cost.walltime_minutes) == (15 + 120, 15 + 167)  # 1.2 x 100 and 1.2 x 138.5
    assert dict(cost.rows())["evaluation"] == "0:39, final and validations"


@pytest.mark.parametrize(
    ("changes", "clips"),
    [
        ((), 7 * (2 + 5 * 10)),
        (("evaluate.every_epochs=0",), 7 * 5 * 10),
        (("ema.decay=0.9",), 7 * (2 + 2 * 5 * 10)),
        (("evaluate.crops=full",), 7 * (2 + 5 * 10)),
        (("evaluate.mode=stream", "model.shift_direction=past"), 7 * (2 * 10 + 5 * 10)),
        (("checkpoint.every_epochs=4",), 7 * (2 + 3 * 10)),
        (("checkpoint.every_epochs=10", "schedule.early_stop={measure: top1, epochs: 1}"), 7 * (2 + 2 * 10)),
        (("evaluate.precise_bn=3",), 7 * (2 + 5 * 10) + 5 * 3 * 64),
    ],
)
def test_the_clips_that_evaluations_read(changes, clips):
    keys = ["schedule.epochs=10", "scale.gpus=8", "scale.clips_per_gpu=8", *changes]
    spec = load_spec(KINETICS / "tsm_r50_8f.yaml", keys)
    assert scored_clips(spec, make_plan(spec, 8, 1_000), 7) == clips
