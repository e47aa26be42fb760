"""`summit-train eval`: which checkpoints of which run, what it refuses, and --observed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from summit_train.cli.evaluate import _changed_keys, _result_folder
from summit_train.core.run_folder import checkpoint_path
from summit_train.spec import dump_spec, load_spec
from summit_train.training.checkpoint import save_checkpoint
from tests.detectors import detector_spec
from tests.runs import load_any
from tests.worlds import Say, command, json_of, lines, refused, stdout_of, succeed


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, in runs/run of the test's folder."""
    return Path(shutil.copytree(trained_run, tmp_path / "runs/run"))


def _rewrite(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the last checkpoint, and its digest with it; the older one goes."""
    path = checkpoint_path(run, 20)
    state = load_any(path)
    change(state)
    save_checkpoint(path, state)
    checkpoint_path(run, 10).unlink()
    return path


@pytest.mark.parametrize("option", [(), ("--observed", "0.5,1")])
def test_scores_that_are_not_finite_are_no_unreadable_videos(run: Path, say: Say, option: tuple[str, ...]) -> None:
    """The last class alone, so that the first one's scores look right."""
    path = _rewrite(run, lambda state: state["model"]["fc.bias"][-1].fill_(torch.nan))
    wrong = f"{path}: scores are not finite, those of videos/val_000000.mp4 the first"
    status, out, err = say("eval", run, *option)
    assert (status, out, err.count("\n")) == (1, "", 1) and wrong in err


def _whole_numbers(state: dict[str, Any]) -> None:
    state["model"]["fc.bias"] = state["model"]["fc.bias"].long()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.update(step="far"), "step must be a number of updates, got 'far'"),
        (_whole_numbers, "does not fit: model.fc.bias must be float32 (4,), got int64 (4,)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line_for_every_command(
    run: Path, say: Say, motion_set: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """One of a wrong form, one of another network; tests/core/test_saved.py has every form."""
    path = _rewrite(run, change)
    video = motion_set / "videos/val_000000.mp4"
    for words in (
        ("eval", run, "--checkpoints", path),
        ("eval", run, "--observed", "1"),
        ("predict", path, video),
        ("predict", run, video),
        ("train", run),
    ):
        assert f"{path}: {reason}" in refused(say(*words)), words


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda state: state["optimizer"]["state"].pop(3), "optimizer has other groups"),
        (lambda state: state.update(growth={"best": "high"}), "growth has no clips_per_gpu"),
        (lambda state: state.update(noise_scale=[]), "noise_scale must be values by name, got list"),
    ],
)
def test_training_refuses_a_state_that_does_not_fit(
    run: Path, say: Say, change: Callable[[dict[str, Any]], object], part: str
) -> None:
    """A test of each solver's state is in tests/training/test_checkpoint.py."""
    assert f"{_rewrite(run, change)}: does not fit: {part}" in refused(say("train", run))


def _official(run: Path) -> tuple[bytes, list[str]]:
    return (run / "eval.json").read_bytes(), sorted(path.name for path in (run / "predictions").iterdir())


def test_a_run_is_evaluated_by_its_directory_without_its_training_data(
    run: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own spec the result is that of training. The list of the training clips is gone, as on another machine."""
    trained = json.loads((run / "eval.json").read_text())
    values = yaml.safe_load((run / "spec.yaml").read_text())
    values["data"]["train"] = "gone.csv"
    (run / "spec.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(run.parent)
    spec_words = ("run/spec.yaml", f"run_dir={run.parent}", "data.train=x.csv")
    for words in (("run",), spec_words, (run, "watch.stall_seconds=99")):
        (run / "eval.json").unlink(missing_ok=True)
        found = json_of(say("eval", *words, "--json"))
        assert found.pop("written") == str(run / "eval.json")
        assert found == json.loads((run / "eval.json").read_text())
        assert (found["top1_mean"], found["videos"]) == (trained["top1_mean"], trained["videos"])
        assert [Path(row["path"]).parent.parent for row in found["checkpoints"]] == [run]
    assert found["overrides"] == {"watch.stall_seconds": 99}


def test_a_nested_key_is_named_alone(tmp_path: Path) -> None:
    own = detector_spec(run_dir=str(tmp_path), optimizer={"trust_ratio": {"kind": "lars"}}, precision="fp32")
    own.run_path.mkdir()
    (file := own.run_path / "spec.yaml").write_text(dump_spec(own))
    spec = load_spec(file, ["model.detector.nms=0.5", "precision=bf16"])
    changed = _changed_keys(spec, [], 1)
    assert changed == {"precision": "bf16", "model.detector.nms": 0.5}
    assert _result_folder(spec, None, changed, "eval.json") == own.run_path / "evals/precision-bf16_nms-0.5"
    without = _changed_keys(load_spec(file, ["optimizer.trust_ratio=null"]), [], 1)
    assert without["optimizer.trust_ratio.kind"] is None  # of a section that only the run has


def test_an_evaluation_by_other_keys_has_a_folder_of_its_own(run: Path, say: Say) -> None:
    before = _official(run)
    out = stdout_of(say("eval", run, "evaluate.clips=2", "data.sampling=dense", "execution.recompute=true"))
    beside = run / "evals/clips-2/eval.json"
    assert f"(evaluate.clips=2, execution.recompute=True): written to {beside}" in out
    found = json.loads(beside.read_text())
    assert found["overrides"] == {"evaluate.clips": 2, "execution.recompute": True}  # dense is the run's own
    assert found["clips"] == 2 and (beside.parent / "predictions/step_00000020.npz").is_file()
    for words in (("--checkpoints", "last:2"), ("checkpoint.every_epochs=2",), ("data.flip=false",)):
        assert say("eval", run, *words)[0] == 0
    named = json_of(say("eval", run, "evaluate.clips=2", "--name", "two clips", "--json"))
    assert named["written"] == str(run / "evals/two clips/eval.json")
    names = {"clips-2", "checkpoints-last-2", "every_epochs-2", "flip-false", "two clips"}
    assert {path.name for path in (run / "evals").iterdir()} == names
    assert all(named[key] == found[key] for key in ("top1_mean", "checkpoints")) and _official(run) == before
    fused = json_of(say("fuse", run, run / "evals/clips-2", "--json"))
    assert [one["name"] for one in fused["runs"]] == ["run", "clips-2"]


def test_a_name_belongs_to_one_set_of_keys(run: Path, say: Say) -> None:
    """The same keys again replace their result, also with others that change no score."""
    older = checkpoint_path(run, 10)
    assert say("eval", run, "--checkpoints", older, "--name", "a")[0] == 0
    assert say("eval", run, "--checkpoints", older, "--name", "a", "watch.stall_seconds=99")[0] == 0
    reason = f"evals/a/eval.json: is a result with other keys (checkpoints=['{older}']); try another --name"
    for words in (("--checkpoints", "last:1", "evaluate.clips=2"), (), ("--checkpoints", checkpoint_path(run, 20))):
        assert reason in refused(say("eval", run, "--name", "a", *words))


def test_a_mean_over_fewer_checkpoints_says_so(run: Path, say: Say) -> None:
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace("last_checkpoints: 1", "last_checkpoints: 5"))
    assert say("eval", run)[1].endswith("\n2 checkpoints, fewer than evaluate.last_checkpoints, 5\n")


def test_the_mean_the_last_and_the_best_are_told_apart(run: Path, say: Say) -> None:
    """The golden words have the standard deviation, the interval and the text."""
    found = json_of(say("eval", run, "--checkpoints", "last:2", "--json"))
    one, last = (row["top1"] for row in found["checkpoints"])
    assert found["top1_mean"] == pytest.approx((one + last) / 2, rel=1e-12)
    assert (found["top1_last"], found["top1_best"]) == (last, max(one, last))


@pytest.mark.parametrize("is_other", [True, False])
def test_the_mean_takes_the_checkpoints_of_one_training_alone(run: Path, say: Say, is_other: bool) -> None:
    """Runs of 0.1 could go to another experiment and back: the keys are equal, the weights are not of one training."""
    older, newer = checkpoint_path(run, 10), checkpoint_path(run, 20)
    if is_other:
        state = load_any(older)
        state["experiment"]["optimizer.base_lr"] = 0.25
        save_checkpoint(older, state)
        reason = "is of another experiment: optimizer.base_lr: the checkpoint has 0.25"
    else:
        save_checkpoint(newer, load_any(newer) | {"line": 10})
        reason = "is from before another experiment took over, at step 10\n"
    said = say("eval", run, "--checkpoints", "last:2", "--json")
    assert [row["step"] for row in json_of(said)["checkpoints"]] == [20]
    assert f"left out of the mean: {older} {reason}" in said[2] and said[2].count("\n") == 1


@pytest.mark.parametrize("ranks", [0, 2])
def test_classes_of_other_names_are_refused(run: Path, motion_set: Path, tmp_path: Path, ranks: int) -> None:
    names = (motion_set / "classes.txt").read_text().split()
    (tmp_path / "classes.txt").write_text("\n".join(reversed(names)))
    (tmp_path / "val.csv").write_text("path,label\nvideos/val_000000.mp4,0\n")
    status, output = command(ranks, "eval", str(run), f"data.val={tmp_path}/val.csv", f"data.root={motion_set}")
    assert status == 2 and "MPI_ABORT" not in output, output
    assert "must have the same classes" in output and "differ in their order" in output


def test_a_plan_that_cannot_be_read_is_named(run: Path, say: Say) -> None:
    (run / "plan.json").write_text("{}")
    line = refused(say("eval", run))
    assert f"{run}/plan.json must tell" in line and "try --checkpoints FILE" in line
    assert say("eval", run, "--checkpoints", checkpoint_path(run, 20))[0] == 0


def test_a_network_is_used_at_the_checkpoint_that_is_named(run: Path, say: Say, motion_set: Path) -> None:
    (run / "checkpoints/best.json").write_text('{"step": 10, "measure": "top1", "value": 50.0}')
    video = motion_set / "videos/val_000000.mp4"
    networks = ((run, "--checkpoint", "best"), (checkpoint_path(run, 10),), (run,))
    best, first, last = (json_of(say("predict", *words, video, "--json")) for words in networks)
    assert best == first != last
    evaluated = json_of(say("eval", run, "--checkpoints", "best", "--json"))
    assert evaluated["checkpoints"][0]["step"] == 10


@pytest.fixture
def nine(run: Path, motion_set: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose spec has nine of its validation videos."""
    rows = (motion_set / "val.csv").read_text().splitlines()[:10]
    (tmp_path / "val.csv").write_text("\n".join(rows))
    shutil.copy(motion_set / "classes.txt", tmp_path)
    values = yaml.safe_load((run / "spec.yaml").read_text())
    values["data"] |= {"val": str(tmp_path / "val.csv"), "root": str(motion_set)}
    (run / "spec.yaml").write_text(yaml.safe_dump(values | {"run_dir": str(run.parent)}))
    return run


def _saved(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "observed.json").read_text())
    return values


def test_observed_gives_a_table_and_a_file(nine: Path, say: Say) -> None:
    # Before an override --observed has no value of its own.
    printed = stdout_of(say("eval", nine / "spec.yaml", "--observed", "evaluate.crops=3")).splitlines()
    saved = _saved(nine / "evals/crops-3")
    assert printed.pop() == f"written to {nine}/evals/crops-3/observed.json" and not (nine / "observed.json").exists()
    assert printed[0].split() == ["observed", "clip", "top-1", "stream", "top-1"]
    assert [line.split()[0] for line in printed[1:-1]] == [str(10 * tenth) for tenth in range(1, 11)]
    assert printed[10].split()[2] == f"{saved['observed'][-1]['top1']:.2f}" and printed[-1] == "9 videos, step 20"
    facts = {"name": "run", "arch": "tsm", "frames": 4, "crops": 3, "videos": 9, "overrides": {"evaluate.crops": 3}}
    assert saved.items() >= facts.items() and saved["checkpoint"].endswith("step_00000020.pt")


def test_observed_is_the_same_on_any_number_of_ranks(nine: Path) -> None:
    """Nine videos, which 2 does not divide."""
    found = []
    for ranks in (1, 2):
        output = succeed(ranks, "eval", str(nine / "spec.yaml"), "--observed", "0.25,...,1", "--json")
        found.append(json.loads(next(line for line in lines(output) if line.startswith("{"))))
        assert found[-1].pop("written") == str(nine / "observed.json") and found[-1] == _saved(nine)
    assert found[0] == found[1]
    assert [row["fraction"] for row in found[0]["observed"]] == [0.25, 0.5, 0.75, 1.0]
    assert [set(row) for row in found[0]["observed"]] == [{"fraction", "top1", "top5"}] * 4
    assert [row["undecided"] for row in found[0]["anytime"]] == [0] * 4


def test_the_figure_of_observed_in_several_runs(nine: Path, tmp_path: Path, say: Say) -> None:
    points = [{"fraction": 0.5, "top1": 40.0}, {"fraction": 1.0, "top1": 50.0}]
    (tmp_path / "observed.json").write_text(json.dumps({"name": "other", "frames": 4, "observed": points}))
    words = ("eval", nine / "spec.yaml", "--observed", "1", "--out", tmp_path / "early.svg", "--beside", tmp_path)
    found = json_of(say(*words, "seed=1", "--json"))
    assert found == _saved(nine) | {"written": str(nine / "observed.json")}
    drawn = (tmp_path / "early.svg").read_text()
    assert "<!-- run -->" in drawn and "<!-- other -->" in drawn
    (tmp_path / "observed.json").write_text('{"name": "x"}')
    reason = f"{tmp_path}/observed.json: is not what `summit-train eval SPEC --observed` writes"
    assert reason in refused(say(*words))
