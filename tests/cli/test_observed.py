"""`summit-train eval --observed`: the same on any number of ranks, the figure of several runs, mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from tests.worlds import lines, succeed


@pytest.fixture
def run(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, whose spec says that it lies there."""
    shutil.copytree(trained_run, tmp_path / "run")
    spec = tmp_path / "run/spec.yaml"
    spec.write_text(spec.read_text().replace(str(trained_run.parent), str(tmp_path)))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "run"


def _saved(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "observed.json").read_text())
    return values


def test_a_table_and_the_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Before an override --observed has no value of its own.
    assert main(["eval", str(run / "spec.yaml"), "--observed", "evaluate.crops=3"]) == 0
    printed, saved = capsys.readouterr().out.splitlines(), _saved(run)
    assert printed[0].split() == ["observed", "clip", "top-1", "stream", "top-1"]
    assert [line.split()[0] for line in printed[1:-1]] == [str(10 * tenth) for tenth in range(1, 11)]
    assert printed[-1] == "41 videos, step 20"
    assert printed[10].split()[2] == f"{saved['observed'][-1]['top1']:.2f}"
    assert (saved["name"], saved["arch"], saved["frames"], saved["crops"], saved["videos"]) == ("run", "tsm", 4, 3, 41)
    assert saved["checkpoint"].endswith("step_00000020.pt")


def test_any_number_of_ranks_gives_the_same(run: Path) -> None:
    """41 videos, which 2 does not divide."""
    found = []
    for ranks in (1, 2):
        output = succeed(ranks, "eval", str(run / "spec.yaml"), "--observed", "0.25,...,1", "--json")
        found.append(json.loads(next(line for line in lines(output) if line.startswith("{"))))
        assert found[-1] == _saved(run)
    assert found[0] == found[1]
    assert [row["fraction"] for row in found[0]["observed"]] == [0.25, 0.5, 0.75, 1.0]
    assert [set(row) for row in found[0]["observed"]] == [{"fraction", "top1", "top5"}] * 4
    assert [row["undecided"] for row in found[0]["anytime"]] == [0] * 4


def test_the_figure_of_several_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    points = [{"fraction": 0.5, "top1": 40.0}, {"fraction": 1.0, "top1": 50.0}]
    (other / "observed.json").write_text(json.dumps({"name": "other", "frames": 4, "observed": points}))
    words = ["--observed", "1", "--out", str(tmp_path / "early.svg"), "--beside", str(other), "seed=1", "--json"]
    assert main(["eval", str(run / "spec.yaml"), *words]) == 0
    assert json.loads(capsys.readouterr().out) == _saved(run)
    drawn = (tmp_path / "early.svg").read_text()
    assert "<!-- run -->" in drawn and "<!-- other -->" in drawn


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--observed", "0"], "--observed 0: '0' is not a fraction of a video"),
        (["--observed", "1.5"], "--observed 1.5: '1.5' is not a fraction"),
        (["--observed", "all"], "'all' is not a fraction"),
        (["--observed", "--checkpoints", "last:2"], "--observed takes one checkpoint, not last:2"),
        (["--observed", "--checkpoints", "none.pt"], "there is no checkpoint none.pt"),
        (["--observed", "--out", "early.docx"], "--out early.docx: the name of a figure ends in"),
        (["--observed", "--out", "a.png", "--beside", "nowhere"], "nowhere/observed.json: No such file"),
        (["--observed", "--beside", "nowhere"], "--beside draws other runs' curves: add --out"),
        (["--out", "a.png"], "add --observed"),
        (["--observed", "name=nobody"], "nobody: there is no checkpoint to evaluate"),
    ],
)
def test_mistakes(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert main(["eval", str(run / "spec.yaml"), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and part in said.err and said.err.count("\n") == 1
    assert not (run / "observed.json").exists()


def test_what_is_no_record_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "observed.json").write_text('{"name": "x"}')
    words = ["--observed", "--out", "a.png", "--beside", str(tmp_path)]
    assert main(["eval", str(run / "spec.yaml"), *words]) == 2
    assert (
        f"{tmp_path}/observed.json: is not what `summit-train eval SPEC --observed` writes" in capsys.readouterr().err
    )
