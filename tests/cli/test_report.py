from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.worlds import Say


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny"
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text("name: tiny\n")
    (path / "eval.json").write_text(json.dumps({"top1_mean": 50.0, "checkpoints": []}))
    return path


def test_the_page_goes_into_the_first_run_or_where_out_says(run_dir: Path, tmp_path: Path, say: Say) -> None:
    page = tmp_path / "page.html"
    assert say("report", run_dir, "--out", page) == (0, f"{page}\n", "")
    out = run_dir / "report.html"
    assert page.is_file() and not out.exists()
    assert say("report", run_dir) == (0, f"{out}\n", "") and "50.00 %" in out.read_text()


def test_what_is_not_a_run_and_where_no_page_can_be_written_is_refused(run_dir: Path, tmp_path: Path, say: Say) -> None:
    below_a_file = run_dir / "spec.yaml" / "page.html"
    for words, parts in (
        ((tmp_path,), ["not a run"]),
        ((run_dir, "--out", below_a_file), ["spec.yaml", "try another place with --out FILE.html"]),
        ((), ["RUN_DIR"]),
    ):
        status, out, err = say("report", *words)
        assert (status, out) == (2, "") and all(part in err for part in parts), err
