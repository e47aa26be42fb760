"""A network of flow from its pictures to its predictions, and one that starts from a run of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from summit_train.inference.trained import open_trained
from tests.closeness import assert_near
from tests.conftest import made_once, spec_writer
from tests.flows import numbered_fields, write_moving_set, write_packed
from tests.runs import final_state, records
from tests.worlds import Said, Say, train

FLOW = {"modality": "flow", "flow_length": 2, "sampling": "uniform", "num_frames": 2, "flip": False}


def _flow_spec(folder: Path, root: Path, name: str, **sections: object) -> Path:
    data = FLOW | {"train": str(root / "train.csv"), "val": str(root / "val.csv")}
    return spec_writer(root, folder)(name, **{"data": data, **sections})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of flow, four classes of motion: train.csv with 24 videos, val.csv with 8."""
    return made_once(tmp_path_factory, "moving_flow", lambda folder: write_moving_set(folder, 24, 8))


@pytest.fixture(scope="module")
def flow_run(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an online TSM on flow, six epochs. Tests leave it as it is."""

    def make(folder: Path) -> None:
        model, optimizer = {"shift_direction": "past", "dropout": 0.0}, {"base_lr": 0.02}
        train(0, _flow_spec(folder, moving, "flow", model=model, optimizer=optimizer, schedule={"epochs": 6}))

    return made_once(tmp_path_factory, "flow_training", make) / "runs/flow"


def _refused(said: Said) -> str:
    status, _, errors = said
    assert status == 2, errors
    return errors.splitlines()[-1]  # after notes on the run


def test_a_network_learns_motion_from_flow(flow_run: Path, say: Say, moving: Path) -> None:
    plan = json.loads((flow_run / "plan.json").read_text())
    assert plan["input_bytes_per_step_and_rank"] == 8 * 2 * 32 * 32 * 4
    assert final_state(flow_run)["model"]["conv1.weight"].shape[1] == 4
    losses = [step["loss"] for step in records(flow_run, "step")]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    status, out, _ = say("eval", flow_run / "spec.yaml", "--json")
    assert status == 0 and json.loads(out)["videos"] == 8
    # predict takes the manifest, and folders of flow.
    status, out, _ = say("predict", flow_run, moving / "val.csv", "--json")
    videos = json.loads(out)
    assert status == 0 and len(videos["videos"]) == 8
    status, out, _ = say("predict", flow_run, moving / "val/000", "--json")
    assert json.loads(out)["videos"][0]["predictions"] == videos["videos"][0]["predictions"]


def test_evaluation_sees_flow_about_no_motion(flow_run: Path, moving: Path) -> None:
    """The logits of a video by hand: of 6 fields, frames of 2 start at int(5 / 2 * (i + 1/2)) = 1 and 3."""
    trained = open_trained(flow_run)
    fields = [np.array(Image.open(moving / f"val/002/flow_{axis}_{t:05}.png")) for t in (2, 3, 4, 5) for axis in "xy"]
    clip_TCHW = np.stack(fields).reshape(2, 4, 32, 32).astype(np.float32)
    with torch.no_grad():
        clip = torch.from_numpy((clip_TCHW - 128) / (0.226 * 255))[None]
        logits = trained.network(torch.device("cpu"), ready=False)(clip)[0].numpy()
    (scores,) = (flow_run / "predictions").glob("*.npz")
    assert_near(np.load(scores)["scores"][2], logits, 1e-5)


def test_commands_that_need_pictures_say_so(flow_run: Path, say: Say, motion_set: Path, tmp_path: Path) -> None:
    video = next((motion_set / "videos").iterdir())
    right = "try a run with data.modality rgb, or `predict`"
    line = _refused(say("stream", flow_run, video))
    assert "its network sees optical flow, not RGB frames" in line and right in line
    line = _refused(say("cam", flow_run, video, "--out", tmp_path / "maps"))
    assert "its network sees optical flow, not RGB frames" in line and right in line
    assert "more than the observed part" in _refused(say("eval", flow_run / "spec.yaml", "--observed", "0.5,1"))


def test_predict_names_the_videos_that_are_no_flow(flow_run: Path, say: Say, motion_set: Path) -> None:
    video = next((motion_set / "videos").iterdir())
    status, out, _ = say("predict", flow_run, video, "--json")
    (found,) = json.loads(out)["videos"]
    assert status == 1 and "is a video, and data.modality is flow: make its flow with" in found["error"]


def test_sets_of_the_other_modality_are_refused_before_training(
    moving: Path, motion_set: Path, trained_run: Path, say: Say, tmp_path: Path
) -> None:
    spec = _flow_spec(tmp_path, moving, "run")
    line = _refused(say("train", spec, f"data.train={motion_set / 'train.csv'}"))
    assert "train.csv:2: " in line and "make its flow with `summit-train data flow`" in line
    line = _refused(say("train", spec, "data.modality=rgb", "data.num_frames=2"))
    assert "holds flow, and data.modality is rgb" in line
    assert not (tmp_path / "runs").exists()
    # A folder of flow for a network of pictures is named by what it holds.
    status, out, _ = say("predict", trained_run, moving / "val/000", "--json")
    assert status == 1 and "flow_x_" in json.loads(out)["videos"][0]["error"]


def test_a_run_of_another_modality_is_another_experiment(flow_run: Path, moving: Path, say: Say) -> None:
    line = _refused(say("train", flow_run / "spec.yaml", "data.flow_length=1"))
    assert "data.flow_length: the checkpoint has '2', this run '1'" in line


def test_a_network_of_flow_starts_from_one_of_pictures(moving: Path, trained_run: Path, tmp_path: Path) -> None:
    """model.pretrained: RUN; the transfer of AAVG, section V. Here on a packed set of flow."""
    fields = [numbered_fields(6, width=32) for _ in range(8)]
    packed = str(write_packed(tmp_path / "packed", fields, [0, 1, 2, 3] * 2))
    model = {"shift_direction": "past", "pretrained": str(trained_run)}
    optimizer = {"first_lr_factor": 5.0, "base_lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0}
    spec = _flow_spec(tmp_path, moving, "run", model=model, optimizer=optimizer, schedule={"epochs": 1})
    output = train(0, spec, f"data.train={packed}", f"data.val={packed}")
    (note,) = [line for line in output.splitlines() if "pretrained:" in line]
    assert "averaged over 3 input channels: conv1.weight" in note
    assert "classifier kept, for as many classes, whose names are not known on both sides" in note
    rgb, flow = final_state(trained_run)["model"], final_state(tmp_path / "runs/run")["model"]
    kernel = rgb["conv1.weight"].mean(1, keepdim=True).expand(-1, 4, -1, -1)
    assert_near(flow["conv1.weight"], kernel, 1e-4)
    for name in ("layer2.0.conv1.weight", "layer4.1.conv1.weight", "fc.weight"):
        assert_near(flow[name], rgb[name], 1e-4, name)


def test_an_export_says_what_its_channels_are(flow_run: Path, tmp_path: Path, say: Say) -> None:
    pytest.importorskip("onnx")
    status, _, errors = say("export", flow_run, "--out", tmp_path / "flow.onnx")
    assert status == 0, errors
    description = json.loads((tmp_path / "flow.json").read_text())
    assert description["inputs"][0]["shape"] == [1, 2, 4, 32, 32]
    known = {"flow_length": 2, "mean": [128.0] * 4, "std": [0.226 * 255] * 4}
    assert {name: description["preprocessing"][name] for name in known} == known
    checked = description["verification"]["video"]
    assert checked["largest_difference"] < 1e-5 * checked["largest_logit"]
