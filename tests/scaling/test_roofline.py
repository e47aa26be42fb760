"""Rooflines: by hand, against what was published, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.counts import count_network
from summit_train.scaling import roofline as roofline_module
from summit_train.scaling.roofline import DEVICES, LAUNCH_S, Device, published_steps, roofline
from summit_train.spec import Spec, load_spec
from tests.detectors import detector_spec
from tests.worlds import Say, main_said, refused

PRECISIONS = ("fp32", "fp16", "bf16")
FAST = Device("made up", dict.fromkeys(PRECISIONS, math.inf), math.inf, math.inf)


def spec_with(*words: str) -> Spec:
    return load_spec("shipped:kinetics/tsm_r50_8f", ["model.width=0.25", "scale.clips_per_gpu=2", *words])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_roofline_by_hand(precision: str) -> None:
    spec = spec_with(f"precision={precision}")
    idle = roofline(spec, FAST)
    assert idle["roofline_s"] == pytest.approx(LAUNCH_S * idle["launches"], rel=1e-12)
    network = count_network(spec)
    # Forward and two gradients, but for that of the clips.
    assert idle["flops"] == 2 * 2 * (3 * network.multiply_adds - network.layers[0].multiply_adds)
    peaks = {**FAST.peaks, precision: 1e12}
    slow = replace(FAST, peaks=peaks, convolutions=1e12 if precision == "fp32" else 1.0)
    computing = roofline(spec, slow)
    assert computing["roofline_s"] - idle["roofline_s"] == pytest.approx(idle["flops"] / 1e12, rel=1e-9)
    assert computing["flops_s"] == pytest.approx(idle["flops"] / 1e12, rel=1e-9)
    moving = roofline(spec, replace(FAST, bytes_per_second=1e11))
    assert moving["roofline_s"] - idle["roofline_s"] == pytest.approx(idle["moved"] / 1e11, rel=1e-6)
    # Neither alone, and both under each other where an operation has both.
    both = roofline(spec, replace(slow, bytes_per_second=1e11))["roofline_s"]
    alone = (computing["roofline_s"], moving["roofline_s"])
    assert max(alone) < both < sum(alone) - idle["roofline_s"]


def test_sixteen_bits_halve_what_the_passes_move_and_not_the_update() -> None:
    wide, half = (roofline(spec_with(f"precision={precision}"), FAST)["moved"] for precision in ("fp32", "fp16"))
    weights = 4 * count_network(spec_with()).parameters
    update = 2 * half - wide
    # SGD reads weights, gradients and momenta, and writes the first and the last; the norm reads the gradients. BN's
    # statistics are moved a few times.
    assert update == pytest.approx(6 * weights, rel=0.02)


def test_in_fp32_matrix_products_have_a_peak_of_their_own() -> None:
    found = roofline(spec_with(), replace(FAST, peaks={"fp32": 1e12}))
    head = 3 * 2 * 2 * 8 * 512 * 400  # of 2 clips: forward, and two gradients
    assert found["flops_s"] == pytest.approx(head / 1e12, rel=1e-9)
    for name, device in DEVICES.items():
        assert (device.convolutions > 2 * device.peaks["fp32"]) == (name != "v100")  # TF32


def test_what_draws_decide_and_the_seed_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = ["data.mix={mixup: 0.8, cutmix: 1.0}", "data.erase=0.5"]
    plain = roofline(spec_with(), FAST)
    monkeypatch.setattr(roofline_module, "kept", lambda model, keys, count, kind: count())
    assert roofline(spec_with(*mixed), FAST) == roofline(spec_with(*mixed, "seed=1"), FAST) == plain


def test_the_clips_of_a_huge_step_need_no_memory() -> None:
    steps = (roofline(spec_with(f"scale.clips_per_gpu={n}"), FAST) for n in (2, 10**6))
    few, many = (step["flops"] for step in steps)
    assert many == few * 10**6 / 2


def test_the_published_steps_are_slower_than_their_rooflines_and_have_the_published_utilisation() -> None:
    """The utilisation: images a second x 24.6 GFLOP over the peak."""
    found = {}
    for name, device in DEVICES.items():
        for row in published_steps(name):
            step_s = row["clips"] / row["published_rate"]
            assert 1.1 < row["ratio"] == step_s / row["roofline_s"] < 6
            if row["label"].startswith("ResNet-50"):
                peak = device.convolutions if row["precision"] == "fp32" else device.peaks[row["precision"]]
                assert row["flops_s"] / step_s == pytest.approx(row["published_rate"] * 24.6e9 / peak, rel=0.02)
                found[name, row["precision"]] = round(100 * row["flops_s"] / step_s)
    assert found == {
        ("v100", "fp32"): 57, ("v100", "fp16"): 23, ("a100", "fp32"): 15, ("a100", "fp16"): 19, ("h100", "fp16"): 17,
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_precision_that_a_gpu_lacks_is_refused(precision: str) -> None:
    with pytest.raises(UserError, match=f"fp32 or fp16 on V100.*, got {precision}; try precision=fp32"):
        roofline(spec_with(f"precision={precision}"), DEVICES["v100"])


@pytest.mark.parametrize(
    "words",
    [
        ["model.non_local=tsm"],
        ["model.arch=vit", "model.backbone=vit_s", "model.width=1", "evaluate.crops=1", "evaluate.short_side=224"],
    ],
)
def test_sixteen_bits_are_refused_where_autocast_keeps_much_in_fp32(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"must be fp32 for .*autocast keeps.*, got fp16; try precision=fp32"):
        roofline(spec_with(*words, "precision=fp16"), DEVICES["a100"])


def test_steps_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    own = spec_with(f"model.arch={tmp_path}/net.py:net", "model.backbone=null", "model.width=1")
    refused = {
        f"model.arch must be a network that ships with --device, got {own.model.arch}": own,
        "parallel.method must be synchronous with --device, got averaging": spec_with("parallel.method=averaging"),
        "task must be classification with --device, got detection": detector_spec(precision="fp32"),
        "execution.compile must be false with --device, got true": spec_with("execution.compile=true"),
    }
    for message, spec in refused.items():
        with pytest.raises(UserError) as error:
            roofline(spec, DEVICES["v100"])
        assert str(error.value) == f"{message}; try --machine"


def test_the_second_call_needs_no_torch(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["simulate", "shipped:kinetics/tsm_r50_8f", "--device", "h100", "precision=bf16", "model.width=0.25"]
    program = "import sys; sys.modules['torch'] = None; from summit_train.__main__ import main; sys.exit(main())"
    first = say(*words)
    again = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert (again.returncode, again.stdout, again.stderr) == first and first[::2] == (0, "")


def test_the_table_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", "shipped:kinetics/tsm_r50_8f", "--device", "h100", "precision=bf16", "model.width=0.25")
    table = main_said(capsys, *words)[1].splitlines()
    assert table[0].endswith("nothing was measured") and "one H100 (SXM5)" in table[0]
    own, published = (next(line for line in table if line.startswith(name)) for name in ("tsm_r50_8f ", "ResNet-50"))
    values = json.loads(main_said(capsys, *words, "--json")[1])
    rates = (values["clips"] / values["roofline_s"], values["published"][0]["published_rate"])
    assert f"{values['roofline_s']:.4f}  {rates[0]:,.1f}" in own and f"{rates[1]:,.1f}" in published
    assert "MLPerf" in table[-1] and "mmaction2" not in "".join(table)  # the sources of these rows alone
    for option in (
        ["--nodes", "2"],
        ["--nodes", ""],
        ["--clips", "9"],
        ["--fixed-batch"],
        ["--set", "last_batch=drop"],
    ):
        said = refused(main_said(capsys, *words, *option))
        assert f"{option[0]} must be used with --machine, got --device" in said
    assert "--nodes must be numbers" in refused(main_said(capsys, *words[:2], "--machine", "summit", "--nodes", ""))
