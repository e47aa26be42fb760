"""The plan: the paper's numbers worked by hand, and laws that hold for every plan."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.models.count import count_network
from summit_train.plan import Plan, make_plan, sample_learning_rates
from summit_train.spec import Spec, spec_from_values
from tests.detectors import detector_spec

# No deadline and no limit on drawing: how fast the machine is, is not the question.
LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

KINETICS = 240_000  # "roughly 240k training videos"
TSM_PARAMETERS = 24_327_632


def _spec(gpus: int | None, clips_per_gpu: int = 8, precision: str = "fp32", **sections: dict[str, Any]) -> Spec:
    values: dict[str, Any] = {
        "name": "t",
        "model": {"arch": "tsm", "num_classes": 400},
        "data": {"train": "train.csv", "val": "val.csv"},
        "scale": {"gpus": gpus, "clips_per_gpu": clips_per_gpu},
        "precision": precision,
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return spec_from_values(values, "here")


# Table 3 and section 4.2 of the paper: GPUs, batch, frames; steps an epoch = floor(240,000 / batch) and the clips that
# are left over, the peak LR 0.00125 * GPUs, all worked by hand.
TABLE_3 = [
    (48, 384, 3_072, 625, 0, 0.06),
    (96, 768, 6_144, 312, 384, 0.12),
    (192, 1_536, 12_288, 156, 384, 0.24),
    (384, 3_072, 24_576, 78, 384, 0.48),
    (768, 6_144, 49_152, 39, 384, 0.96),
    (1536, 12_288, 98_304, 19, 6_528, 1.92),
    (2304, 18_432, 147_456, 13, 384, 2.88),
    (3072, 24_576, 196_608, 9, 18_816, 3.84),
    (6144, 49_152, 393_216, 4, 43_392, 7.68),
]


@pytest.mark.parametrize(("gpus", "batch", "frames", "steps", "dropped", "peak"), TABLE_3)
def test_the_papers_table_3(gpus: int, batch: int, frames: int, steps: int, dropped: int, peak: float) -> None:
    plan = make_plan(_spec(gpus), gpus, KINETICS)
    assert (plan.global_batch, plan.frames_per_batch) == (batch, frames)
    assert (plan.steps_per_epoch, plan.dropped_clips_per_epoch) == (steps, dropped)
    assert (plan.total_steps, plan.warmup_steps) == (100 * steps, 5 * steps)
    assert plan.peak_lr == pytest.approx(peak, rel=1e-14)


def test_the_papers_baseline() -> None:
    """One node, 6 GPUs of 16 clips: "a total batch size of 96"."""
    plan = make_plan(_spec(6, 16), 6, KINETICS)
    assert (plan.global_batch, plan.frames_per_batch, plan.peak_lr) == (96, 768, pytest.approx(0.015, rel=1e-14))
    assert (plan.steps_per_epoch, plan.total_steps, plan.warmup_steps) == (2_500, 250_000, 12_500)


def test_the_warm_up_of_1536_gpus_step_by_step() -> None:
    plan = make_plan(_spec(1536), 1536, KINETICS)
    # Step 18 is the end of the first epoch of five of warm-up.
    for step, lr in ((0, 1.92 / 95), (18, 1.92 / 5), (94, 1.92), (95, 1.92)):
        assert plan.learning_rate(step) == pytest.approx(lr)
    assert plan.learning_rate(95 + 1805 // 2) == pytest.approx(0.96, rel=2e-3)  # half of the cosine
    assert 0 < plan.learning_rate(1899) < 1.92 * (math.pi / 2 / 1805) ** 2 * 1.001
    assert plan.learning_rate(1900) == 0


def test_repeated_clips_by_hand() -> None:
    """Batches of 96 hold 48 different clips twice: 1,001 clips are 20 steps and 41 left over. LR and bytes stay."""
    once, twice = (make_plan(_spec(6, 16, data={"repeats": repeats}), 3, 1_001) for repeats in (1, 2))
    assert (once.steps_per_epoch, once.dropped_clips_per_epoch) == (10, 41)
    assert (twice.steps_per_epoch, twice.dropped_clips_per_epoch, twice.total_steps) == (20, 41, 2_000)
    assert (twice.global_batch, twice.clips_per_gpu, twice.peak_lr) == (96, 16, once.peak_lr)
    assert twice.input_bytes_per_step_and_rank == once.input_bytes_per_step_and_rank
    assert (twice.order().clips_per_gpu, twice.order().steps_per_epoch) == (8, 20)
    assert make_plan(_spec(6, 16, data={"repeats": 2}), 3, 48).steps_per_epoch == 1
    with pytest.raises(UserError, match=r"has 47 clips x data\.repeats 2, less than one global batch of 96 "):
        make_plan(_spec(6, 16, data={"repeats": 2}), 3, 47)


def test_bytes_by_hand() -> None:
    plan, double = (make_plan(_spec(1536, precision=name), 256, KINETICS) for name in ("fp32", "fp64"))
    assert plan.network.parameters == TSM_PARAMETERS
    assert plan.gradient_bytes == 4 * TSM_PARAMETERS == double.gradient_bytes // 2 == 97_310_528
    assert plan.averaging_bytes == 0
    assert plan.checkpoint_bytes == 8 * TSM_PARAMETERS  # weights and momentum
    clips_bytes = 6 * 8 * (8 * 224 * 224 * 3)
    assert plan.input_bytes_per_step_and_rank == double.input_bytes_per_step_and_rank == clips_bytes


def test_an_average_of_the_weights_takes_their_bytes_again() -> None:
    plain, averaged = (make_plan(_spec(4, ema={"decay": decay}), 4, KINETICS) for decay in (None, 0.9))
    assert averaged.memory_bytes_per_rank - plain.memory_bytes_per_rank == 4 * TSM_PARAMETERS
    assert averaged.checkpoint_bytes - plain.checkpoint_bytes == 4 * TSM_PARAMETERS
    assert averaged.gradient_bytes == plain.gradient_bytes


def test_memory_is_that_of_one_virtual_gpu_whatever_the_accumulation() -> None:
    weights = 3 * 4 * TSM_PARAMETERS
    eight, sixteen = (make_plan(_spec(4, clips), 4, KINETICS).memory_bytes_per_rank for clips in (8, 16))
    assert sixteen - weights == 2 * (eight - weights) > 0
    assert make_plan(_spec(4, 8), 1, KINETICS).memory_bytes_per_rank == eight
    half = make_plan(_spec(4, 8, precision="bf16"), 4, KINETICS).memory_bytes_per_rank
    assert (eight - weights) / 2 <= half - weights < (eight - weights) * 0.6  # the pools' 64-bit indices stay


def test_ranks_are_no_part_of_the_experiment() -> None:
    plans = {ranks: make_plan(_spec(12), ranks, 1_000).values() for ranks in range(1, 13)}
    of_the_rank = {"ranks", "accumulation", "load_balance", "input_bytes_per_step_and_rank"}
    experiments = {json.dumps({k: v for k, v in plan.items() if k not in of_the_rank}) for plan in plans.values()}
    assert len(experiments) == 1
    assert [plan["accumulation"] for plan in plans.values()] == [12, 6, 4, 3, 3, 2, 2, 2, 2, 2, 2, 1]
    balances = [plans[ranks]["load_balance"] for ranks in (1, 4, 5, 7, 11, 12)]
    assert balances == pytest.approx([1, 1, 12 / 15, 12 / 14, 12 / 22, 1], rel=1e-15)


@pytest.mark.parametrize(
    ("gpus", "ranks", "advice"),
    [(12, 24, "start 12 ranks or fewer"), (7, 8, "start 7 ranks or fewer"), (1, 2, "start 1 rank")],
)
def test_more_ranks_than_virtual_gpus_are_refused(gpus: int, ranks: int, advice: str) -> None:
    make_plan(_spec(gpus), gpus, 1_000)
    right = f"scale.gpus must be at least the {ranks} ranks, got {gpus}; {advice}, or raise it"
    with pytest.raises(UserError, match=f"^{right}$"):
        make_plan(_spec(gpus), ranks, 1_000)


@pytest.mark.parametrize("clips", [47, 0, -5, -100_000])
def test_too_few_clips_are_refused(clips: int) -> None:
    with pytest.raises(UserError, match=f"data.train has {clips:,} clips, less than one global batch of 48"):
        make_plan(_spec(6), 6, clips)
    plan = make_plan(_spec(6), 6, 48)  # just enough
    assert (plan.steps_per_epoch, plan.dropped_clips_per_epoch) == (1, 0)


# LEGW from the baseline of 96 clips at LR 0.015: 0.04 epochs of its 2,500 updates are 100, whatever the batch.
@pytest.mark.parametrize(
    ("gpus", "batch", "epochs", "peak"),
    [
        (12, 96, 0.04, 0.015),
        (1536, 12_288, 100 / 19, 0.015 * 2**3.5),
        (3072, 24_576, 100 / 9, 0.24),
        (6144, 49_152, 25, 0.015 * 2**4.5),
    ],
)
def test_a_scaled_warm_up_keeps_its_steps(gpus: int, batch: int, epochs: float, peak: float) -> None:
    optimizer = {"base_lr": 0.015, "base_batch": 96, "lr_scaling": "sqrt"}
    schedule = {"warmup_epochs": 0.04, "warmup_scaling": "linear", "decay": "linear"}
    plan = make_plan(_spec(gpus, optimizer=optimizer, schedule=schedule), gpus, KINETICS)
    assert (plan.global_batch, plan.warmup_steps) == (batch, 100)
    assert plan.warmup_steps / plan.steps_per_epoch == pytest.approx(epochs)
    assert plan.peak_lr == pytest.approx(peak)
    assert plan.learning_rate(99) == pytest.approx(peak)
    assert plan.learning_rate(plan.total_steps - 1) == 1e-6


def test_a_warm_up_that_takes_the_whole_run_is_refused_with_what_fits() -> None:
    schedule: dict[str, Any] = {"epochs": 100, "warmup_epochs": 5, "warmup_scaling": "linear"}
    with pytest.raises(UserError) as caught:
        make_plan(_spec(1536, optimizer={"base_batch": 96}, schedule=schedule), 1536, KINETICS)
    assert str(caught.value) == (
        "schedule.warmup_epochs: the warm-up must be shorter than the run of 1,900 steps, got 12,500 steps from "
        "5 x 12,288 / 96 (schedule.warmup_scaling); try 0.759 or less"
    )
    # 0.759 * 2,500 = 1,897.5; 0.76 * 2,500 = 1,900, the whole run.
    fitting = _spec(1536, optimizer={"base_batch": 96}, schedule=schedule | {"warmup_epochs": 0.759})
    assert make_plan(fitting, 1536, KINETICS).warmup_steps == 1898
    with pytest.raises(UserError, match=r"of 1,900 steps, got 1,900 steps from 100; try 99\.9 or less"):
        make_plan(_spec(1536, schedule={"warmup_epochs": 100}), 1536, KINETICS)
    with pytest.raises(UserError, match="the run of 1 step, got 1 step from 1; try 0 or less"):
        make_plan(_spec(1, schedule={"epochs": 1, "warmup_epochs": 1}), 1, 8)


def test_milestones_are_epochs() -> None:
    """The baseline of DATE's worked example: 58 updates an epoch, LR 1.25e-3, a tenth after 10, 20 and 27 epochs."""
    schedule = {"epochs": 30, "warmup_epochs": 2, "decay": "steps", "milestones": [10, 20, 27]}
    spec = _spec(128, optimizer={"base_lr": 1.25e-3, "base_batch": 1024}, schedule=schedule)
    plan = make_plan(spec, 128, 60_000)
    for last, first, lr in ((116, 579, 1.25e-3), (580, 1159, 1.25e-4), (1160, 1565, 1.25e-5), (1566, 1739, 1.25e-6)):
        assert [plan.learning_rate(step) for step in (last, first)] == pytest.approx([lr, lr])


@pytest.mark.parametrize("base_lr", [1e30, 1e308])
def test_a_learning_rate_beyond_float32_is_refused(base_lr: float) -> None:
    wrong = r"optimizer\.base_lr: the peak LR must be 1e\+30 at most, got (2e\+30|inf) of 1e"
    with pytest.raises(UserError, match=wrong):
        make_plan(_spec(2, 8, optimizer={"base_lr": base_lr}), 2, 100)


def test_a_spec_at_its_upper_limits_has_a_plan() -> None:
    """The two largest counts: every pair of pixels of a clip, and the updates of the run."""
    model = {"arch": "i3d_3x1x1", "backbone": "resnet50", "non_local": "original", "width": 8, "num_classes": 1_000_000}
    data = {"num_frames": 4096, "crop": 4096, "short_side": [4096, 4096]}
    lr = {"base_lr": 1e29, "base_batch": 1}
    plan = make_plan(_spec(1, model=model, data=data, optimizer=lr, schedule={"epochs": 1_000_000}), 1, 100_000)
    assert plan.total_steps == 1_000_000 * (100_000 // plan.global_batch)
    assert plan.memory_bytes_per_rank > 0
    assert math.isfinite(plan.peak_lr)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Spec, Plan]:
    ranks = draw(st.integers(1, 2_000))
    gpus = draw(st.none() | st.integers(ranks, 8 * ranks))
    epochs = draw(st.integers(1, 200))
    batch = (gpus or ranks) * (clips_per_gpu := draw(st.integers(1, 32)))
    clips = draw(st.integers(batch, 400 * batch))
    longest = epochs - 0.6 / (clips // batch)  # rounds to less than the run
    spec = _spec(
        gpus,
        clips_per_gpu,
        model={"arch": "tsn", "backbone": "resnet18"},
        data={"num_frames": draw(st.integers(1, 64))},
        schedule={
            "epochs": epochs,
            "warmup_epochs": draw(st.floats(0, longest)),
            "warmup": draw(st.sampled_from(["linear", "squared"])),
            "decay": draw(st.sampled_from(["cosine", "linear", "polynomial", "none"])),
        },
        optimizer={
            "base_lr": draw(st.floats(1e-6, 10)),
            "base_batch": draw(st.integers(1, 1024)),
            "lr_scaling": draw(st.sampled_from(["linear", "sqrt", "none"])),
        },
    )
    return spec, make_plan(spec, ranks, clips)


@LAWS
@given(plans())
def test_laws_of_every_plan(drawn: tuple[Spec, Plan]) -> None:
    spec, plan = drawn
    assert plan.virtual_gpus == (spec.scale.gpus or plan.ranks)
    shares = [plan.virtual_gpus_of(rank) for rank in range(plan.ranks)]
    assert [gpu for share in shares for gpu in share] == list(range(plan.virtual_gpus))
    assert plan.accumulation == max(map(len, shares)) <= min(map(len, shares)) + 1
    assert 0.5 < plan.load_balance <= 1
    assert plan.global_batch == plan.virtual_gpus * spec.scale.clips_per_gpu
    assert plan.frames_per_batch == plan.global_batch * spec.data.num_frames
    assert plan.steps_per_epoch * plan.global_batch + plan.dropped_clips_per_epoch == plan.clips
    assert 0 <= plan.dropped_clips_per_epoch < plan.global_batch
    assert plan.total_steps == plan.steps_per_epoch * spec.schedule.epochs >= 1
    assert 0 <= plan.warmup_steps < plan.total_steps
    assert abs(plan.warmup_steps - spec.schedule.warmup_epochs * plan.steps_per_epoch) <= 0.5
    assert json.loads(json.dumps(plan.values(), allow_nan=False)) == plan.values()


@LAWS
@given(plans())
def test_the_learning_rate_of_every_plan(drawn: tuple[Spec, Plan]) -> None:
    spec, plan = drawn
    factor = plan.global_batch / spec.optimizer.base_batch
    expected = {"linear": factor, "sqrt": factor**0.5, "none": 1}[spec.optimizer.lr_scaling]
    assert plan.peak_lr == pytest.approx(spec.optimizer.base_lr * expected)
    samples = sample_learning_rates(plan)
    steps = [step for step, _ in samples]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, plan.total_steps - 1)
    assert all(0 < rate <= plan.peak_lr * (1 + 1e-12) for _, rate in samples)
    assume(0 < plan.warmup_steps < plan.total_steps)
    end = plan.warmup_steps - 1
    assert (end, plan.learning_rate(end)) in samples
    assert plan.learning_rate(end) == pytest.approx(plan.peak_lr)
    after = plan.schedule.decay == "linear" and 1 / (plan.total_steps - plan.warmup_steps)  # one step down already
    assert plan.learning_rate(end + 1) == pytest.approx(max(plan.peak_lr * (1 - after), min(1e-6, plan.peak_lr)))
    assert all(before <= after for (_, before), (_, after) in pairwise(samples[: steps.index(end) + 1]))


def test_a_plan_of_flow_by_hand() -> None:
    """TSM, ResNet-50, 8 frames of five fields: only the first convolution and the clips' bytes differ from RGB's."""
    plan = make_plan(_spec(6, 16, data={"modality": "flow"}), 6, 10_000)
    rgb = make_plan(_spec(6, 16), 6, 10_000)
    assert plan.network.parameters == 24_349_584 == rgb.network.parameters + 7 * 7 * 7 * 64
    assert plan.gradient_bytes == 4 * 24_349_584
    assert plan.network.multiply_adds - rgb.network.multiply_adds == 8 * 112**2 * 64 * 7 * 49
    assert plan.input_bytes_per_step_and_rank == 16 * 8 * 224**2 * 10
    assert rgb.input_bytes_per_step_and_rank == 16 * 8 * 224**2 * 3
    # The input is kept for the first convolution's gradient, and there are more weights, gradients and momenta.
    kept, weights = 16 * 8 * 224**2 * 7 * 4, 3 * 4 * 7 * 49 * 64
    assert plan.memory_bytes_per_rank - rgb.memory_bytes_per_rank == kept + weights


def test_a_detectors_memory_and_input_are_those_of_whole_frames() -> None:
    """Frames of 64 x 128 pixels; evaluated at 640 x 1137, 16:9."""

    def plan(crop: int, long_side: int, short_side: int = 64) -> Plan:
        data, evaluate = {"crop": crop, "long_side": long_side}, {"short_side": short_side}
        return make_plan(detector_spec(data=data, evaluate=evaluate, scale={"gpus": 2, "clips_per_gpu": 3}), 1, 6)

    found = plan(16, 128)
    assert found.values() == plan(512, 128).values()
    assert found.input_bytes_per_step_and_rank == 2 * 3 * 2 * 64 * 128 * 3
    count = found.network
    weights = 8 * 3 * count.parameters
    assert found.memory_bytes_per_rank == weights + 3 * count.activation_bytes(8)
    largest = 2 * count.largest_block_elements * 640 * 1137 // (64 * 128)
    assert plan(16, 128, 640).memory_bytes_per_rank == weights + 8 * largest


def test_memory_counts_the_final_evaluation_where_it_needs_more() -> None:
    """One clip of 112 x 112 a virtual GPU, and test views of 512 x 512, 21 times as large."""

    def memory(short_side: int) -> int:
        data = {"crop": 112, "short_side": [128, 160]}
        spec = _spec(4, 1, data=data, evaluate={"short_side": short_side})
        return make_plan(spec, 4, KINETICS).memory_bytes_per_rank

    assert memory(112) == memory(128) < memory(512) < memory(1024)
    block = count_network(_spec(4, 1, data={"crop": 112, "short_side": [128, 160]})).largest_block_elements
    assert memory(1024) - memory(512) == pytest.approx(2 * 4 * block * (1024**2 - 512**2) / 112**2, rel=1e-6)
