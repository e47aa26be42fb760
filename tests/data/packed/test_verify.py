from __future__ import annotations

import shutil

import numpy as np
import pytest

from summit_train.core.errors import UserError
from tests.data.packed.conftest import NUM_VIDEOS, PackSet, complaints, content_of
from tests.worlds import Say


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_every_flipped_byte_in_any_file_is_found(pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    files = content_of(out)
    ends = np.cumsum([len(content) for content in files.values()])
    generator = np.random.default_rng(3)
    # Half of them anywhere in the bytes, half in any file, so that the small ones have their share.
    for number in range(120):
        which = int(np.searchsorted(ends, generator.integers(ends[-1]), "right"))
        name = list(files)[which if number % 2 else int(generator.integers(len(files)))]
        place, value = int(generator.integers(len(files[name]))), int(generator.integers(1, 256))
        flipped = bytearray(files[name])
        flipped[place] ^= value
        (out / name).write_bytes(flipped)
        if name == "pack.json":
            with pytest.raises(UserError, match="is damaged"):
                complaints(out)
        else:
            assert complaints(out) == [f"{out / name}: has other bytes"], f"byte {place} ^ {value}"
        (out / name).write_bytes(files[name])
    assert complaints(out) == []


def test_the_command_names_what_is_missing_torn_or_too_much(pack_set: PackSet, say: Say) -> None:
    out = pack_set()
    status, printed, _ = say("data", "verify", out)
    assert status == 0 and f"{out}: {NUM_VIDEOS} clips in " in printed
    (out / "000009.tar").write_bytes(b"")
    assert "packed: 1 file damaged, missing or not part of the set:\n" in say("data", "verify", out)[2]
    size = len((out / "000001.tar").read_bytes())
    (out / "000000.tar").unlink()
    (out / "000001.tar").write_bytes(b"0" * 100)
    (out / "index" / "clips.npy").unlink()
    lines = [
        f"{out}/000000.tar: No such file or directory",
        f"{out}/000001.tar: has 100 bytes instead of {size:,}",
        f"{out}/index/clips.npy: No such file or directory",
        f"{out}/000009.tar: does not belong to the set",
    ]
    named = "packed: 4 files damaged, missing or not part of the set:\n" + "\n".join(lines)
    lacking = "must be a finished packed set, but lacks pack.json"
    for change, failed, message in (
        (lambda: None, 1, named),
        ((out / "pack.json").unlink, 1, lacking),
        (lambda: shutil.rmtree(out), 2, "no such folder"),
    ):
        change()
        status, _, said = say("data", "verify", out)
        assert status == failed and message in said
