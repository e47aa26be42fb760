"""What the commands that use a trained network share."""

from __future__ import annotations

from pathlib import Path

import pytest

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
