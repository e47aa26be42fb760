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
from summit_train.scaling.roofline import DEVICES, LAUNCH_S, Device, published_steps, roofline
from summit_train.spec import Spec, load_spec
from tests.detectors import detector_spec
from tests.worlds import main_said, refused

FAST = Device("made up", math.inf, math.inf, math.inf)


def spec_with(*words: str) -> Spec:
    return load_spec("shipped:kinetics/tsm_r50_8f", ["model.width=0.25", "scale.clips_per_gpu=2", *words])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_roofline_by_hand(precision: str) -> None:
    spec = spec_with(f"precision={precision}")
    idle = roofline(spec, FAST)
    assert idle["roofline_s"] == pytest.approx(LAUNCH_S * idle["launches"], rel=1e-12)
    network = count_network(spec)
    # Forward and two gradients, but for that of the clips.
    assert idle["flops"] == 2 * 2 * (3 * network.multiply_adds - network.layers[0].multiply_adds)
    peaks = {"fp32": (1e12, math.inf), "fp16": (math.inf, 1e12), "bf16": (math.inf, 1e12)}[precision]
    computing = roofline(spec, Device("made up", *peaks, math.inf))
    assert computing["roofline_s"] - idle["roofline_s"] == pytest.approx(idle["flops"] / 1e12, rel=1e-9)
    assert computing["flops_s"] == idle["flops"] / 1e12
    moving = roofline(spec, replace(FAST, bytes_per_second=1e11))
    assert moving["roofline_s"] - idle["roofline_s"] == pytest.approx(idle["moved"] / 1e11, rel=1e-6)
    # Neither alone, and both under each other where an operation has both.
    both = roofline(spec, Device("made up", *peaks, 1e11))["roofline_s"]
    alone = (computing["roofline_s"], moving["roofline_s"])
    assert max(alone) < both < sum(alone) - idle["roofline_s"]


def test_sixteen_bits_halve_what_the_passes_move_and_not_the_update() -> None:
    wide, half = (roofline(spec_with(f"precision={precision}"), FAST)["moved"] for precision in ("fp32", "fp16"))
    weights = 4 * count_network(spec_with()).parameters
    update = 2 * half - wide
    assert 3 * weights < update < 5 * weights  # SGD: weights, gradients, momentum, and the gradients' norm


def test_the_published_steps_are_slower_than_their_rooflines_and_have_the_published_utilisation() -> None:
    """The utilisation: images a second x 24.6 GFLOP over the peak."""
    found = {}
    for name, device in DEVICES.items():
        for row in published_steps(name):
            assert 1.1 < row["ratio"] == row["step_s"] / row["roofline_s"] < 6
            if row["label"].startswith("ResNet-50"):
                peak = device.fp32 if row["precision"] == "fp32" else device.half
                assert row["flops_s"] / row["step_s"] == pytest.approx(
                    row["clips"] / row["step_s"] * 24.6e9 / peak, rel=0.02
                )
                found[name, row["precision"]] = round(100 * row["flops_s"] / row["step_s"])
    assert found == {
        ("v100", "fp32"): 57, ("v100", "fp16"): 23, ("a100", "fp32"): 15, ("a100", "fp16"): 19, ("h100", "fp16"): 17,
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_precision_that_a_gpu_lacks_is_refused(precision: str) -> None:
    with pytest.raises(UserError, match=f"fp32 or fp16 on V100.*, got {precision}"):
        roofline(spec_with(f"precision={precision}"), DEVICES["v100"])


def test_steps_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    own = spec_with(f"model.arch={tmp_path}/net.py:net", "model.backbone=null", "model.width=1")
    averaging = spec_with("parallel.method=averaging")
    for spec in (own, averaging, detector_spec(precision="fp32")):
        with pytest.raises(UserError, match="--device counts synchronous steps"):
            roofline(spec, DEVICES["v100"])


def test_the_second_call_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["simulate", "shipped:kinetics/tsm_r50_8f", "--device", "h100", "precision=bf16", "model.width=0.25"]
    program = "import sys; sys.modules['torch'] = None; from summit_train.__main__ import main; sys.exit(main())"

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *more], capture_output=True, text=True)

    first, again = run("-m", "summit_train", *words), run("-c", program, *words)
    assert (again.stdout, again.stderr, again.returncode) == (first.stdout, "", 0)


def test_the_table_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", "shipped:kinetics/tsm_r50_8f", "--device", "h100", "precision=bf16", "model.width=0.25")
    table = main_said(capsys, *words)[1].splitlines()
    assert table[0].endswith("nothing was measured") and "one H100 (SXM5)" in table[0]
    own, published = (next(line for line in table if line.startswith(name)) for name in ("tsm_r50_8f ", "ResNet-50"))
    values = json.loads(main_said(capsys, *words, "--json")[1])
    assert f"{values['roofline_s']:.4f}" in own and f"{values['published'][0]['step_s']:.4f}" in published
    assert values["best_s"] == values["published"][0]["ratio"] * values["roofline_s"]
    assert f"{values['best_s']:.4f} s" in "".join(table)
    assert json.loads(main_said(capsys, *words[:4], "--json")[1])["best_s"] is None  # none published in fp32
    for option in (["--nodes", "2"], ["--clips", "9"], ["--fixed-batch"], ["--set", "last_batch=drop"]):
        assert f"{option[0]} must be used with --machine" in refused(main_said(capsys, *words, *option))
