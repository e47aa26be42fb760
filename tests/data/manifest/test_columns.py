from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.data.manifest.columns import ColumnWriter, StoredBytes, StoredRows, map_column, pieces, spread


def write_column(path: Path, values: np.ndarray | bytes, dtype: object) -> None:
    with ColumnWriter(path, dtype) as writer:  # type: ignore[arg-type]
        writer.append(values)


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
    with pytest.raises(ValueError, match=r"a\.npy: cannot be read as a column: No such file"):
        map_column(path, np.int32)
    write_column(path, np.arange(4), np.int32)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"a\.npy: is no column of int64, or it is damaged"):
        map_column(path, np.int64)
    assert map_column(path, np.int64, np.int32).tolist() == [0, 1, 2, 3]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.npy: is no column"):
            map_column(path, np.int32)
    for place in range(512):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"a\.npy: is no column"):
            map_column(path, np.int32)


def test_rows_of_fields_are_numpys_too(tmp_path: Path) -> None:
    dtype = np.dtype([("shard", "<u4"), ("start", "<i8")])
    rows = np.array([(1, 2), (3, 4), (5, 6)], dtype)
    write_column(tmp_path / "a.npy", rows, dtype)
    assert np.array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), rows)
    assert np.array_equal(StoredRows(tmp_path / "a.npy", dtype)[1:3], rows[1:])
