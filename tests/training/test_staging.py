from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.spec import load_spec
from summit_train.training.staging import stage_sets
from tests.conftest import WriteSpec
from tests.worlds import train


@pytest.fixture(scope="session")
def packed(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded set's two manifests, packed as bytes and as JPEG: bytes/train, bytes/val, jpeg/train, jpeg/val."""
    out = tmp_path_factory.mktemp("packed")
    for kind in ("bytes", "jpeg"):
        for split in ("train", "val"):
            words = [str(motion_set / f"{split}.csv"), str(out / kind / split), "--kind", kind]
            assert main(["data", "pack", *words, "--shard-size", "60K", "--workers", "0"]) == 0
    return out


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def _data(packed: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"train": str(packed / kind / "train"), "val": str(packed / kind / "val"), **more}


def _train(spec: Path, *overrides: str) -> list[float]:
    assert main(["train", str(spec), *overrides]) == 0
    values = load_spec(spec, overrides)
    return _losses(values.run_path)


def test_packed_bytes_train_to_the_bit_and_jpeg_closely(write_spec: WriteSpec, packed: Path) -> None:
    raw = _train(write_spec("raw"))
    assert _train(write_spec("bytes", data=_data(packed, "bytes"))) == raw
    jpeg = _train(write_spec("jpeg", data=_data(packed, "jpeg")))
    assert jpeg != raw
    assert max(abs(a - b) for a, b in zip(jpeg, raw, strict=True)) < 0.25


def test_a_run_goes_on_from_the_files_to_their_packed_bytes(write_spec: WriteSpec, packed: Path) -> None:
    whole = _train(write_spec("whole"))
    _stop_after_an_epoch(write_spec, "moved")
    moved = _train(write_spec("moved", data=_data(packed, "bytes")))
    assert moved == whole + whole[10:]  # the second epoch was trained twice
    # To other pixels only when asked.
    _stop_after_an_epoch(write_spec, "other")
    assert main(["train", str(write_spec("other", data=_data(packed, "jpeg")))]) == 2


def _stop_after_an_epoch(write_spec: WriteSpec, name: str) -> None:
    """Leave a run as a job would that was killed after its first epoch."""
    spec = write_spec(name)
    assert main(["train", str(spec)]) == 0
    run = load_spec(spec).run_path
    for path in run.glob("checkpoints/step_00000020*"):
        path.unlink()


def test_ranks_train_from_a_staged_copy(write_spec: WriteSpec, packed: Path, tmp_path: Path) -> None:
    raw = write_spec("raw")
    train(2, raw)
    spec = write_spec("staged", data=_data(packed, "bytes", workers=1, stage=str(tmp_path / "node")))
    first = train(2, spec)
    assert first.count("staged to") == 1 and " on 1 nodes: " in first and "warning" not in first
    assert _losses(load_spec(spec).run_path) == _losses(load_spec(raw).run_path)
    assert len(list((tmp_path / "node").glob("*/pack.json"))) == 2
    again = train(2, str(spec), "name=again")
    assert ": 0 bytes copied, " in again


def test_without_a_disk_it_trains_from_the_shared_set_and_says_so_once(
    write_spec: WriteSpec, packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "no" / "disk")
    schedule = {"epochs": 1, "warmup_epochs": 0}
    assert len(_train(write_spec("absent", data=_data(packed, "bytes", stage=absent), schedule=schedule))) == 10
    printed = "".join(capfd.readouterr())
    assert printed.count("warning: ") == 1 and f"{absent}: No such file or directory" in printed


class _Node(World):
    """One rank of four on two nodes, of which the others have done the same."""

    size = 4

    def __init__(self, local_rank: int) -> None:
        super().__init__()
        self.local_rank = local_rank

    def gather(self, value: Any) -> Any:
        return [value, [], value, []]


def _run(spec: Path, world: World) -> Any:
    values = load_spec(spec)
    sets = {f"{which}_set": Dataset.open(values, which) for which in ("train", "val")}
    return SimpleNamespace(spec=values, world=world, **sets)


@pytest.mark.parametrize("leads", [True, False])
def test_one_rank_of_a_node_copies_and_one_warning_is_for_all(
    write_spec: WriteSpec, packed: Path, tmp_path: Path, leads: bool
) -> None:
    dest = tmp_path / "no" / "disk"
    spec, world = write_spec("nodes", data=_data(packed, "bytes", stage=str(dest))), _Node(0 if leads else 1)
    with Watchdog(world, None) as watchdog:
        said = stage_sets(_run(spec, world), watchdog)
    if leads:
        assert said[0].endswith("on 2 nodes: 0 bytes copied, 0 were there")
        assert len(said) == 2 and said[1].endswith(" (and 3 more such copies)")
    else:
        assert said == []


def test_what_cannot_be_staged_is_said(write_spec: WriteSpec, tmp_path: Path) -> None:
    with Watchdog(World(), None) as watchdog:
        for stage, said in (("auto", "data.stage is auto: "), (str(tmp_path / "node"), "is not a packed set")):
            run = _run(write_spec("raw", data={"stage": stage}), World())
            assert said in stage_sets(run, watchdog)[0]
        assert stage_sets(_run(write_spec("none"), World()), watchdog) == []
