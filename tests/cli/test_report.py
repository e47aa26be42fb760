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


def test_a_page_replaces_a_page_and_a_table_of_runs_one(run_dir: Path, tmp_path: Path, say: Say) -> None:
    for _ in range(2):
        assert say("report", "--index", run_dir, "--out", tmp_path / "runs.html")[0] == 0


def test_the_page_goes_into_the_first_run_or_where_out_says(run_dir: Path, tmp_path: Path, say: Say) -> None:
    page = tmp_path / "page.html"
    assert say("report", run_dir, "--out", page) == (0, f"{page}\n", "")
    out = run_dir / "report.html"
    assert page.is_file() and not out.exists()
    assert say("report", run_dir) == (0, f"{out}\n", "") and "50.00 %" in out.read_text()


def test_all_runs_of_a_folder_go_into_a_page_and_a_csv(run_dir: Path, say: Say) -> None:
    runs = run_dir.parent
    page, csv = runs / "index.html", runs / "index.csv"
    assert say("report", "--index", runs) == (0, f"1 run: 1 unfinished\n{page}, {csv}\n", "")
    assert page.is_file() and csv.is_file()
    out = runs.parent / "elsewhere/all.html"
    status, text, _ = say("report", "--index", runs, "--out", out, "--json")
    values = json.loads(text)
    assert status == 0 and values["page"] == str(out) and values["csv"] == str(out.with_suffix(".csv"))
    assert values["states"]["unfinished"] == 1 and values["runs"][0]["name"] == "tiny"
    assert json.loads(say("report", run_dir, "--json")[1]) == {"page": str(run_dir / "report.html")}


def test_runs_go_to_another_program(run_dir: Path, say: Say) -> None:
    out = run_dir / "csv"
    assert say("report", run_dir, "--to", "csv", "--out", out) == (0, f"{out}/tiny.csv\n", "")
