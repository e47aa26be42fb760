from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.worlds import Say, refused


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny"
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text("name: tiny\n")
    (path / "eval.json").write_text(json.dumps({"top1_mean": 50.0, "checkpoints": []}))
    return path


def test_a_page_replaces_no_other_file(run_dir: Path, tmp_path: Path, say: Say) -> None:
    spec, table = run_dir / "spec.yaml", tmp_path / "clips.csv"
    table.write_text("path,label\n")
    before = spec.read_bytes()
    for words, wrong in (
        ((run_dir, "--out", spec), f"{spec}: already exists and is not a page; give another name with --out"),
        (("--index", run_dir, "--out", tmp_path / "clips.html"), f"{table}: already exists and is not a table of runs"),
    ):
        status, _, err = say("report", *words)
        assert status == 2 and wrong in err
    assert spec.read_bytes() == before and table.read_text() == "path,label\n"
    for _ in range(2):  # a page replaces a page, and a table of runs one
        assert say("report", "--index", run_dir, "--out", tmp_path / "runs.html")[0] == 0


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
        ((run_dir, "--out", below_a_file), [f"--out {below_a_file}: cannot be written: Not a directory"]),
        # Before the runs are read, which takes long.
        ((tmp_path, "--out", below_a_file), [f"--out {below_a_file}: cannot be written"]),
        (("--index", tmp_path / "none", "--out", below_a_file), [f"--out {below_a_file}: cannot be written"]),
        ((), ["RUN_DIR"]),
    ):
        status, out, err = say("report", *words)
        assert (status, out) == (2, "") and all(part in err for part in parts), err


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


def test_runs_go_to_another_program_and_options_that_exclude_each_other_are_refused(run_dir: Path, say: Say) -> None:
    out = run_dir / "csv"
    assert say("report", run_dir, "--to", "csv", "--out", out) == (0, f"{out}/tiny.csv\n", "")
    for words, reason in (
        (("--index", run_dir.parent, run_dir), "--index must be used without RUN_DIR"),
        ((run_dir, "--to", "csv"), "--to csv must be used with --out DIR"),
        ((run_dir.parent, "--to", "csv", "--out", run_dir / "spec.yaml"), "spec.yaml: cannot be written: "),
    ):
        assert reason in refused(say("report", *words))
