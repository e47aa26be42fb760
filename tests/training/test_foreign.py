"""A run of the user's network: its code is part of it, and all commands take it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.inference.cam.maps import Mapper
from summit_train.inference.trained import open_trained
from summit_train.models.build import build_network
from summit_train.spec import load_spec
from summit_train.training.agreement import identity
from tests.conftest import spec_writer
from tests.models import foreign
from tests.models.test_foreign import SMALL
from tests.runs import difference, final_state
from tests.worlds import Say, train


class Trained(NamedTuple):
    """spec: of the run. code: the network's file."""

    spec: Path
    run: Path
    code: Path


@pytest.fixture(scope="module")
def trained(motion_set: Path, eight_videos: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two steps of 6 virtual GPUs."""
    folder = tmp_path_factory.mktemp("foreign")
    code = folder / "nets.py"
    code.write_text(SMALL)
    spec = spec_writer(motion_set, folder)(
        "run",
        model={"arch": f"{code}:Small", "backbone": None, "width": 1.0, "dropout": 0.0, "options": {"width": 6}},
        data=eight_videos | {"num_frames": 2},
        scale={"gpus": 6, "clips_per_gpu": 1},
    )
    train(0, spec)
    return Trained(spec, folder / "runs/run", code)


def test_a_trained_one_is_used_as_any_other(trained: Trained, motion_set: Path, say: Say, tmp_path: Path) -> None:
    def output_of(*words: object) -> str:
        status, out, err = say(*words)
        assert status == 0, err
        return out

    run, video = trained.run, motion_set / "videos/val_000000.mp4"
    final = json.loads((run / "eval.json").read_text())
    assert json.loads(output_of("eval", run, "--json"))["top1_mean"] == final["top1_mean"]
    assert len(json.loads(output_of("predict", run, video, "--json"))["videos"][0]["predictions"]) == 4
    assert "cam/val_000000.png" in output_of("cam", run, video, "--out", tmp_path / "cam", "--threshold", 0)
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    output_of("export", run, "--out", tmp_path / "own.onnx")
    assert (tmp_path / "own.onnx").is_file()


def test_ranks_compare_the_code(trained: Trained) -> None:
    spec = load_spec(trained.spec)
    same = identity(spec, {}, build_network(spec))
    assert same.code["model.arch (SHA-256)"] == final_state(trained.run)["experiment"]["model.arch (SHA-256)"]


def test_changed_code_is_another_experiment_and_does_not_run(
    trained: Trained, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, marker = trained.run.with_name("changed"), tmp_path / "ran"
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(trained.run, run)
    changed = f"open({str(marker)!r}, 'w').close()\n" + SMALL
    trained.code.write_text(changed)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").touch()
    (tmp_path / "own/nets.py").write_text(changed)
    try:
        for arch in (trained.code, "own.nets"):
            more = [f"model.arch={arch}:Small"]
            for command in ("eval", "predict", "cam", "export"):
                out = ["--out", str(tmp_path / "x")]
                words = {"predict": ["nothing.mp4"], "cam": ["nothing.mp4", *out], "export": out}
                status, _, err = say(command, run, *words.get(command, []), *more)
                assert status == 2 and "its network's code has changed: model.arch (SHA-256) was" in err, command
        assert not marker.exists()
        status, _, err = say("plan", trained.spec, "name=changed")
        assert status == 2 and "model.arch (SHA-256): the checkpoint has" in err and "set model.pretrained to" in err
        assert marker.exists()
    finally:
        trained.code.write_text(SMALL)


def test_a_checkpoint_alone_starts_no_code(trained: Trained, motion_set: Path, tmp_path: Path, say: Say) -> None:
    """The spec.yaml of its run folder or the user must name the callable; and the code must be that of the training."""
    state, video = final_state(trained.run), motion_set / "videos/val_000000.mp4"
    arch = state["spec"]["model"]["arch"]
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemError('this code ran')\n")
    torch.save(state | {"spec": {**state["spec"], "model": {**state["spec"]["model"], "arch": f"{trap}:Small"}}},
               tmp_path / "alone.pt")  # fmt: skip
    status, _, err = say("predict", tmp_path / "alone.pt", video)
    assert status == 2 and f"{tmp_path}/alone.pt: a checkpoint alone does not run its network's code" in err
    status, _, err = say("predict", tmp_path / "alone.pt", video, f"model.arch={arch}")
    assert status == 0, err
    # In a run folder whose spec.yaml names another callable.
    shutil.copytree(trained.run, tmp_path / "run")
    (tmp_path / "alone.pt").rename(tmp_path / "run/checkpoints/step_00000009.pt")
    status, _, err = say("predict", tmp_path / "run/checkpoints/step_00000009.pt", video)
    assert status == 2 and "a checkpoint alone does not run" in err


@pytest.mark.parametrize(
    ("former", "latter", "message"),
    [
        ("feature_maps", "other_maps", r"has no class activation maps: they need a method feature_maps"),
        ("self.head = ", "self.last = ", r"they need a method feature_maps, and its last linear layer as"),
        ("self.drop(self.feature_maps(x)", "torch.exp(self.feature_maps(x)", r"its logits are not its head applied"),
    ],
)
def test_maps_that_are_not_those_of_the_logits_are_refused(
    trained: Trained, tmp_path: Path, former: str, latter: str, message: str
) -> None:
    opened = open_trained(trained.run)
    changed = SMALL.replace(former, latter)
    (tmp_path / "nets.py").write_text(changed.replace("self.head(", "self.last(") if "last" in latter else changed)
    weights = {name.replace("head", "last") if "last" in latter else name: v for name, v in opened.weights.items()}
    model = opened.spec.model.model_copy(update={"arch": f"{tmp_path}/nets.py:Small"})
    other = replace(opened, spec=opened.spec.model_copy(update={"model": model}), weights=weights)
    with pytest.raises(UserError, match=message):
        Mapper(other, torch.device("cpu"))


@pytest.mark.nightly
def test_a_network_from_pypi_keeps_the_promises(motion_set: Path, eight_videos: dict[str, str], tmp_path: Path) -> None:
    """transformers' VideoMAE, which knows nothing of keys; `python -m tests.models.foreign` tries others."""
    pytest.importorskip("transformers", reason="needs transformers; `make test` installs it")
    spec = spec_writer(motion_set, tmp_path)(
        "videomae",
        model={"arch": f"{foreign.__file__}:videomae", "backbone": None, "width": 1.0, "dropout": 0.0}
        | {"options": {"side": 32}},
        data=eight_videos | {"num_frames": 2},
        scale={"gpus": 2, "clips_per_gpu": 4},
        precision="fp64",
    )
    train(2, spec)
    train(1, spec, "name=alone")
    states = [final_state(tmp_path / "runs" / name) for name in ("videomae", "alone")]
    assert difference(*states) <= 1e-9
