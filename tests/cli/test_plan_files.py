"""`plan`, `submit` and `sweep` refuse the files that `train` refuses, and say which ones they have not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from summit_train.data.manifest.quarantine import write_quarantine
from summit_train.data.video.source import DecodeError
from tests.conftest import WriteSpec
from tests.worlds import main_said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.pretrained=no.pth", "model.pretrained: no.pth: no such file or run directory"),
        ("data.val=no.csv", "data.val: there is no no.csv; give the number of training clips with --clips N"),
        ("model.num_classes=3", "label 3"),
        ("data.modality=flow", "is a video, and data.modality is flow"),
    ],
)
def test_what_train_refuses_plan_and_submit_refuse(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    spec = write_spec()
    for words in (["plan"], ["submit", "--site", "slurm_generic", "--nodes", 1, "--dry-run"], ["train"]):
        status, out, err = main_said(capsys, *words, spec, override, "scale.gpus=null")
        assert (status, out) == (2, "")
        assert err.startswith("summit-train: ") and err.count("\n") == 1
        assert words == ["train"] or message in err


def test_with_clips_plan_says_what_it_has_not_checked(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", write_spec(), "--clips", 80, "data.val=no.csv", "model.num_classes=3")
    status, out, err = main_said(capsys, *words)
    assert (status, err) == (0, "") and "  not checked     data.train, data.val\n" in out
    status, out, _ = main_said(capsys, *words, "model.pretrained=no.pth", "--json")
    assert json.loads(out)["not_checked"] == ["data.train", "data.val", "model.pretrained"]
    assert json.loads(main_said(capsys, "plan", write_spec(), "--json")[1])["not_checked"] == []


def test_a_run_that_goes_on_needs_no_pretrained_weights(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], trained_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained_run, tmp_path / "runs/run")
    assert main_said(capsys, "plan", write_spec(model={"pretrained": "no.pth"}))[0] == 0


def test_plan_and_simulate_count_the_same_clips(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], motion_set: Path, tmp_path: Path
) -> None:
    names = [line.split(",")[0] for line in (motion_set / "train.csv").read_text().splitlines()[1:]]
    write_quarantine(tmp_path / "bad.csv", [DecodeError(name, "is damaged") for name in names[:3]])
    spec = write_spec(data={"quarantine": str(tmp_path / "bad.csv")})
    assert json.loads(main_said(capsys, "plan", spec, "--json")[1])["clips"] == 77
    words = ("--site", "summit", "--clips-per-second", 10, "--nodes", 1, "--json", "scale.gpus=null")
    simulated = json.loads(main_said(capsys, "simulate", spec, *words)[1])
    assert (simulated["clips"], simulated["videos"]) == (77, 41)
