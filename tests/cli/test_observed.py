"""`summit-train eval --observed`: the same on any number of ranks, the figure of several runs, mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.worlds import Say, lines, refused, succeed


@pytest.fixture
def run(trained_run: Path, motion_set: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose spec has the copy's place and nine of its validation videos."""
    shutil.copytree(trained_run, tmp_path / "run")
    header, *rows = (motion_set / "val.csv").read_text().splitlines()[:10]
    (tmp_path / "val.csv").write_text("\n".join([header, *rows]))
    shutil.copy(motion_set / "classes.txt", tmp_path)
    spec = tmp_path / "run/spec.yaml"
    values = yaml.safe_load(spec.read_text())
    values["data"] |= {"val": str(tmp_path / "val.csv"), "root": str(motion_set)}
    spec.write_text(yaml.safe_dump(values | {"run_dir": str(tmp_path)}))
    return tmp_path / "run"


def _saved(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "observed.json").read_text())
    return values


def test_a_table_and_the_file(run: Path, say: Say) -> None:
    # Before an override --observed has no value of its own.
    status, out, _ = say("eval", run / "spec.yaml", "--observed", "evaluate.crops=3")
    assert status == 0
    printed, saved = out.splitlines(), _saved(run / "evals/crops-3")
    assert printed.pop() == f"written to {run}/evals/crops-3/observed.json" and not (run / "observed.json").exists()
    assert saved["overrides"] == {"evaluate.crops": 3}
    assert printed[0].split() == ["observed", "clip", "top-1", "stream", "top-1"]
    assert [line.split()[0] for line in printed[1:-1]] == [str(10 * tenth) for tenth in range(1, 11)]
    assert printed[-1] == "9 videos, step 20"
    assert printed[10].split()[2] == f"{saved['observed'][-1]['top1']:.2f}"
    assert (saved["name"], saved["arch"], saved["frames"], saved["crops"], saved["videos"]) == ("run", "tsm", 4, 3, 9)
    assert saved["checkpoint"].endswith("step_00000020.pt")


def test_any_number_of_ranks_gives_the_same(run: Path) -> None:
    """Nine videos, which 2 does not divide."""
    found = []
    for ranks in (1, 2):
        output = succeed(ranks, "eval", str(run / "spec.yaml"), "--observed", "0.25,...,1", "--json")
        found.append(json.loads(next(line for line in lines(output) if line.startswith("{"))))
        assert found[-1].pop("written") == str(run / "observed.json") and found[-1] == _saved(run)
    assert found[0] == found[1]
    assert [row["fraction"] for row in found[0]["observed"]] == [0.25, 0.5, 0.75, 1.0]
    assert [set(row) for row in found[0]["observed"]] == [{"fraction", "top1", "top5"}] * 4
    assert [row["undecided"] for row in found[0]["anytime"]] == [0] * 4


def test_the_figure_of_several_runs(run: Path, tmp_path: Path, say: Say) -> None:
    other = tmp_path / "other"
    other.mkdir()
    points = [{"fraction": 0.5, "top1": 40.0}, {"fraction": 1.0, "top1": 50.0}]
    (other / "observed.json").write_text(json.dumps({"name": "other", "frames": 4, "observed": points}))
    words = ["--observed", "1", "--out", tmp_path / "early.svg", "--beside", other, "seed=1", "--json"]
    status, out, _ = say("eval", run / "spec.yaml", *words)
    assert status == 0 and json.loads(out) == _saved(run) | {"written": str(run / "observed.json")}
    drawn = (tmp_path / "early.svg").read_text()
    assert "<!-- run -->" in drawn and "<!-- other -->" in drawn


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--observed", "0"], "--observed 0: '0' is not a fraction of a video"),
        (["--observed", "1.5"], "--observed 1.5: '1.5' is not a fraction"),
        (["--observed", "all"], "'all' is not a fraction"),
        (["--observed", "--checkpoints", "last:2"], "--observed takes one checkpoint, not last:2"),
        (["--observed", "--checkpoints", "none.pt"], "checkpoint none.pt not found"),
        (["--observed", "--out", "early.docx"], "--out early.docx: the name of a figure ends in"),
        (["--observed", "--out", "a.png", "--beside", "nowhere"], "nowhere/observed.json: No such file"),
        (["--observed", "--out", "/dev/null/a.png"], "--out /dev/null/a.png: cannot be written"),
        (["--observed", "--beside", "nowhere"], "--beside must be used with --out"),
        (["--out", "a.png"], "must be used with --observed"),
        (["--observed", "name=nobody"], "nobody: no checkpoint of a whole epoch to evaluate"),
    ],
)
def test_mistakes(run: Path, say: Say, words: list[str], part: str) -> None:
    assert part in refused(say("eval", run / "spec.yaml", *words))
    assert not (run / "observed.json").exists()


def test_what_is_no_record_of_a_run(run: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "observed.json").write_text('{"name": "x"}')
    line = refused(say("eval", run / "spec.yaml", "--observed", "--out", "a.png", "--beside", tmp_path))
    assert f"{tmp_path}/observed.json: is not what `summit-train eval SPEC --observed` writes" in line
