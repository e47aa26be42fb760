"""The shipped sweeps: the paper's Table 3 row by row, and the same study in small."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from summit_train.cluster.site import load_site
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec
from summit_train.sweep.grid import Sweep, load_sweep
from summit_train.sweep.start import plan_runs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))
CLIPS = 240_000

# "Training Kinetics in 15 Minutes", Table 3, typed off: #Node, #GPU, BatchSize, #Frames, Accuracy with its deviation.
# The rows with a star are simulated there by accumulation.
TABLE_3 = [
    (1, 6, 96, 768, 74.12, 0.11),
    (8, 48, 384, 3_072, 74.12, 0.08),
    (16, 96, 768, 6_144, 74.18, 0.14),
    (32, 192, 1_536, 12_288, 74.14, 0.10),
    (64, 384, 3_072, 24_576, 74.10, 0.08),
    (128, 768, 6_144, 49_152, 73.99, 0.04),
    (256, 1536, 12_288, 98_304, 73.99, 0.07),
    (384, 2304, 18_432, 147_456, 72.52, 0.07),
    (512, 3072, 24_576, 196_608, 69.80, 0.13),  # *
    (1024, 6144, 49_152, 393_216, 62.22, 0.17),  # *
]
SIMULATED = (512, 1024)
MOST_NODES = 384  # "due to quota limitation, the largest physical nodes we used is 384"


def _planning(clips: int) -> Callable[[Spec, int], tuple[Plan, None]]:
    return lambda spec, ranks: (make_plan(spec, ranks, clips), None)


def test_the_plan_of_each_row_is_the_papers() -> None:
    planned = plan_runs(
        load_sweep(FOLDER / "table3.yaml"),
        load_site("summit"),
        lambda spec, ranks: (make_plan(spec, ranks, CLIPS), None),
        None,
    )
    assert [(f"nodes-{nodes}", gpus, batch, frames) for nodes, gpus, batch, frames, _, _ in TABLE_3] == [
        (run.name, run.plan.virtual_gpus, run.plan.global_batch, run.plan.frames_per_batch) for run in planned
    ]
    for (nodes, gpus, *_), run in zip(TABLE_3, planned, strict=True):
        assert run.nodes is not None and run.nodes <= MOST_NODES
        assert run.plan.ranks == 6 * run.nodes
        assert run.plan.accumulation == (gpus // run.plan.ranks if nodes in SIMULATED else 1)
        assert (run.nodes == nodes) == (nodes not in SIMULATED)
        # "0.00125 for every 8 samples", linear; 100 epochs
        assert run.plan.peak_lr == pytest.approx(0.00125 * run.plan.global_batch / 8)
        assert run.plan.epochs == 100


def test_the_rows_differ_from_the_baseline_in_their_scale_alone() -> None:
    sweep = load_sweep(FOLDER / "table3.yaml")
    assert {key for run in sweep.runs for key in run.changes} == {"scale.gpus", "scale.clips_per_gpu"}
    # "each GPU contains 16 video clips" in the baseline, 8 in all others
    assert [run.spec.scale.clips_per_gpu for run in sweep.runs] == [16] + [8] * 9


def test_the_study_in_small_goes_up_to_batches_that_lose_accuracy_in_the_same_epochs() -> None:
    sweep = load_sweep(FOLDER / "batch_size_motion.yaml")
    planned = plan_runs(sweep, load_site("local"), _planning(512), None)
    assert [run.plan.global_batch for run in planned] == [8, 16, 32, 64, 128, 256]
    assert {run.plan.ranks for run in planned} == {2}
    assert {run.plan.peak_lr / run.plan.global_batch for run in planned} == {0.02 / 8}
    assert {run.plan.epochs for run in planned} == {8}
    assert {run.nodes for run in sweep.runs} == {1}


def test_a_run_here_takes_the_fewest_ranks_that_are_as_fast_as_all(make_sweep: Callable[..., Sweep]) -> None:
    gpus = [1, 3, 4, 5, 6, 7, 8, 9, 10]
    sweep = make_sweep(f"grid: {{scale.gpus: {gpus}}}\n")
    planned = plan_runs(sweep, load_site("local", ["ranks_per_node=4"]), _planning(512), None)
    assert [run.plan.ranks for run in planned] == [1, 3, 4, 3, 3, 4, 4, 3, 4]


def test_the_study_of_large_batches_changes_the_scale_of_each_preset_alone() -> None:
    sweep = load_sweep(FOLDER / "large_batch_motion.yaml")
    planned = plan_runs(sweep, load_site("local"), _planning(1024), None)
    gpus = (2, 8, 32, 64, 128)
    names = [f"{p}_gpus-{n}_seed-{s}" for p in ("linear", "date", "lars", "lamb") for n in gpus for s in range(3)]
    assert [run.name for run in planned] == names
    plans = {run.name: run.plan for run in planned}
    course = {
        preset: [
            (plan.global_batch, plan.total_steps, round(plan.peak_lr, 4), plan.warmup_steps)
            for plan in (plans[f"{preset}_gpus-{n}_seed-0"] for n in (2, 128))
        ]
        for preset in ("linear", "date", "lars", "lamb")
    }
    # 64 times the batch: 64 times the LR under linear scaling, 8 times under sqrt; a scaled warm-up keeps its steps.
    assert course == {
        "linear": [(8, 1280, 0.02, 128), (512, 20, 1.28, 2)],
        "date": [(8, 1280, 0.01, 6), (512, 20, 0.08, 6)],
        "lars": [(8, 1280, 2.0, 128), (512, 20, 16.0, 2)],
        "lamb": [(8, 1280, 0.02, 6), (512, 20, 0.16, 6)],
    }
    of = {run.curve: run.spec.optimizer for run in sweep.runs}
    kinds = {name: (solver.name, solver.trust_ratio and solver.trust_ratio.kind) for name, solver in of.items()}
    assert kinds == {
        "linear": ("sgd", None),
        "date": ("sgd", "bounded"),
        "lars": ("sgd", "lars"),
        "lamb": ("lamb", None),
    }
    # Virtual GPUs of one size: batch normalisation is the same at every batch, and two are enough for a noise scale.
    assert {run.spec.scale.clips_per_gpu for run in sweep.runs} == {4}


def test_every_sweep_opens_with_what_a_reader_needs_and_has_a_folder_of_its_own() -> None:
    for path in FILES:
        opening = "".join(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines(keepends=True)))
        assert "@" not in opening, "a figure that is still to be filled in"
        assert all(word in opening for word in ("Source:", "Expect:", "Cost:", "Commands:", "%"))
        assert f"summit-train sweep shipped:sweeps/{path.stem} " in opening
    assert len({load_sweep(path).folder for path in FILES}) == len(FILES) == 4
