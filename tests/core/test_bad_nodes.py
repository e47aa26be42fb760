from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.bad_nodes import Spares, bad_nodes, name_bad_nodes, spares


def test_a_node_is_named_once_after_those_that_a_person_wrote(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (path := tmp_path / "job" / "bad_nodes").write_text("# mine\nn1\n")
    assert name_bad_nodes(tmp_path, {"n1": "slow", "n2": "does not answer"}) == ["n2"]
    assert name_bad_nodes(tmp_path, {"n2": "again"}) == []
    assert path.read_text() == "# mine\nn1\nn2 does not answer\n"


def test_outside_a_job_nothing_is_written(tmp_path: Path) -> None:
    assert name_bad_nodes(tmp_path, {"n1": "slow"}) == []
    assert list(tmp_path.iterdir()) == []
    assert spares(tmp_path) == Spares(0, 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("# n0\n\n n1 Xid 74\n  # n2\n", ["n1"]),
        ("n1\r\nn2 slow\r\n", ["n1", "n2"]),
        ("n1: ECC\nn2:ECC\nn3 : ECC", ["n1", "n2", "n3"]),
        ("n1,n2\nn3;slow\nn4, n5\n", ["n1", "n2", "n3", "slow", "n4"]),
        ("10.0.0.1\nfe80::1 slow\nn1.hsn\n", ["10.0.0.1", "fe80::1", "n1.hsn"]),
        ("n[4-6]\n", ["n[4-6]"]),  # the job script refuses it
    ],
)
def test_a_line_names_nodes_as_people_write_them(tmp_path: Path, text: str, names: list[str]) -> None:
    assert bad_nodes(tmp_path) == []
    (tmp_path / "job").mkdir()
    (tmp_path / "job/bad_nodes").write_text(text, newline="")
    assert bad_nodes(tmp_path) == names


@pytest.mark.parametrize("before", [b"n1: ECC\r\nn2,slow", b"\xef\xbb\xbfn1\n# \xfcberhitzt\nn2"])
def test_a_node_is_added_on_a_line_of_its_own(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "job").mkdir()
    (path := tmp_path / "job" / "bad_nodes").write_bytes(before)
    assert name_bad_nodes(tmp_path, {"n1": "again", "n2": "again"}) == []
    assert path.read_bytes() == before
    assert name_bad_nodes(tmp_path, {"n2": "again", "n3": "slow"}) == ["n3"]
    assert path.read_bytes() == before + b"\nn3 slow\n"
