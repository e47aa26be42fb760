"""Before the first step: packed sets on the nodes' disks, and machines whose gradients are wrong."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.saved import find_checkpoints
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from summit_train.training import start
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.start import check_arithmetic, error_of_two_frames, stage_sets
from tests.conftest import WriteSpec
from tests.runs import load_any, records, rewound
from tests.worlds import command, main_said, train


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
    inputs: Any = SimpleNamespace(spec=values, **{which: Dataset.open(values, which) for which in ("train", "val")})
    with Watchdog(world, None) as watchdog:
        return stage_sets(inputs, world, watchdog)


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


CPU = torch.device("cpu")


def _spec(arch: str = "i3d_3x3x3", precision: str = "bf16") -> Spec:
    words = [f"model.arch={arch}", f"precision={precision}", "data.num_frames=16", "model.width=0.125"]
    return load_spec(shipped("configs/kinetics") / "tsm_r50_8f.yaml", [*words, "data.crop=32", "model.dropout=0"])


@pytest.mark.parametrize(
    ("spec", "device", "error", "refused"),
    [
        (_spec(), CPU, float("inf"), True),
        (_spec(), CPU, 0.01, False),
        (_spec(precision="fp32"), CPU, float("inf"), False),
        (_spec("tsm"), CPU, float("inf"), False),
        (_spec("i3d_replace"), CPU, float("inf"), False),  # no stride in time: 16 frames all the way
        (_spec(), torch.device("cuda"), float("inf"), False),
    ],
)
def test_wrong_gradients_are_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, device: torch.device, error: float, refused: bool
) -> None:
    monkeypatch.setattr(start, "error_of_two_frames", lambda: error)
    message = pytest.raises(UserError, match=r"has two with data.num_frames 16; take precision=fp32")
    with message if refused else nullcontext():
        check_arithmetic(spec, device)


@pytest.mark.parametrize(("spoil", "least"), [(1.0, 0.0), (0.0, 1.0), (float("nan"), float("inf"))])
def test_the_probe_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, spoil: float, least: float) -> None:
    """Without oneDNN the gradient is right; one that comes out as zeros or as NaN is seen."""
    honest = torch.autograd.grad

    def grad(out: torch.Tensor, weight: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (found,) = honest(out, weight, sent)
        return (found * (spoil if found.dtype == torch.bfloat16 else 1),)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with torch.backends.mkldnn.flags(enabled=False):
        assert least <= error_of_two_frames() <= least + (0.01 if least == 0 else 0)


def test_a_checkpoint_keeps_the_names_of_its_experiment_and_without_a_list_its_digests_are_unknown(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in files are those of earlier versions. What is skipped where the list is missing, no spelling decides."""
    shutil.copytree(trained_run, run := tmp_path / "run")
    words = ("plan", run / "spec.yaml", f"run_dir={tmp_path}", "--clips", 80)
    path = find_checkpoints(run)[-1]
    state = load_any(path)
    assert [name for name in state["experiment"] if "(" in name] == ["data.train (fingerprint)"]
    state["experiment"] |= {"data.train (fingerprint)": "another", "data.quarantine (fingerprint)": "another"}
    save_checkpoint(path, state)
    assert main_said(capsys, *words)[0] == 0
    state["experiment"]["data.other (fingerprint)"] = "abc"
    save_checkpoint(path, state)
    status, _, err = main_said(capsys, *words)
    assert status == 2 and "data.other (fingerprint): the checkpoint has 'abc', this run None" in err
