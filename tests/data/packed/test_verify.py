from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.data.packed.format import read_pack
from summit_train.data.packed.read import stray_files, verify_files
from tests.data.packed.conftest import NUM_VIDEOS, PackSet, content_of


def _complaints(folder: Path) -> list[str]:
    pack = read_pack(folder)
    lines = [line for lines in verify_files(folder, pack, [*pack.shards, *pack.files], 2) for line in lines]
    return lines + stray_files(folder, pack)


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_set_as_it_was_packed(pack_set: PackSet, kind: str) -> None:
    assert _complaints(pack_set(kind=kind)) == []


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_every_flipped_byte_in_any_file_is_found(pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    files = content_of(out)
    ends = np.cumsum([len(content) for content in files.values()])
    generator = np.random.default_rng(3)
    # Half of them anywhere in the bytes, half in any file, so that the small ones have their share.
    for number in range(400):
        which = int(np.searchsorted(ends, generator.integers(ends[-1]), "right"))
        name = list(files)[which if number % 2 else int(generator.integers(len(files)))]
        place, value = int(generator.integers(len(files[name]))), int(generator.integers(1, 256))
        flipped = bytearray(files[name])
        flipped[place] ^= value
        (out / name).write_bytes(flipped)
        assert _verdict(out) == 1, f"{name}, byte {place} ^ {value}"
        (out / name).write_bytes(files[name])
    assert _verdict(out) == 0


def _verdict(folder: Path) -> int:
    """What the command makes of it, without its printing."""
    from contextlib import redirect_stderr, redirect_stdout

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return main(["data", "verify", str(folder), "--workers", "1"])


def test_damaged_clips_are_named(pack_set: PackSet, capsys: pytest.CaptureFixture[str]) -> None:
    out = pack_set()
    clip = np.load(out / "index" / "clips.npy")[1]
    shard = out / f"{clip['shard']:06}.tar"
    whole = bytearray(shard.read_bytes())
    whole[clip["start"] + 5] ^= 1
    shard.write_bytes(whole)
    assert _complaints(out) == [f"{shard}: has other bytes; damaged: run/clip 1.mp4"]
    assert main(["data", "verify", str(out)]) == 1
    assert "packed: 1 of its files are not as they were packed:\n" in capsys.readouterr().err
    whole[clip["start"] + 5] ^= 1
    whole[3] ^= 1
    shard.write_bytes(whole)
    assert _complaints(out) == [f"{shard}: has other bytes; all of its clips are whole: what differs lies between them"]


def test_what_is_missing_torn_or_too_much(pack_set: PackSet) -> None:
    out = pack_set()
    (out / "000000.tar").unlink()
    torn = out / "000001.tar"
    torn.write_bytes(torn.read_bytes()[:100])
    (out / "000009.tar").write_bytes(b"")
    (out / "index" / "clips.npy").unlink()
    lines = _complaints(out)
    assert lines[0] == f"{out}/000000.tar: No such file or directory"
    assert lines[1].startswith(f"{torn}: has 100 bytes instead of ")
    assert lines[2] == f"{out}/index/clips.npy: No such file or directory"
    assert lines[3:] == [f"{out}/000009.tar: does not belong to the set"]


def test_a_torn_shard_names_its_first_clips(pack_set: PackSet) -> None:
    out = pack_set()
    shard = out / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:600])
    (line,) = _complaints(out)
    assert "damaged: walk/clip 0.mp4" in line


def test_the_command(pack_set: PackSet, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = pack_set()
    assert main(["data", "verify", str(out)]) == 0
    assert f"{out}: {NUM_VIDEOS} clips in " in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path / "absent")]) == 2
    assert "no such folder" in capsys.readouterr().err
    shutil.rmtree(out / "index")
    (out / "pack.json").unlink()
    assert main(["data", "verify", str(out)]) == 1
    assert "must be a finished packed set, but lacks pack.json" in capsys.readouterr().err
