"""Where the two tasks part: what the spec says once, what each refuses, and whose code a run loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.watch import StopRequest
from summit_train.data.dataset import Dataset
from summit_train.evaluation.evaluation import build_scorer
from summit_train.evaluation.scoring import Scorer
from summit_train.spec import Spec, dump_spec, load_spec, spec_from_values
from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.loss import DetectionLoss
from summit_train.tasks.detection.scoring import DetectionScorer
from summit_train.training.loss import Loss, build_loss
from tests.conftest import WriteSpec
from tests.detectors import detector_spec
from tests.worlds import environment

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def _detector(**sections: Any) -> Spec:
    """A spec that says its task once."""
    values: dict[str, Any] = {
        "name": "detector",
        "task": "detection",
        "model": {"arch": "tsn", "num_classes": 2},
        "data": {"train": "train.csv", "val": "val.csv", "augment": "whole"},
        "evaluate": {"mode": "stream", "crops": "full"},
    }
    return spec_from_values(values | sections, "a test")


def test_the_task_alone_makes_a_detector(tmp_path: Path) -> None:
    spec = _detector()
    assert spec.model.detector == DetectorSpec() and spec.loss.kind == "detection"
    assert _detector(loss={"kind": "detection"}, model={"arch": "tsn", "num_classes": 2, "detector": {}}) == spec
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    assert load_spec(tmp_path / "spec.yaml") == spec
    found = build_loss(spec)
    assert isinstance(found, DetectionLoss) and (found.detector, found.num_classes) == (DetectorSpec(), 2)


def test_without_a_task_a_network_classifies(write_spec: WriteSpec) -> None:
    spec = load_spec(write_spec())
    assert (spec.task, spec.loss.kind, spec.model.detector) == ("classification", "softmax", None)
    assert isinstance(build_loss(spec), Loss)


def test_each_task_has_its_scorer_which_sees_a_later_request_to_stop(write_spec: WriteSpec) -> None:
    spec, stop = load_spec(write_spec()), StopRequest()
    val = Dataset.open(spec, "val")
    for one, kind in ((spec, Scorer), (_detector(), DetectionScorer)):
        scorer = build_scorer(one, val, World(), CPU, stop)
        assert type(scorer) is kind and scorer.spec is one and scorer.stop is stop


def test_each_task_refuses_the_keys_of_the_other(write_spec: WriteSpec) -> None:
    with pytest.raises(UserError) as error:
        load_spec(write_spec(), ["loss.kind=detection", "data.augment=whole", "model.detector.nms=0.5"])
    lines = str(error.value)
    assert "loss.kind: must be softmax or binary with task classification, got detection" in lines
    assert "data.augment: must not be whole with task classification, whose networks see crops" in lines
    assert "model.detector: must be null with task classification" in lines
    with pytest.raises(UserError, match=r"task: .*classification.*detection"):
        _detector(task="segmentation")


@pytest.mark.parametrize(
    ("section", "keys", "right"),
    [
        ("model", {"arch": "trn"}, "model.arch: must be tsn or tsm with task detection, got trn"),
        ("model", {"arch": "tsm"}, "model.shift_direction: must be past with task detection"),
        ("model", {"dropout": 0.5}, "model.dropout: must be 0.0 with task detection: only"),
        ("model", {"non_local": "tsm", "backbone": "resnet50"}, "model.non_local: must be false with task detection"),
        ("data", {"modality": "flow"}, "data.modality: must be rgb with task detection: only"),
        ("data", {"region": "columns"}, "data.region: must be null with task detection: only"),
        ("data", {"erase": 0.25}, "data.erase: must be 0.0 with task detection: only"),
        ("data", {"repeats": 2}, "data.repeats: must be 1 with task detection: only"),
        ("data", {"sampling": "uniform"}, "data.sampling: must be dense with task detection: only"),
        ("data", {"augment": "rand_augment"}, "must not be rand_augment with task detection, whose boxes stay upright"),
        ("evaluate", {"mode": "clips"}, "evaluate.mode: must be stream with task detection, got clips"),
        ("evaluate", {"crops": 1}, "evaluate.crops: must be full with task detection, got 1"),
        ("evaluate", {"precise_bn": 4}, "evaluate.precise_bn: must be 0 with task detection: only"),
        ("loss", {"kind": "softmax"}, "loss.kind: must be detection with task detection, got softmax"),
        ("loss", {"class_weights": "balanced"}, "loss.class_weights: must be null with task detection: only"),
        ("loss", {"label_smoothing": 0.5}, "loss.label_smoothing: must be 0.0 with task detection: only"),
    ],
)
def test_a_detector_takes_no_key_that_does_not_fit_boxes(section: str, keys: dict[str, Any], right: str) -> None:
    with pytest.raises(UserError) as error:
        detector_spec(**{section: keys})
    assert right in str(error.value)


def test_the_steps_to_add_a_task_name_functions_that_are_there() -> None:
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    section = page[page.index("## Add a task") : page.index("## Add a data set")]
    named = re.findall(r"((?:`\w+`(?:, )?)+) in `(?:summit_train/)?([\w/]+\.py)`", section)
    assert len(named) >= 10
    for names, path in named:
        top = ROOT if path.startswith("papers/") else ROOT / "summit_train"
        source = (top / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(def|class) {name}\(|^{name}\b", source, re.MULTILINE), f"{path}: {name}"


def test_a_run_of_classification_loads_no_code_of_detection(write_spec: WriteSpec) -> None:
    """From the plan to the last page, in a process of its own."""
    program = (
        "import sys\n"
        "from summit_train.__main__ import main\n"
        "for command in ('plan', 'train'):\n"
        "    assert main([command, sys.argv[1]]) == 0\n"
        "print(*(name for name in sys.modules if name.startswith('summit_train.tasks')))\n"
    )
    spec = write_spec(schedule={"epochs": 1, "warmup_epochs": 0})
    done = subprocess.run([sys.executable, "-c", program, spec], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "done in" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == ""
