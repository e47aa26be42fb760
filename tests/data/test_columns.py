from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.data.columns import ColumnWriter, StoredBytes, map_column, pieces, spread, write_column


@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8", "u1", "?"])
@pytest.mark.parametrize("lengths", [[], [0], [3], [5, 0, 1_000]])
def test_what_is_written_piece_by_piece_is_a_numpy_file(tmp_path: Path, dtype: str, lengths: list[int]) -> None:
    parts = [np.arange(length).astype(dtype) for length in lengths]
    with ColumnWriter(tmp_path / "a.npy", dtype) as writer:
        for part in parts:
            writer.append(part)
    wanted = np.concatenate([np.zeros(0, dtype), *parts])
    loaded = np.load(tmp_path / "a.npy")
    mapped = map_column(tmp_path / "a.npy", dtype)
    for array in (loaded, mapped):
        assert array.dtype == np.dtype(dtype)
        assert np.array_equal(array, wanted)
    assert len(mapped) == 0 or not mapped.flags.writeable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), start=st.integers(-10, 310), stop=st.integers(-10, 310))
def test_stored_bytes_are_sliced_as_bytes_are(tmp_path: Path, content: bytes, start: int, stop: int) -> None:
    write_column(tmp_path / "b.npy", content, np.uint8)
    stored = StoredBytes(tmp_path / "b.npy")
    assert len(stored) == len(content)
    assert stored[max(0, start) : max(0, start, stop)] == content[max(0, start) : max(0, start, stop)]
    assert b"".join(pieces(stored)) == content


def test_pieces_are_the_bytes_of_the_whole() -> None:
    values = np.arange(3_000_000, dtype=np.uint32)
    assert b"".join(pieces(values, "<i8")) == values.astype("<i8").tobytes()


def test_spread_says_where_each_begins() -> None:
    assert spread(np.array([3, 0, 2])).tolist() == [0, 3, 3, 5]
    assert spread(np.array([], np.int64)).tolist() == [0]


def test_what_is_no_such_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(ValueError, match=r"a\.npy: cannot be read as a column"):
        map_column(path, np.int32)
    write_column(path, np.arange(4), np.int32)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds int32 \(4,\), wanted one dimension of int64"):
        map_column(path, np.int64)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.npy"):
            map_column(path, np.int32)
    np.save(path, np.array([None], object))
    with pytest.raises(ValueError, match="cannot be read as a column"):
        map_column(path, np.int32)
