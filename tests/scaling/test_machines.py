"""Machines: files with lines in their mistakes, and the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.models.count import count_network
from summit_train.scaling.cost import seconds_per_clip
from summit_train.scaling.machines import find_rate, load_machine, machine_names, with_rate
from summit_train.spec import Spec, load_spec
from tests.detectors import detector_spec

ROOT = Path(__file__).resolve().parents[2]

MINIMAL = """\
name: mine
about: a test
gpus_per_node: 4
network:
  intra: {latency_s: 1.0e-6, bytes_per_second: 1.0e+9, source: test}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", machine_names())
def test_each_shipped_machine_loads_by_name(name: str) -> None:
    machine = load_machine(name)
    assert {"summit", "ib_cluster"} <= set(machine_names()) and machine.gpus_per_node > 1
    assert machine.network.inter is not None and machine.network.inter.source


def test_a_file_of_ones_own_may_extend_and_be_overridden(mine: Path) -> None:
    mine.write_text(f"extends: {ROOT}/configs/machines/summit.yaml\nname: mine\n")
    machine = load_machine(mine, ["network.algorithm=ring"])
    assert (machine.name, machine.network.algorithm, machine.gpus_per_node) == ("mine", "ring", 6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpu_per_node: 4", "mine.yaml:6: gpu_per_node: unknown key; did you mean gpus_per_node?"),
        ("last_batch: lost", "mine.yaml:6: last_batch: 'lost' is not a choice; "),
        ("shared: {frames_per_second_per_node: 0, source: x}", "mine.yaml:6: shared.frames_per_second_per_node: "),
        ("compute: {rates: [{arch: tsm}]}", "num_frames: is missing"),
    ],
)
def test_a_mistake_is_told_with_its_line(mine: Path, line: str, message: str) -> None:
    mine.write_text(MINIMAL + line + "\n")
    with pytest.raises(UserError) as error:
        load_machine(mine)
    assert message in str(error.value)


def test_what_is_missing_says_what_to_do(mine: Path) -> None:
    with pytest.raises(UserError, match=r"ib_cluster.*summit"):
        load_machine("sumit")
    with pytest.raises(UserError, match=r"network\.algorithm: hierarchical needs network\.inter"):
        load_machine(mine, ["network.algorithm=hierarchical"])
    machine = load_machine(mine)
    with pytest.raises(UserError, match=r"no rate for tsm in bf16.*--clips-per-second"):
        find_rate(machine, "tsm", "bf16")


@pytest.mark.parametrize(
    "spec",
    [
        load_spec(ROOT / "configs/motion/tsm.yaml"),
        load_spec(ROOT / "configs/motion/tsm.yaml", ("model.backbone=resnet50", "model.non_local=tsm")),
        detector_spec(data={"long_side": 96}),
    ],
)
def test_a_given_rate_is_the_specs_own(spec: Spec) -> None:
    machine = with_rate(load_machine("summit"), spec, 50.0)
    rate = find_rate(machine, spec.model.arch, spec.precision)
    assert (rate.clips_per_second, rate.multiply_adds) == (50.0, count_network(spec).multiply_adds)
    assert seconds_per_clip(spec, machine) == 1 / 50
    assert machine.compute.step_overhead_s == 0
    assert machine.compute.straggler_cv == load_machine("summit").compute.straggler_cv
