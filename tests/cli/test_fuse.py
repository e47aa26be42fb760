"""`summit-train fuse`: output compared whole, the files of --out, runs of one network on 4 and 8 frames, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.scored_runs import CLIPS, FLOW, LABELS, RGB, write_scored_run
from tests.worlds import Say


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs `rgb` and `flow`, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    write_scored_run(Path("rgb"), RGB)
    write_scored_run(Path("flow"), FLOW)
    return tmp_path


def test_the_files(say: Say) -> None:
    """The golden words have what is printed."""
    out = say("fuse", "flow", "rgb", "--logits", "--weights", "1,3", "--out", "o", "--json")[1]
    assert json.loads(out) == json.loads(Path("o/fuse.json").read_text())
    assert sorted(path.name for path in Path("o").iterdir()) == ["fuse.json", "fused.npz"]
    with np.load("o/fused.npz") as fused, np.load("rgb/predictions/step_00000020.npz") as rgb:
        assert fused["path"].tolist() == [clip.path for clip in CLIPS] and fused["label"].tolist() == list(LABELS)
        logits = (3 * np.log(RGB) + np.log(FLOW)) / 4 + 7
        assert fused["scores"] == pytest.approx(logits, rel=1e-5) and set(fused) == set(rgb)


def test_fused_scores_are_fused_again(say: Say) -> None:
    """The file has logarithms of probabilities: (rgb + flow) with a third run is the mean of all three."""
    write_scored_run(Path("third"), RGB[1:] + RGB[:1])
    say("fuse", "rgb", "flow", "--out", "two")
    say("fuse", "two/fused.npz", "third", "--weights", "2,1", "--out", "twice")
    say("fuse", "rgb", "flow", "third", "--out", "once")
    with np.load("twice/fused.npz") as twice, np.load("once/fused.npz") as once:
        assert twice["scores"] == pytest.approx(once["scores"], rel=1e-6)


def test_8_and_4_frames_from_files_and_from_a_packed_set(
    trained_run: Path, motion_set: Path, here: Path, say: Say
) -> None:
    """TSM's ensemble; the packed set, made from the same manifest, stands for a set of flow below another root."""
    pack = ("data", "pack", motion_set / "val.csv", here / "packed", "--root", motion_set, "--kind", "bytes")
    assert say(*pack, "--workers", 0)[0] == 0
    checkpoint = trained_run / "checkpoints/step_00000020.pt"
    for frames, val in ((4, motion_set / "val.csv"), (8, here / "packed")):
        words = [f"name=frames{frames}", f"data.num_frames={frames}", f"data.val={val}", f"run_dir={here}"]
        spec = trained_run / "spec.yaml"
        assert say("eval", spec, "--checkpoints", checkpoint, "--json", *words)[0] == 0
        shutil.copy(spec, here / f"frames{frames}")
    values = json.loads(say("fuse", "frames4", "frames8", "--json")[1])
    assert values["videos"] == 11 and [run["name"] for run in values["runs"]] == ["frames4", "frames8"]
    for run in values["runs"]:
        assert run["top1"] == json.loads((here / run["name"] / "eval.json").read_text())["top1_mean"]
    scores = [np.load(run["predictions"])["scores"].astype(np.float64) for run in values["runs"]]
    assert np.abs(scores[0] - scores[1]).max() > 0.01
    powers = [np.exp(part) / np.exp(part).sum(1, keepdims=True) for part in scores]
    label = np.load(values["runs"][0]["predictions"])["label"]
    assert values["top1"] == pytest.approx(100 * np.mean((powers[0] + powers[1]).argmax(1) == label))


def test_two_regions_of_a_video_are_two_clips_in_files_and_packed(
    trained_run: Path, motion_set: Path, here: Path, say: Say
) -> None:
    """The whole frame is a third one. A list without one region leaves the two others."""
    video = "videos/val_000000.mp4"
    rows = f"{video},0,0,0,20,20\n{video},1,8,12,24,20\n{video},2,,,,\n"
    Path("list.csv").write_text(f"path,label,left,top,width,height\n{rows}")
    Path("less.csv").write_text(f"path,label,left,top,width,height\n{video},0,0,0,20,20\n{video},2,,,,\n")
    how = ("--root", motion_set, "--kind", "jpeg", "--region", "columns", "--workers", 0)
    assert say("data", "pack", "list.csv", "packed", *how)[0] == 0
    runs = {"files": "list.csv", "packed": "packed", "left": "less.csv"}
    for name, val in runs.items():
        words = [f"name={name}", "data.region=columns", f"data.val={val}", f"data.root={motion_set}", "run_dir=."]
        checkpoint = trained_run / "checkpoints/step_00000020.pt"
        assert say("eval", trained_run / "spec.yaml", "--checkpoints", checkpoint, *words)[0] == 0
    values = json.loads(say("fuse", "files", "packed", "--json")[1])
    assert values["videos"] == 3 and values["matched_by"] == "path, span, direction and region"
    with np.load("files/predictions/step_00000020.npz") as scores:
        assert len({tuple(row) for row in scores["scores"].tolist()}) == 3
        assert [scores[name].tolist() for name in ("left", "width")] == [[0, 8, 0], [20, 24, 0]]
    status, _, err = say("fuse", "files", "left")
    assert status == 2 and f"of 3 and 2 videos 2 match; left lacks {video} (24 x 20 pixels at 8, 12), and has" in err
