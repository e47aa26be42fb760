"""`summit-train plan`: the files that `train` would refuse, classes, evaluation, averaging."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.reading import write_classes
from summit_train.models import build_model
from tests.conftest import WriteSpec
from tests.worlds import Say, train

Plan = Callable[..., Any]


@pytest.fixture
def plan(say: Say) -> Plan:
    """Runs `plan ...`, which must succeed without a warning; its output, parsed with --json."""

    def planned(*words: object) -> Any:
        status, out, err = say("plan", *words)
        assert (status, err) == (0, "")
        return json.loads(out) if "--json" in words else out

    return planned


def test_the_lr_of_a_decay_of_ones_own_is_drawn(write_spec: WriteSpec, tmp_path: Path, plan: Plan) -> None:
    """20 steps without a warm-up; the LR doubles to 1.5 times its peak for the second epoch."""
    (tmp_path / "own.py").write_text("def jump(progress, epoch, to=1): return 0.75 if epoch < 1 else to")
    spec = write_spec(schedule={"decay": f"{tmp_path}/own.py:jump", "options": {"to": 1.5}, "warmup_epochs": 0})
    text, values = plan(spec), plan(spec, "--json")
    assert f"{tmp_path}/own.py:jump, to 1.5\n" in text
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("#")]
    assert [(float(row[2]), len(row[3])) for row in rows] == [(0.00375, 12)] * 4 + [(0.0075, 24)] * 5
    assert values["decay"] | {"digest": ""} == {
        "key": "schedule.decay", "name": f"{tmp_path}/own.py:jump", "options": {"to": 1.5}, "digest": "",
    }  # fmt: skip


COMMANDS = (["plan"], ["submit", "--site", "slurm_generic", "--nodes", "1", "--dry-run"], ["train"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.pretrained=no.pth", "model.pretrained: no.pth: no such file or run folder"),
        ("model.pretrained={folder}", "{folder}: this directory has no checkpoints/step_*.pt"),
        ("model.pretrained={folder}/run.yaml", "{folder}/run.yaml: cannot be read as a file of torch's"),
        ("model.pretrained={folder}/other.pth", "{folder}/other.pth: weights of another network: "),
        ("data.train=no.csv", "data.train: no.csv not found"),
        ("data.val=no.csv", "data.val: no.csv not found"),
        ("data.root={folder}", "start, got {folder}, which lacks videos/train_000000.mp4"),
        (
            "data.quarantine=bad.csv",
            "override 'data.quarantine=bad.csv': data.quarantine: was removed; write the list without bad clips by "
            "`summit-train data scan LIST --out CLEAN.csv` and use that, then delete this key or set it to null\n",
        ),
        ("model.num_classes=3", "label must be from 0 to 2, as model.num_classes is 3, got 3"),
        ("model.num_classes=5", "model.num_classes must be 4, got 5: "),
        ("data.modality=flow", "is a video, and data.modality is flow"),
    ],
)
def test_what_train_refuses_plan_and_submit_refuse_in_the_same_words(
    write_spec: WriteSpec, say: Say, tmp_path: Path, override: str, message: str
) -> None:
    spec = write_spec()
    other = build_model("tsm", backbone="resnet34", num_frames=4, num_classes=4, width=0.125)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    said = []
    for words in COMMANDS:
        status, out, err = say(*words, spec, override.format(folder=tmp_path), "scale.gpus=null")
        assert (status, out) == (2, "")
        assert err.startswith("summit-train: ") and err.count("\n") == 1 and message.format(folder=tmp_path) in err
        said.append(err)
    assert said[0] == said[1]
    # Where a list is missing train names the folder that paths start at, the others the way without the list.
    assert said[0] == said[2] or "not found; give the number of" in said[0]


def test_a_run_folder_that_train_continues_is_named_and_one_that_it_refuses_is_refused(
    write_spec: WriteSpec, say: Say, trained_run: Path, tmp_path: Path
) -> None:
    """One of another experiment, and one whose checkpoints are damaged; with --clips too."""
    run = tmp_path / "runs" / trained_run.name
    shutil.copytree(trained_run, run)
    values = yaml.safe_load((run / "spec.yaml").read_text()) | {"run_dir": str(tmp_path / "runs")}
    spec = tmp_path / "again.yaml"
    spec.write_text(yaml.safe_dump(values))
    (checkpoint, *_) = sorted((run / "checkpoints").glob("*.pt"), reverse=True)
    # Weights are of no use to a run that continues.
    status, out, _ = say("plan", spec, "model.pretrained=no.pth")
    assert status == 0 and f"  start          resumes from {checkpoint}\n" in out
    for more in ([], ["--clips", "80"]):
        conflict = f"{checkpoint} is of another experiment: loss.label_smoothing: the"
        for name in ("submit", "plan"):
            words = COMMANDS[1] if name == "submit" else [name]
            status, out, err = say(*words, spec, *more, "loss.label_smoothing=0.5")
            assert status == 2 and err.startswith(f"summit-train: {conflict}") and err.count("\n") == 1
            assert ("\n  global batch " in out) == (name == "plan")  # the numbers come before the conflict
        status, out, err = say("plan", spec, *more, "loss.label_smoothing=0.5", "--json")
        found = json.loads(out)
        assert status == 2 and found["total_steps"] > 0 and err == f"summit-train: {found['conflict']}\n"
    for path in (run / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    said = []
    for words in COMMANDS:
        status, _, err = say(*words, spec, *(["scale.gpus=null"] if words[0] == "submit" else []))
        assert status == 2 and f"no checkpoint of {run} can be read" in err
        said.append(err.splitlines()[-1])
    assert len(set(said)) == 1


def test_plan_says_what_of_the_weights_fits(write_spec: WriteSpec, plan: Plan, tmp_path: Path) -> None:
    network = build_model("tsn", backbone="resnet18", num_frames=4, num_classes=4, width=0.125)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    (note,) = plan(write_spec(model={"pretrained": str(tmp_path / "w.pth")}), "--json")["start"]
    assert note.startswith(f"pretrained: {tmp_path}/w.pth: 102 of the model's 102 tensors loaded")


def test_with_clips_plan_says_what_it_has_not_checked(write_spec: WriteSpec, plan: Plan) -> None:
    words = (write_spec(), "--clips", 80, "data.val=no.csv", "model.num_classes=3")
    assert "  not checked    data.train, data.val\n" in plan(*words)
    assert plan(*words, "data.root=videos", "--json")["not_checked"] == ["data.train", "data.val", "data.root"]
    known = plan(*words, "model.pretrained=no.pth", "--json")
    assert known["not_checked"] == ["data.train", "data.val", "model.pretrained"]
    assert plan(write_spec(), "--json")["not_checked"] == []


def test_plan_and_simulate_count_the_same_clips(
    write_spec: WriteSpec, say: Say, motion_set: Path, tmp_path: Path
) -> None:
    lines = (motion_set / "train.csv").read_text().splitlines(keepends=True)
    shutil.copy(motion_set / "classes.txt", tmp_path)
    (tmp_path / "train.csv").write_text("".join([lines[0], *lines[4:]]))
    spec = write_spec(data={"train": str(tmp_path / "train.csv"), "root": str(motion_set)})
    assert json.loads(say("plan", spec, "--json")[1])["clips"] == 77
    words = ("--site", "summit", "--clips-per-second", 10, "--nodes", 1, "--json", "scale.gpus=null")
    simulated = json.loads(say("simulate", spec, *words)[1])
    assert (simulated["clips"], simulated["videos"]) == (77, 11)


def _without(source: Manifest, label: int, path: Path) -> dict[str, str]:
    """Write the manifest without the clips of one class beside the videos' names; the data keys that read it."""
    rows = [ManifestRow(source.path(i), source.labels[i]) for i in range(len(source)) if source.labels[i] != label]
    path.parent.mkdir()
    write_manifest(path, rows)
    write_classes(path.parent, source.classes or ())
    return {path.stem: str(path), "root": str(Path(source.source).parent)}


def test_a_class_that_only_validation_has_is_named(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path, say: Say
) -> None:
    data = _without(read_manifest(motion_set / "train.csv"), 2, tmp_path / "less" / "train.csv")
    spec = write_spec(data=data, scale={"gpus": 8, "clips_per_gpu": 6}, schedule={"epochs": 1, "warmup_epochs": 0})
    said = "warning: 1 class (left) in data.val and not in data.train\n"
    assert say("plan", spec)[2] == said
    _, out, err = say("plan", spec, "--json")
    assert err == said and json.loads(out)["warnings"] == ["1 class (left) in data.val and not in data.train"]
    assert say("plan", spec, "--clips", "80")[2] == ""
    assert train(0, spec).count(said) == 1
    counts = json.loads((tmp_path / "runs/run/plan.json").read_text())["clips_per_class"]
    assert counts["train"] == {"right": 20, "up": 20, "left": 0, "down": 20}
    assert counts["val"] == {"right": 3, "up": 3, "left": 3, "down": 2}


def test_plan_says_how_long_the_evaluation_takes(write_spec: WriteSpec, plan: Plan) -> None:
    """Two validations of 11 videos, and one checkpoint with 10 clips of each; unknown where no manifest is read."""
    spec = write_spec(evaluate={"every_epochs": 1, "clips": 10}, scale={"gpus": 6})
    words = (spec, "--speed", "0.1", "--site", "summit", "--nodes", "1", "--json")
    assert plan(*words)["site"]["evaluation_hours"] == pytest.approx(11 * (2 + 10) / 6 / 0.1 / 3_600)
    assert plan(*words, "--clips", "960")["site"]["evaluation_hours"] is None


GROWING = {"method": "averaging", "grow_batch": {"factor": 2}}


def test_the_plan_has_averages_and_the_ladder(write_spec: WriteSpec, plan: Plan) -> None:
    """80 clips, 4 learners of 2: 20 each. The golden words have the text."""
    found = plan(write_spec(parallel=GROWING, evaluate={"every_epochs": 1}), "--json")
    assert found["averaging_bytes"] == 2 * 4 * found["parameters"]  # SGD's momentum
    assert [size["clips_per_gpu"] for size in found["ladder"]] == [2, 4, 8, 16, 20]
    assert [size["steps_per_epoch"] for size in found["ladder"]] == [10, 5, 2, 1, 1]


def test_a_period_makes_more_averages_and_a_local_state_smaller_ones(write_spec: WriteSpec, plan: Plan) -> None:
    spec = write_spec(parallel={"method": "averaging", "period": 4, "optimizer_state": "local"})
    found = plan(spec, "--json")
    assert found["averaging_bytes"] == 4 * found["parameters"] and len(found["ladder"]) == 1
    assert found["checkpoint_bytes"] == (1 + 4) * 2 * 4 * found["parameters"]  # each learner's beside the average
    assert "4 learners; 3 averages an epoch of " in plan(spec)


def test_memory_has_every_learner_of_a_rank(write_spec: WriteSpec, plan: Plan) -> None:
    """SGD with momentum: 2 tensors a learner, the gradients of one, the average, and the buffer of an average."""
    spec = write_spec(parallel={"method": "averaging"})
    found = {ranks: plan(spec, "--json", "--ranks", ranks) for ranks in (1, 4)}
    three_more = found[1]["memory_bytes_per_rank"] - found[4]["memory_bytes_per_rank"]
    assert three_more == 3 * 2 * 4 * found[1]["parameters"]


def test_a_checkpoint_in_the_background_is_a_copy_in_memory(write_spec: WriteSpec, plan: Plan) -> None:
    copied = "kept; written alongside the steps from a copy in rank 0's memory\n"
    assert copied in plan(write_spec(checkpoint={"background": True})) and copied not in plan(write_spec())


def test_clips_and_groups_of_both_sets_are_named(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path, say: Say
) -> None:
    val = read_manifest(motion_set / "val.csv")
    leaked = [replace(val.row(clip), path=str(motion_set / val.path(clip))) for clip in (3, 5)]
    train = read_manifest(motion_set / "train.csv")
    rows = [replace(train.row(clip), path=str(motion_set / train.path(clip))) for clip in range(len(train))]
    write_manifest(tmp_path / "more/train.csv", [*rows, *leaked])
    write_classes(tmp_path / "more", train.classes or ())
    spec = write_spec(data={"train": str(tmp_path / "more/train.csv")})
    status, out, err = say("plan", spec, "--json")
    (line,) = json.loads(out)["warnings"]
    assert status == 0 and err == f"warning: {line}\n"
    assert line.startswith(f"data.val shares 2 clips with data.train, such as {val.path(3)} (same path): the accuracy")
    for side in ("train", "val"):  # the same persons, and other files
        manifest = read_manifest(motion_set / f"{side}.csv")
        rows = [replace(manifest.row(clip), group=f"g{clip % 4}") for clip in range(len(manifest))]
        rows = [replace(row, path=str(motion_set / row.path)) for row in rows]
        write_manifest(tmp_path / f"more/{side}.csv", rows)
    (line,) = json.loads(say("plan", spec, "--json", f"data.val={tmp_path}/more/val.csv")[1])["warnings"]
    assert line.startswith("data.val shares 4 groups (column group) with data.train, such as g0, g1, g2: the accuracy")


def test_frozen_parts_are_named_and_counted(write_spec: WriteSpec, plan: Plan) -> None:
    """conv1 has 8 x 3 x 7 x 7 weights."""
    words = (write_spec(), "optimizer.freeze=[conv1, {names: [layer1, fc], until_epoch: 1}]")
    assert "; frozen: conv1; frozen for 1 epoch: layer1, fc" in plan(*words)
    found = plan(*words, "--json")
    assert found["parameters"] - found["trained_parameters"] == 8 * 3 * 49
