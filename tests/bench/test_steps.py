from __future__ import annotations

import pytest
import torch

from summit_train.bench.steps import Activations, StepTimes, mean_phases, peak_memory, step_values
from summit_train.models import build_model
from summit_train.models.fast import accelerate
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.conftest import WriteSpec
from tests.networks import counted


def _phases(wait: float, forward: float, backward: float, allreduce: float = 0.0) -> dict[str, float]:
    return {"data_wait": wait, "forward": forward, "backward": backward, "allreduce": allreduce}


def test_a_repeat_is_the_mean_of_its_steps() -> None:
    # A loader that gives two batches at once: every second step waits, and half of the wait is each one's.
    assert mean_phases([_phases(3.0, 1.0, 2.0), _phases(0.0, 1.0, 2.0)]) == _phases(1.5, 1.0, 2.0)


def test_the_parts_sum_to_the_step_and_the_slowest_rank_says_how_long_it_is() -> None:
    fast = (_phases(0.0, 1.0, 2.0, 1.0), _phases(0.0, 1.0, 2.0, 2.0))
    slow = (_phases(0.5, 1.5, 2.0, 0.0), _phases(1.0, 2.0, 2.0, 0.0))
    times = StepTimes((fast, slow))
    assert times.step_s == [4.0, 5.0]
    assert times.phases_s["forward"] == [1.25, 1.5] and times.phases_s["allreduce"] == [0.5, 1.0]
    assert sum(times.shares.values()) == pytest.approx(1)
    assert times.shares["backward"] == pytest.approx(4 / 9)


def test_ratios_are_of_the_step_and_of_phases_that_matter() -> None:
    one = StepTimes(((_phases(0.001, 2.0, 4.0), _phases(0.0, 4.0, 8.0)),))
    other = StepTimes(((_phases(0.0, 1.0, 4.0), _phases(0.0, 2.0, 4.0)),))
    ratios = one.ratios(other)
    assert set(ratios) == {"step", "forward", "backward"}
    assert ratios["forward"] == {"min": 2.0, "median": 2.0, "max": 2.0}
    assert ratios["backward"] == {"min": 1.0, "median": 1.5, "max": 2.0}


def test_utilisation_is_work_over_seconds_over_peak(write_spec: WriteSpec) -> None:
    plan = make_plan(load_spec(write_spec()), 2, 80)
    times = StepTimes(((_phases(1.0, 1.0, 2.0),), (_phases(1.0, 1.0, 2.0),)))
    values = step_values(times, plan, 5 * plan.multiply_adds, peak=1e9)
    forward = 8 * plan.multiply_adds
    assert values["multiply_adds_per_step"] == 5 * forward
    assert values["clips_per_second"]["median"] == 8 / 4
    assert values["mfu"]["median"] == pytest.approx(5 * forward / 4 / 1e9)
    assert values["forward_mfu"]["median"] == pytest.approx(forward / 1 / 1e9)
    assert values["backward_mfu"]["median"] == pytest.approx(4 * forward / 2 / 1e9)
    assert step_values(times, plan, 1, None)["mfu"] is None


CPU = torch.device("cpu")


def test_what_is_counted_is_what_autograd_holds_at_once() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(100, 4)
    activations = Activations([weight])
    with activations.counted():
        for _ in range(3):  # let go before the next one
            (x @ weight).sum().backward()
    assert activations.most_bytes == 4 * 100 * 4
    with activations.counted():
        one, other = (x @ weight).exp(), (x @ weight).exp()  # x once, and two results
        (one.sum() + other.sum()).backward()
    assert activations.most_bytes == 3 * 4 * 100 * 4


@pytest.mark.parametrize("arch", ["tsm", "tsn"])
def test_a_network_holds_what_the_plan_says(arch: str) -> None:
    model = build_model(arch, "resnet18", 4, 5, width=0.5)
    accelerate(model)
    clips = torch.randn(2, 4, 64, 64, 3).permute(0, 1, 4, 2, 3)
    activations = Activations(model.parameters())
    with activations.counted():
        model(clips).sum().backward()
    planned = 2 * counted(arch, "resnet18", frames=4, crop=64, width=0.5, classes=5).activation_bytes()
    assert activations.most_bytes == pytest.approx(planned, rel=0.01)  # besides, the norms' statistics per channel


def test_the_process_has_held_more_than_it_was_given() -> None:
    before = torch.ones(2**22)
    assert peak_memory(CPU) > before.nbytes
