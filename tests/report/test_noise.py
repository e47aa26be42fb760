"""The noise scale in the report: the formulas by hand, the standard error by simulation, the page."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest

from summit_train.core.text import noise_text
from summit_train.report.noise import batch_rows, noise_section, pooled
from summit_train.report.page import render
from summit_train.report.records import RunRecord
from summit_train.report.tables import notes_of


def test_the_cost_of_a_batch_by_hand() -> None:
    """Noise scale 96: a batch of 32 takes 4 times the fewest steps and 4/3 of the fewest clips."""
    rows = batch_rows(32, 96)
    assert rows[0] == ("32", "4.00", "1.33", "100 %", "100 %")
    # 128 clips: 1 + 96/128 = 1.75 of 4 steps; 1 + 128/96 = 2.33 of 1.33 clips
    assert rows[2] == ("128", "1.75", "2.33", "44 %", "175 %")
    assert rows[-1][0] == "2,048"
    assert batch_rows(96, 96)[0][1:3] == ("2.00", "2.00")  # equation 2.11: (2 - 1) (2 - 1) = 1


def test_the_ratio_of_the_means_with_its_error_by_hand() -> None:
    """Variances 8 and 4, squares 3 and 1: 12/4 = 3; both residuals v - 3 s are -1 and 1, so sqrt(2 / 1 / 2) / 2."""
    found = pooled([(3.0, 8.0), (1.0, 4.0)])
    assert (found.count, found.value, found.error) == (2, 3.0, 0.5)
    assert found.text == "3 ± 0.5 clips"
    assert pooled([(2.0, 8.0)]).text == "4 clips"
    assert pooled([(-2.0, 8.0), (1.0, 8.0)]).text == "unclear"


def test_the_standard_error_is_the_scatter_of_repeated_measurements() -> None:
    draw = random.Random(5)
    runs = [pooled([(draw.gauss(2, 1), draw.gauss(14, 3)) for _ in range(200)]) for _ in range(400)]
    values, errors = [run.value or 0.0 for run in runs], [run.error or 0.0 for run in runs]
    assert statistics.fmean(values) == pytest.approx(7, rel=0.01)
    assert statistics.stdev(values) == pytest.approx(statistics.fmean(errors), rel=0.1)


def test_a_noise_scale_for_people() -> None:
    for clips, text in ((3.14159, "3.14 clips"), (999.4, "999 clips"), (12345.0, "12,300 clips"), (None, "unclear")):
        assert noise_text(clips) == text
    assert noise_text(float("inf")) == "unclear"


def _noisy(lines: list[dict[str, Any]], every: int = 2) -> list[dict[str, Any]]:
    """Every second step measured: tr(Sigma) 64, |G|^2 2 in the first half of the 40 steps and 1 in the second."""
    for line in lines:
        if line["kind"] == "step" and line["step"] % every == 0:
            square = 2.0 if line["step"] <= 20 else 1.0
            line |= {"noise_scale": 64 / square, "gradient_variance": 64.0, "gradient_square": square}
    return lines


@pytest.mark.usefixtures("undrawn")
def test_the_page_shows_it_with_the_batches_or_as_unclear(write_run, run_records) -> None:
    lines = _noisy(run_records())
    run = RunRecord(write_run("noisy", lines=lines))
    section = noise_section(run)
    assert section is not None and section["whole"].value == pytest.approx(64 / 1.5)
    assert [part.value for part in section["parts"]] == [32, 32, 64, 64]
    page = render([run])
    for text in ("Gradient noise scale", "from 20 measured steps", "by quarter of the run", "32 ± 0 clips", "1,024"):
        assert text in page, text
    assert "<b>Noise scale.</b>" in page
    for line in lines:
        if "noise_scale" in line:
            line |= {"noise_scale": None, "gradient_square": -1.0}
    page = render([RunRecord(write_run("unclear", lines=lines))])
    assert "unclear, from 20 measured steps" in page and "cannot be told from its scatter" in page
    assert "<b>Noise scale.</b>" not in page


@pytest.mark.usefixtures("undrawn")
def test_one_virtual_gpu_is_noted_and_a_run_without_measurements_shows_nothing(write_run) -> None:
    path = write_run("one", leave_out=("metrics.jsonl",))
    assert "oise scale" not in render([RunRecord(path)])
    plan = json.loads((path / "plan.json").read_text()) | {"virtual_gpus": 1}
    (path / "plan.json").write_text(json.dumps(plan))
    assert "No gradient noise scale" not in render([RunRecord(path)])  # of before there was one
    (path / "spec.yaml").write_text((path / "spec.yaml").read_text() + "noise_scale: {every_steps: 10}\n")
    assert any("No gradient noise scale: one virtual GPU" in note for note in notes_of(RunRecord(path)))
