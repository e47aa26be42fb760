"""What the commands that use a trained network share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.core.files import check_output
from summit_train.data.manifest.clip import Clip
from summit_train.inference.arguments import report_bad
from tests.worlds import main_said


@pytest.mark.parametrize("words", [("cam", "run", "a.mp4", "--out"), ("export", "run", "--out"), ("stream", "run")])
def test_several_ranks_are_refused_where_the_work_is_for_one(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    reason = "is one process and shares no work among ranks; start it without mpirun, srun, jsrun or torchrun"
    said = main_said(capsys, *words, tmp_path / "out")
    assert said == (2, "", f"summit-train: {words[0]} {reason}\n") and list(tmp_path.iterdir()) == []


def test_bad_videos_are_named_up_to_twenty_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report_bad([], 3, "")
    assert capsys.readouterr().err == ""
    odd = Clip(os.fsdecode(b"\xff.mp4"), is_reversed=True)
    report_bad([(odd, "is empty")] * 21, 1_021, "all.csv names all")
    said = capsys.readouterr().err.splitlines()
    assert said[:20] == ["\\udcff.mp4 backwards: is empty"] * 20
    assert said[20:] == [
        "... and 1 more; all.csv names all",
        "summit-train: 21 of 1,021 videos could not be read",
    ]


def test_a_file_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_output("--out", tmp_path, tmp_path / "a.csv")
    with pytest.raises(UserError, match=r"^--out x: cannot be written: Not a directory$"):
        check_output("--out", "x", tmp_path / "file/a.csv")
