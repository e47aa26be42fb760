"""Files that earlier versions wrote: this version continues, evaluates, uses and reports them.

A folder of tests/golden/old is a version, and has what it left behind: `run`, of 12 epochs, stopped and resumed after
the eighth, with averaged weights, a noise scale and a best checkpoint; `packed`, which it was trained on; the log of
`averaging`, on three ranks, with the rarer kinds of records; and said.json: what that version predicted, and its losses
in two more epochs. None of them is ever written anew. What a version drops on purpose it must refuse in one line.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from summit_train.report.records import RunRecord
from tests.page_values import save_values
from tests.runs import records
from tests.worlds import Say, forked, main_without_reports

OLD = Path(__file__).parent / "golden" / "old"
NEAR = 1e-3  # relative, of numbers in single precision after four updates
MOST_BYTES = 300_000


@pytest.fixture(params=sorted(folder.name for folder in OLD.iterdir() if folder.is_dir()))
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a version's files, which is the present folder."""
    folder = Path(shutil.copytree(OLD / request.param, tmp_path / "old"))
    monkeypatch.chdir(folder)
    return folder


def _read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def _found(say: Say, *words: str) -> Any:
    status, out, err = say(*words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_the_files_of_a_version_are_small(old: Path) -> None:
    assert sum(path.stat().st_size for path in old.rglob("*") if path.is_file()) <= MOST_BYTES


def test_a_run_continues_as_it_did_then(old: Path) -> None:
    def work() -> int:
        os.chdir(old)
        return main_without_reports(["train", "run", "--more-epochs", "2"])

    [checkpoint], result = Path("run/checkpoints").glob("*.pt"), _read("run/eval.json")
    status, output = forked(0, work)
    assert status == 0 and f"resumes from {checkpoint}\n" in output, output
    steps = records(old / "run", "step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    losses = _read("said.json")["losses"]
    assert [step["loss"] for step in steps[-len(losses) :]] == pytest.approx(losses, rel=NEAR)
    assert _read("run/evals/epochs-12/eval.json") == result | {"overrides": {"schedule.epochs": 12}}


def test_a_run_has_the_scores_that_it_had(old: Path, say: Say) -> None:
    before, files = _read("run/eval.json"), sorted(Path("run/predictions").iterdir())
    scores = [np.load(file)["scores"] for file in files]
    found = _found(say, "eval", "run")
    for part, former in ((found, before), (found["ema"], before["ema"])):
        assert (part["top1_mean"], part["videos"]) == (former["top1_mean"], former["videos"])
    for file, expected in zip(files, scores, strict=True):
        np.testing.assert_allclose(np.load(file)["scores"], expected, rtol=NEAR, atol=NEAR)


def test_a_network_predicts_what_it_did(old: Path, say: Say) -> None:
    found, expected = (
        [{one["name"]: one["score"] for one in video["predictions"]} for video in said["videos"]]
        for said in (_found(say, "predict", "run", "videos/val.csv"), _read("said.json")["predictions"])
    )
    for scores, former in zip(found, expected, strict=True):
        assert scores == pytest.approx(former, rel=NEAR)


def test_a_packed_set_is_whole(old: Path, say: Say) -> None:
    assert say("data", "verify", "packed") == (0, "packed: 4 clips in 11 files, 21.17 kB: all checksums match\n", "")


def test_a_log_is_read_to_its_last_record(old: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    averaging, text = RunRecord("averaging"), Path("averaging/metrics.jsonl").read_text()
    log = averaging.log
    found = {
        "start": log.starts, "step": log.steps, "checkpoint": log.checkpoints, "eval": log.evals,
        "average": log.averages, "batch": log.batches, "trust_ratio": log.trust_ratios, "early_stop": [log.early_stop],
        "rank_times": log.rank_times, "slow_rank": log.slow_ranks, "warning": log.warnings,
    }  # fmt: skip
    assert averaging.notes == [] and log.early_stop is not None
    written = Counter(json.loads(line)["kind"] for line in text.splitlines())
    assert {kind: len(lines) for kind, lines in found.items()} == written
    run = RunRecord("run")
    assert run.notes == [] and len(run.log.starts) == 2 and run.best is not None and run.best.step == run.log.last_step
    monkeypatch.setattr(Figure, "savefig", save_values)
    assert say("report", "run", "averaging", "--out", "page.html") == (0, "page.html\n", "")
    assert f"{_read('run/eval.json')['top1_mean']:.2f} %" in Path("page.html").read_text(encoding="utf-8")
