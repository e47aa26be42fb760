"""Reading a run's scores: sorted by video, from files with and without the names of the videos, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import Span
from summit_train.evaluation.run_scores import read_run, read_runs
from tests.scored_runs import CLIPS, NAMES, RGB, write_scored_run, write_scores


def test_the_newest_checkpoint_sorted_by_video(tmp_path: Path) -> None:
    clips = [Clip("b.mp4"), Clip("a.mp4", Span(9, 12)), Clip("a.mp4", Span(2, 4), is_reversed=True)]
    run = read_run(str(write_scored_run(tmp_path / "rgb", RGB, (1, 2, 0), clips)))
    assert (run.name, run.path, run.class_names) == ("rgb", tmp_path / "rgb/predictions/step_00000020.npz", NAMES)
    assert run.clips == (clips[2], clips[1], clips[0])
    assert run.scores.videos.tolist() == [2, 1, 0] and run.scores.labels.tolist() == [0, 2, 1]
    assert np.exp(run.scores.scores - 7) == pytest.approx(np.array([RGB[2], RGB[1], RGB[0]]), rel=1e-5)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (write_scored_run(tmp_path / folder / "run", RGB) for folder in ("a", "b"))
    assert [run.name for run in read_runs([str(one), str(other)])] == [str(one), str(other)]
    older = one / "predictions/step_00000010.npz"
    assert read_run(str(older)).name == "run/step_00000010"
    assert read_run(str(shutil.copy(older, tmp_path / "lone.npz"))).name == "lone"
    (tmp_path / "link").symlink_to(one)
    assert read_run(str(tmp_path / "link")).name == "link"
    monkeypatch.chdir(one)
    assert [run.name for run in read_runs([".", "predictions/step_00000010.npz"])] == ["run", "run/step_00000010"]


def _without_names(path: Path) -> None:
    with np.load(path) as file:
        columns = {name: file[name] for name in ("video", "label", "scores")}
    np.savez_compressed(path, **columns)


def test_a_file_without_names_takes_them_from_the_runs_manifest(trained_run: Path, tmp_path: Path) -> None:
    named = read_run(str(trained_run))
    assert len(named.clips) == 41 and named.clips[0] == Clip("videos/val_000000.mp4") and len(named.class_names) == 4
    shutil.copytree(trained_run, tmp_path / "run")
    path = tmp_path / "run/predictions" / named.path.name
    _without_names(path)
    for word in (path, tmp_path / "run"):
        found = read_run(str(word))
        assert (found.clips, found.class_names) == (named.clips, named.class_names)
        assert np.array_equal(found.scores.scores, named.scores.scores)
    spec, val = tmp_path / "run/spec.yaml", tmp_path / "val.csv"
    known = next(line for line in spec.read_text().splitlines() if line.strip().startswith("val:"))
    spec.write_text(spec.read_text().replace(known, f"  val: {val}"))
    with pytest.raises(UserError, match=r"manifest cannot be read \(.*val.csv.*\); run `summit-train eval"):
        read_run(str(path))
    val.write_text("path,label\nx.mp4,0\n")
    with pytest.raises(UserError, match=r"val.csv has others by now; run `summit-train eval"):
        read_run(str(path))
    with pytest.raises(UserError, match="is not in the directory of a run"):
        read_run(str(shutil.copy(path, tmp_path / "lone.npz")))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"scores": np.zeros(3)}, r"scores of shape \(3,\)"),
        ({"scores": np.zeros((3, 3), np.int64)}, "type int64"),
        ({"scores": np.zeros((4, 3))}, r"video of shape \(3,\)"),
        ({"label": np.zeros(3)}, "label of shape .* type float64 for 3 videos"),
        ({"label": np.array([0, 1, 3])}, "labels from 0 to 3 for 3 classes"),
        ({"label": np.array([0, 1, -1])}, "labels from -1 to 1"),
        ({"path": np.array(["a", "b"])}, "path of shape"),
        ({"class_names": np.array([1, 2])}, "class_names is no list"),
        ({"scores": np.array([[1, 2, 3], [1, 2, np.nan], [1, 2, 3]])}, r"scores of b\.mp4 are not finite"),
        ({"is_read": np.ones(2, bool)}, "is_read of shape"),
        ({"label": None}, "'label' is not in it; an npz of a run's predictions is wanted"),
        ({"reversed": None}, "'reversed' is not in it"),
        ({"path": np.array(["a", "b", "a"])}, "has a twice; scores are matched by video"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, change: dict[str, np.ndarray | None], part: str) -> None:
    path = write_scores(tmp_path / "a.npz", RGB)
    with np.load(path) as file:
        columns = dict(file) | change
    np.savez(path, **{name: column for name, column in columns.items() if column is not None})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=part) as caught:
        read_run(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_file_is_refused_in_one_line_or_read_as_it_was(tmp_path: Path) -> None:
    """Every byte changed, and every length."""
    path = write_scores(tmp_path / "a.npz", RGB)
    whole, content = read_run(str(path)), path.read_bytes()
    changed = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(len(content))]
    cut = [content[:length] for length in range(len(content))]
    refused = 0
    for damaged in changed + cut:
        path.write_bytes(damaged)
        try:
            found = read_run(str(path))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert found.clips == CLIPS and np.array_equal(found.scores.scores, whole.scores.scores)
    assert refused > len(cut) + len(changed) // 2


def test_what_holds_no_scores(tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "run", RGB)

    def refused(word: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_run(str(word))
        return str(caught.value)

    advice = f"; run `summit-train eval {run}/spec.yaml`"
    assert refused(tmp_path / "none").endswith("a run's directory or an npz of predictions is wanted")
    assert refused(tmp_path) == f"{tmp_path}: is not the directory of a run: there is no spec.yaml in it"
    assert "it is no npz" in refused(run / "eval.json")
    (run / "predictions/step_00000020.npz").unlink()
    assert refused(run) == f"{run}: has no predictions/step_00000020.npz{advice}"
    for wrong in ("{", "[]", json.dumps({"checkpoints": []}), json.dumps({"checkpoints": [{"step": 1}]})):
        (run / "eval.json").write_text(wrong)
        assert refused(run) == f"{run}: its eval.json cannot be read{advice}"
    (run / "eval.json").unlink()
    assert refused(run) == f"{run}: has no predictions{advice}"
