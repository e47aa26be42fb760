"""Training from packed sets, and from their copies on the nodes' disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.data.packed.stage import stage_sets
from summit_train.spec import load_spec
from tests.conftest import WriteSpec
from tests.runs import records, rewound
from tests.worlds import command, train


@pytest.fixture(scope="session")
def packed(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded set's two manifests, packed as bytes and as JPEG: bytes/train, bytes/val, jpeg/train, jpeg/val."""
    out = tmp_path_factory.mktemp("packed")
    for kind in ("bytes", "jpeg"):
        for split in ("train", "val"):
            words = [str(motion_set / f"{split}.csv"), str(out / kind / split), "--kind", kind]
            assert main(["data", "pack", *words, "--shard-size", "60K", "--workers", "0"]) == 0
    return out


def _data(packed: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"train": str(packed / kind / "train"), "val": str(packed / kind / "val"), **more}


def _losses(spec: Path, *overrides: str) -> list[float]:
    return [step["loss"] for step in records(load_spec(spec, overrides).run_path, "step")]


def _train(spec: Path, *overrides: str) -> list[float]:
    train(0, spec, *overrides)
    return _losses(spec, *overrides)


def test_packed_bytes_train_to_the_bit_and_jpeg_closely(write_spec: WriteSpec, packed: Path, tmp_path: Path) -> None:
    """A run may continue from the files to their packed bytes, and to other pixels only when asked."""
    raw = _train(write_spec("raw"))
    for name in ("moved", "other"):
        rewound(tmp_path / "runs/raw", name, 20)
    moved = _train(write_spec("moved", data=_data(packed, "bytes")))
    assert moved == raw + raw[10:]  # the second epoch was trained twice
    assert command(0, "train", str(write_spec("other", data=_data(packed, "jpeg"))))[0] == 2
    jpeg = _train(write_spec("jpeg", data=_data(packed, "jpeg")))
    assert jpeg != raw
    assert max(abs(a - b) for a, b in zip(jpeg, raw, strict=True)) < 0.25


def test_ranks_train_from_a_staged_copy(write_spec: WriteSpec, packed: Path, tmp_path: Path) -> None:
    schedule = {"epochs": 1}
    raw = write_spec("raw", schedule=schedule)
    train(2, raw)
    spec = write_spec("staged", data=_data(packed, "bytes", workers=1, stage=str(tmp_path / "node")), schedule=schedule)
    first = train(2, spec)
    assert first.count("staged to") == 1 and " on 1 node: " in first and "warning" not in first
    assert _losses(spec) == _losses(raw)
    assert len(list((tmp_path / "node").glob("*/pack.json"))) == 2
    again = train(2, str(spec), "name=again")
    assert ": 0 bytes copied, " in again


class _Node(World):
    """One rank of four on two nodes, of which the others have done the same."""

    size = 4

    def __init__(self, local_rank: int) -> None:
        super().__init__()
        self.local_rank = local_rank

    def gather(self, value: Any) -> Any:
        return [value, [], value, []]


def _staged(spec: Path, world: World) -> list[str]:
    values = load_spec(spec)
    manifests = [Dataset.open(values, which).manifest for which in ("val", "train")]
    with Watchdog(world, None) as watchdog:
        return stage_sets(values.data.stage, manifests, world, watchdog)


@pytest.mark.parametrize("leads", [True, False])
def test_one_rank_of_a_node_copies_and_one_warning_is_for_all(
    write_spec: WriteSpec, packed: Path, tmp_path: Path, leads: bool
) -> None:
    spec = write_spec("nodes", data=_data(packed, "bytes", stage=str(tmp_path / "no" / "disk")))
    said = _staged(spec, _Node(0 if leads else 1))
    if leads:
        assert said[0].endswith("on 2 nodes: 0 bytes copied, 0 were there")
        assert len(said) == 2 and said[1].endswith(" (and 3 more such copies)")
    else:
        assert said == []


def test_what_cannot_be_staged_is_said(write_spec: WriteSpec, tmp_path: Path) -> None:
    for stage, said in (("auto", "data.stage is auto, but"), (str(tmp_path / "node"), "is not a packed set")):
        assert said in _staged(write_spec("raw", data={"stage": stage}), World())[0]
    assert _staged(write_spec("none"), World()) == []
