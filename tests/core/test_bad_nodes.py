from __future__ import annotations

from pathlib import Path

from summit_train.core.bad_nodes import name_bad_nodes


def test_a_node_is_named_once_after_those_that_a_person_wrote(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (path := tmp_path / "job" / "bad_nodes").write_text("# mine\nn1\n")
    assert name_bad_nodes(tmp_path, {"n1": "slow", "n2": "does not answer"}) == ["n2"]
    assert name_bad_nodes(tmp_path, {"n2": "again"}) == []
    assert path.read_text() == "# mine\nn1\nn2 does not answer\n"


def test_outside_a_job_nothing_is_written(tmp_path: Path) -> None:
    assert name_bad_nodes(tmp_path, {"n1": "slow"}) == []
    assert list(tmp_path.iterdir()) == []
