"""`export --card`: the weights as safetensors, equal to the bit in every command, and the card."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.run_folder import checkpoint_path
from summit_train.core.saved import SAFETENSORS_KEY
from summit_train.inference.export import card
from summit_train.inference.export.card import write_card
from summit_train.inference.trained import open_trained
from summit_train.models import build_model
from summit_train.models.build import build_network
from summit_train.models.weights import load_pretrained
from summit_train.spec import dump_spec, experiment_keys, spec_from_values
from summit_train.training.checkpoint import save_checkpoint
from tests.models.test_foreign import SMALL
from tests.runs import changed_copy
from tests.worlds import Say, refused

safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
EVAL = {
    "top1_mean": 61.25, "top1_std": 0.5, "top5_mean": 97.0, "top5_std": 0.25, "videos": 11, "clips": 10, "crops": 3,
    "mode": "clips",
    "checkpoints": [
        {"path": "a", "step": 10, "top1": 60.75, "top5": 96.75},
        {"path": "b", "step": 20, "top1": 61.75, "top5": 97.25},
    ],
}  # fmt: skip


def _front(card: str) -> tuple[dict[str, Any], str]:
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.fixture(scope="module")
def run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the trained run with a known evaluation."""
    folder = tmp_path_factory.mktemp("card") / "run"
    shutil.copytree(trained_run, folder)
    (folder / "eval.json").write_text(json.dumps(EVAL))
    return folder


def test_every_command_takes_the_file_and_its_bits_are_the_checkpoints(
    run: Path, tmp_path: Path, motion_set: Path, say: Say
) -> None:
    out = tmp_path / "model"
    status, text, _ = say("export", run, "--out", out, "--card")
    weights = out / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert status == 0 and digest in text and "accuracy  from eval.json" in text and "step 20" in text
    before, after = open_trained(run), open_trained(weights)
    assert before.weights.keys() == after.weights.keys() == safetensors.load_file(weights).keys()
    for name, value in before.weights.items():
        assert value.dtype == after.weights[name].dtype and torch.equal(value, after.weights[name])
    assert (after.classes, after.step, after.experiment) == (before.classes, 20, dict(before.experiment))
    assert after.spec.model == before.spec.model and after.spec.optimizer == before.spec.optimizer
    video = motion_set / "videos/val_000000.mp4"
    said = [json.loads(say("predict", one, video, "--json")[1]) for one in (run, weights)]
    assert said[0] == said[1] and said[0]["videos"][0]["predictions"]
    model = build_model("tsm", "resnet18", 8, 4, width=before.spec.model.width, shift_direction="past")
    report = load_pretrained(model, weights, before.classes)
    assert {row.fate for row in report.rows} == {"loaded", "counter"}
    assert "classifier kept, for the same 4 classes" in str(report)


def test_the_card_says_what_is_known(run: Path, tmp_path: Path) -> None:
    facts = write_card(open_trained(run), tmp_path)
    front, text = _front((tmp_path / "README.md").read_text())
    assert front["pipeline_tag"] == "video-classification" and "license" not in front
    assert front["tags"][-2:] == ["tsm", "resnet18"]
    (index,) = front["model-index"]
    assert [one["value"] for one in index["results"][0]["metrics"]] == [61.75]  # of these weights
    assert "| mean and standard deviation (n - 1) of the last 2 checkpoints | 61.25 ± 0.71 % |" in text
    assert "| these weights, step 20 | 61.75 % |" in text
    assert "11 videos of val.csv; of each 10 clips × 3 crops" in text
    experiment = open_trained(run).experiment["data.train (fingerprint)"]
    assert f"| training | train.csv | 80 | {experiment} |" in text and "| validation | val.csv | 11 |" in text
    assert re.search(r"validation \| val.csv \| 11 \| [0-9a-f]{32} \|", text)
    assert "right, up, left, down" in text and "Global batch: 8 clips" in text
    assert facts["sha256"] in text and "- torch: " + torch.__version__.partition("+")[0] in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["data"]["train"] == "train.csv" and recipe["data"]["root"] is None and recipe["run_dir"] == "runs"
    assert str(tmp_path.parent) not in text  # no folder of this machine


def test_a_checkpoint_alone_has_a_card_that_says_what_is_missing(run: Path, tmp_path: Path) -> None:
    spec = open_trained(run).spec.model_dump(mode="json") | {"name": "a|b <script> [x](y) # c"}
    alone = changed_copy(run, tmp_path / "alone.pt", spec=spec, experiment={})
    assert not write_card(open_trained(alone), tmp_path / "out")["has_accuracy"]
    front, text = _front((tmp_path / "out/README.md").read_text())
    assert "model-index" not in front and "metrics" not in front
    assert "Not known: the run folder has no eval.json" in text and "there is no environment.json" in text
    assert "| training | train.csv | not known | not known |" in text
    assert "# a\\|b &lt;script&gt; \\[x\\](y) \\# c\n" in text  # a name is text


def test_eval_scores_the_file_as_its_checkpoint(run: Path, tmp_path: Path, say: Say) -> None:
    own = write_card(open_trained(run), tmp_path)["weights"]
    subprocess.run(["sha256sum", "--check", "model.safetensors.sha256"], cwd=tmp_path, check=True, capture_output=True)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    pair = [open_trained(copy).path, own]
    status, text, _ = say("eval", copy, "--checkpoints", *pair, "--name", "both", "--json")
    first, second = json.loads(text)["checkpoints"]
    assert status == 0 and second["path"] == own and first | {"path": own} == second


def test_the_card_of_own_parts_names_their_files_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/nets.py").write_text(SMALL)
    own = f"{tmp_path}/code/parts.py"
    data = {"train": "a", "val": "b", "num_frames": 2, "crop": 16, "short_side": [16, 20]}
    data["augment"] = ["scale_jitter", f"{own}:dim"]
    model = {"arch": f"{tmp_path}/code/nets.py:Small", "num_classes": 4}
    values = {"name": "own", "run_dir": str(tmp_path), "model": model, "data": data, "loss": {"kind": f"{own}:Focal"}}
    values["evaluate"] = {"short_side": 16, "measures": [f"{own}:recall"]}
    spec = spec_from_values(values, "here")
    network = build_network(spec)
    weights = network.state_dict()
    weights["head.bias"][0] = torch.nan
    state = {"model": weights, "optimizer": {}, "step": 1, "spec": spec.model_dump(mode="json")}
    state["experiment"] = experiment_keys(spec) | dict(network.sources)
    save_checkpoint(checkpoint_path(spec.run_path, 1), state)
    (spec.run_path / "spec.yaml").write_text(dump_spec(spec))
    out = tmp_path / "out"
    file = Path(write_card(open_trained(spec.run_path), out)["weights"])
    text = (out / "README.md").read_text()
    assert "VIDEO ... model.arch=nets.py:Small\n" in text and 'safetensors", ["model.arch=nets.py:Small"])' in text
    assert network.sources["model.arch (SHA-256)"] in text
    assert all(f"kind: parts.py:{name}\n" in text for name in ("dim", "Focal", "recall"))
    assert str(tmp_path) not in text and str(tmp_path).encode() not in file.read_bytes()
    with pytest.raises(UserError, match="a checkpoint alone does not run its network's code"):
        open_trained(file)
    monkeypatch.chdir(tmp_path / "code")
    again = open_trained(file, ["model.arch=nets.py:Small"])
    assert all(torch.equal(value.nan_to_num(7), weights[name].nan_to_num(7)) for name, value in again.weights.items())


def test_a_file_that_gives_other_weights_back_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, out = open_trained(run), tmp_path / "out"
    for change in (lambda x: x + 1, lambda x: x.double(), lambda x: x[None]):
        wrong = trained.weights | {"fc.bias": change(trained.weights["fc.bias"])}
        monkeypatch.setattr(card, "load_checkpoint", lambda path, bound, wrong=wrong: {"model": wrong})
        with pytest.raises(RunFailed, match="the file has other weights"):
            write_card(trained, out)
        assert list(out.iterdir()) == []


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, run: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content, message in (
        (b"x" * 99, "cannot be read as a safetensors file"),
        (safetensors.save({"w": torch.ones(3)}), "not a checkpoint of a run"),
        (safetensors.save({"w": torch.ones(3)}, {SAFETENSORS_KEY: "[1]"}), "must hold values by name, got list"),
        (safetensors.save({"w": torch.ones(3)}, {SAFETENSORS_KEY: "{"}), "cannot be read as a safetensors file"),
        (safetensors.save({"w": torch.ones(3)}, {SAFETENSORS_KEY: "[" * 200_000}), "are nested too deeply"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_trained(path)
    # Of a stranger's file `model.pretrained` takes the tensors that fit by name and shape.
    model = build_model("tsn", "resnet18", 8, 4, width=0.125)
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    path.write_bytes(safetensors.save(state, {"format": "pt"}))
    load_pretrained(model, path)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_mistakes_are_named(run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("export", run, "--out", tmp_path / "a", "--card")
    assert "--card must be used without --stream" in refused(say(*words, "--stream"))
    (tmp_path / "file").touch()
    assert say("export", run, "--out", tmp_path / "file", "--card")[0] == 2
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install safetensors" in refused(say(*words)) and not (tmp_path / "a").exists()
