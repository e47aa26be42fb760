"""Training from packed sets, and from their copies on the nodes' disks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.data.packed.stage import stage_sets
from summit_train.spec import load_spec
from tests.conftest import ONLINE, WriteSpec, made_once
from tests.runs import records, rewound
from tests.worlds import command, train


@pytest.fixture(scope="session")
def packed(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded set's two manifests packed as bytes, train and val; and the first one as JPEG."""

    def make(folder: Path) -> None:
        for split, kind, name in (("train", "bytes", "train"), ("val", "bytes", "val"), ("train", "jpeg", "jpeg")):
            words = [str(motion_set / f"{split}.csv"), str(folder / name), "--kind", kind]
            assert main(["data", "pack", *words, "--shard-size", "60K", "--workers", "0"]) == 0

    return made_once(tmp_path_factory, "packed_motion", make)


def _data(packed: Path, **more: Any) -> dict[str, Any]:
    return {"train": str(packed / "train"), "val": str(packed / "val"), **more}


def _losses(run: Path) -> list[float]:
    return [step["loss"] for step in records(run, "step")]


def test_a_run_continues_from_files_to_their_packed_bytes_and_not_to_other_pixels(
    write_spec: WriteSpec, packed: Path, trained_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained_run, tmp_path / "runs/whole")
    for name in ("moved", "other"):
        rewound(tmp_path / "runs/whole", name, 20)
    train(0, write_spec("moved", model=ONLINE, data=_data(packed)))
    raw = _losses(trained_run)
    assert _losses(tmp_path / "runs/moved") == raw + raw[10:]  # the second epoch was trained twice
    other = write_spec("other", model=ONLINE, data=_data(packed, train=str(packed / "jpeg")))
    assert command(0, "train", str(other))[0] == 2


def test_ranks_train_from_staged_copies(
    write_spec: WriteSpec, packed: Path, one_epoch_run: Path, tmp_path: Path
) -> None:
    data = _data(packed, workers=1, stage=str(tmp_path / "node"))
    spec = write_spec("staged", data=data, schedule={"epochs": 1})
    first = train(2, spec)
    assert first.count("staged to") == 1 and " on 1 node: " in first and "warning" not in first
    # one rank and two add in another order
    assert _losses(tmp_path / "runs/staged") == pytest.approx(_losses(one_epoch_run), rel=1e-3)
    assert len(list((tmp_path / "node").glob("*/pack.json"))) == 2
    (again,) = _staged(spec, World())
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
def test_one_rank_of_a_node_copies_and_warns(write_spec: WriteSpec, packed: Path, tmp_path: Path, leads: bool) -> None:
    spec = write_spec("nodes", data=_data(packed, stage=str(tmp_path / "no" / "disk")))
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
