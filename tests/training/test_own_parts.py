"""A run with the user's own loss, augmentation, measure and decay, those of docs/own_parts.md; what is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256
from summit_train.core.own_parts import OwnPart
from summit_train.data.dataset import Dataset
from summit_train.data.video.own_augment import OwnAugment
from summit_train.data.video.rand_augment import apply_operations, draw_operations
from summit_train.evaluation.scores import Scores
from summit_train.plan import make_plan
from summit_train.report.records import RunRecord
from summit_train.report.tables import remarks_of, summary_row
from summit_train.spec import Spec, load_spec, own_parts
from summit_train.spec.model_data import RandAugmentSpec
from summit_train.sweep.grid import load_sweep
from summit_train.sweep.status import read_rows, tables
from summit_train.training.agreement import own_sources
from summit_train.training.inputs import loss_and_measures
from summit_train.training.loss import Loss, build_loss
from tests.closeness import assert_near
from tests.conftest import WriteSpec, spec_writer
from tests.runs import final_state, records
from tests.worlds import Say, command, refused, train

PAGE = (Path(__file__).resolve().parents[2] / "docs/own_parts.md").read_text(encoding="utf-8")
# The page has a network first, then the other callables.
_, CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
_, KEYS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def trained(motion_set: Path, eight_videos: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, a step each, of 4 virtual GPUs. On other ranks and resumed: "own parts" of test_golden_runs.py."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "parts.py").write_text(CODE)
    sections: dict[str, Any] = yaml.safe_load(KEYS.replace("./", f"{folder}/"))
    sections["data"] |= eight_videos | {"workers": 1}
    sections["evaluate"] |= {"every_epochs": 1, "last_checkpoints": 2}
    sections["schedule"]["warmup_epochs"] = 0
    train(0, spec_writer(motion_set, folder)("own", precision="fp64", **sections))
    # Half of the decay is done before the second step: (1 - 0.5) / (1 - 0.4).
    first, second = (record["lr"] for record in records(folder / "runs/own", "step"))
    assert first == 0.005 and second == pytest.approx(first * 5 / 6, rel=1e-12)
    return folder


def test_the_measure_is_wherever_top_1_is(trained: Path, say: Say, tmp_path: Path) -> None:
    run = trained / "runs/own"
    result, best = (json.loads((run / name).read_text()) for name in ("eval.json", "checkpoints/best.json"))
    scores = [row["recall"] for row in result["checkpoints"]]
    assert result["recall_mean"] == pytest.approx(sum(scores) / 2)
    assert result["recall_std"] == pytest.approx(np.std(scores, ddof=1))
    assert (best["measure"], best["value"]) == ("recall", max(record["recall"] for record in records(run, "eval")))
    assert any(key.startswith("best_recall_") for key in final_state(run))
    status, out, _ = say("eval", run)
    assert status == 0 and f"  recall {result['recall_mean']:.4g}: mean and standard deviation (n - 1) over" in out
    found = RunRecord(run)
    assert summary_row(found)["recall"].startswith(f"{result['recall_mean']:.4g} \N{PLUS-MINUS SIGN}")
    assert any(f"recall {best['value']:.4g} in the validation" in remark for remark in remarks_of(found))
    # A sweep of one run, which is there already.
    (tmp_path / "sweep.yaml").write_text(f"name: one\nbase: {trained}/own.yaml\ngrid: {{seed: [0]}}\n")
    sweep = load_sweep(tmp_path / "sweep.yaml", [f"run_dir={tmp_path}"])
    shutil.copytree(run, sweep.runs[0].spec.run_path)
    rows = read_rows(sweep)
    assert (rows[0]["state"], rows[0]["recall"]) == ("done", result["recall_mean"])
    heads, cells = (re.split(r"\s{2,}", line.strip()) for line in tables(sweep, rows).splitlines()[:2])
    assert cells[heads.index("recall")] == f"{result['recall_mean']:.4g}"


def test_a_changed_file_is_another_experiment(trained: Path, say: Say) -> None:
    state = final_state(trained / "runs/own")
    assert state["spec"]["loss"]["kind"] == f"{trained}/parts.py:Focal"
    try:
        (trained / "parts.py").write_text(CODE + "\n")
        line = refused(say("train", trained / "own.yaml"))
        for key in ("loss.kind parts.py:Focal", "data.augment parts.py:dim", "schedule.decay parts.py:hold"):
            assert f"{key} (SHA-256): the checkpoint has '{state['experiment'][f'{key} (SHA-256)']}'" in line
        assert "evaluate.measures" not in line  # it decides nothing of the training
        # The scores do not depend on it.
        assert say("eval", trained / "runs/own", "--name", "again")[0] == 0
    finally:
        (trained / "parts.py").write_text(CODE)


BAD = """
import torch
from torch import nn
import numpy as np

class Learns(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3))
    def forward(self, logits, targets):
        return logits.mean()

def whole(logits, targets):
    return 3
def square(logits, targets):
    return logits
def constant(logits, targets):
    return torch.ones(len(logits))
def infinite(logits, targets):
    return logits.sum(1) / 0
def noisy(logits, targets):
    return (logits + torch.randn_like(logits)).logsumexp(1)
def several(logits, targets):
    return logits.mean() if len(logits) > 1 else logits

def in_place(logits, targets):
    targets.zero_()
    return nn.functional.cross_entropy(logits.mul_(2), targets, reduction="none")

class Opens:
    calls = 0
    def __call__(self, clip, generator):
        self.calls += 1
        return clip if self.calls < 4 else open("/no/such/file")

class Sums:
    def __init__(self):
        self.buffer = np.zeros((4, 32, 32, 3), np.uint8)
    def __call__(self, clip, generator):
        self.buffer += clip
        return self.buffer

class Remembers:
    seen = 0
    def __call__(self, logits, targets):
        self.seen += len(logits)
        return logits.logsumexp(1) * self.seen

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, logits, targets):
        self.calls += 1
        return logits.mean()

def late(logits, targets):
    return logits.mean() if len(logits) < 4 else logits
def fails(*given):
    return given[9]

def as_floats(clip, generator):
    return clip / 255
def shorter(clip, generator):
    return clip[1:]
def none(clip, generator):
    clip[:] = 0
def free(clip, generator):
    return (clip * np.random.default_rng().uniform()).astype(np.uint8)
def alone(clip):
    return clip

def infinitely(scores, labels):
    return float("inf")
def every(scores, labels):
    return scores.mean(0)
def text(scores, labels):
    return "0.5"
def infinite_later(scores, labels):
    return 1.0 if len(labels) == 4 else float("inf")
"""


def _bad(write_spec: WriteSpec, tmp_path: Path, word: str, **sections: Any) -> Spec:
    (tmp_path / "bad.py").write_text(BAD)
    return load_spec(write_spec("bad", **sections), [word.replace("bad.py", f"{tmp_path}/bad.py")])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("loss.kind=bad.py:whole", r"whole must return the loss of each clip, floats \(3,\).*, got int"),
        ("loss.kind=bad.py:square", r"square must return .* or their mean, got torch\.float64 \(3, 4\)"),
        ("loss.kind=bad.py:constant", r"constant must return a function of the logits, got one without a gradient"),
        ("loss.kind=bad.py:infinite", r"infinite must return finite losses, got -?inf of logits of a normal distrib"),
        ("loss.kind=bad.py:noisy", r"noisy must return the same for the same scores and labels; draw nothing, and"),
        ("loss.kind=bad.py:Remembers", r"Remembers must return the same for the same scores and labels"),
        ("loss.kind=bad.py:Counts", r"Counts must return the same for the same scores and labels"),
        ("loss.kind=bad.py:several", r"several must return the loss of each clip, floats \(1,\).*, got torch.* \(1, 4"),
        ("loss.kind=bad.py:Learns", r"Learns must have no parameters: nothing trains them"),
        ("loss.kind=no.py:Focal", r".*no\.py not found; a relative path starts at the current directory"),
        ("loss.kind=no_such.loss:Focal", r".* cannot be imported: No module named 'no_such'; install what is missing"),
        ("data.augment=[whole,bad.py:free]", r"must not be whole with task classification"),
        ("data.augment=[multi_scale_crop,bad.py:as_floats]", r".*uint8 \(4, 32, 32, 3\), got float64 "),
        ("data.augment=[scale_jitter,bad.py:shorter]", r"shorter must return .*, got uint8 \(3, 32, 32, 3\)"),
        ("data.augment=[scale_jitter,bad.py:Sums]", r"Sums must return the same for the same clip and draws"),
        ("data.augment=[scale_jitter,bad.py:none]", r"none must return a NumPy array uint8 .*, got NoneType"),
        ("data.augment=[scale_jitter,bad.py:free]", r"free must return the same for the same clip and draws"),
        ("data.augment=[scale_jitter,bad.py:alone]", r"alone\(clip\) must take clip, generator: too many positional"),
        ("evaluate.measures=[bad.py:infinitely]", r"infinitely must return a finite number.*, got inf"),
        ("evaluate.measures=[bad.py:every]", r"every must return a finite number, or NaN .*, got array\(.*, ndarray"),
        ("evaluate.measures=[bad.py:text]", r"text must return a finite number, .*, got '0\.5', str"),
    ],
)
def test_what_a_part_returns_is_checked_at_once(write_spec: WriteSpec, tmp_path: Path, word: str, message: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key}: (.*/bad\.py:)?{message}") as raised:
        loss_and_measures(_bad(write_spec, tmp_path, word, precision="fp64"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("word", ["loss.kind=", "data.augment=[scale_jitter,", "evaluate.measures=["])
def test_an_error_within_keeps_its_traceback(write_spec: WriteSpec, tmp_path: Path, word: str) -> None:
    with pytest.raises(IndexError, match="range") as raised:
        loss_and_measures(_bad(write_spec, tmp_path, f"{word}bad.py:fails{']' * word.count('[')}"))
    assert raised.traceback[-1].path == tmp_path / "bad.py"


@pytest.mark.parametrize("word", ["loss.kind=bad.py:late", "evaluate.measures=[bad.py:infinite_later]"])
def test_a_failure_in_a_validation_ends_all_ranks(write_spec: WriteSpec, tmp_path: Path, word: str) -> None:
    """Repaired, a measure is taken by the run that continues: NaN is unknown."""
    _bad(write_spec, tmp_path, "seed=0", evaluate={"every_epochs": 1}, schedule={"epochs": 1})
    spec, word = tmp_path / "bad.yaml", word.replace("bad.py", f"{tmp_path}/bad.py")
    status, output = command(2, "train", str(spec), word)
    (line,) = (line for line in output.splitlines() if " must return " in line)
    assert status == 2 and line.startswith(f"summit-train: {word.partition('=')[0]}:") and "Traceback" not in output
    if "evaluate" in word:
        (tmp_path / "bad.py").write_text(BAD.replace('"inf"', '"nan"'))
        assert "resumes from" in train(0, spec, word)
        assert [record["infinite_later"] for record in records(tmp_path / "runs/bad", "eval")] == [None]


def _write_worth(path: Path, worth: int) -> None:
    path.write_text(f"def one(scores, labels, worth={worth}):\n    return worth\n")


def test_the_measure_that_ends_training_is_of_the_experiment(write_spec: WriteSpec, tmp_path: Path, say: Say) -> None:
    file = tmp_path / "own.py"
    _write_worth(file, 1)
    stop = {"epochs": 2, "early_stop": {"measure": "one", "epochs": 1}}
    path = write_spec(evaluate={"every_epochs": 1, "measures": [f"{file}:one"]}, schedule=stop)
    train(0, path)
    options = f"evaluate.measures=[{{kind: {file}:one, options: {{worth: 3}}}}]"
    assert "evaluate.measures: the checkpoint has" in refused(say("train", path, options))
    _write_worth(file, 2)
    assert "evaluate.measures own.py:one (SHA-256): the checkpoint has" in refused(say("train", path))


def test_the_best_is_of_one_measure(write_spec: WriteSpec, tmp_path: Path) -> None:
    """With other options, or from another file, it begins with none, also where the log has values of that name."""
    file, run = tmp_path / "own.py", tmp_path / "runs/run"
    keys = {"every_epochs": 1, "measures": [f"{file}:one"]}
    path = write_spec(evaluate=keys, schedule={"epochs": 3}, checkpoint={"keep_best": "one", "keep": 3})
    options = f"evaluate.measures=[{{kind: {file}:one, options: {{worth: 3}}}}]"
    for in_file, words, step, value in ((5, [], 10, 5), (5, [options], 20, 3), (2, [], 20, 2)):
        _write_worth(file, in_file)
        train(0, path, *words)
        best = json.loads((run / "checkpoints/best.json").read_text())
        assert best == {"step": step, "measure": "one", "value": value}
        (run / "checkpoints/step_00000030.pt").unlink()


def test_a_loss_may_change_what_it_receives(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Clips of class 3 whose highest logit is that of 3, 0 and 3."""
    logits = torch.tensor([[0.0, 0, 0, 2], [2.0, 0, 0, 0], [0.0, 0, 0, 2]], requires_grad=True)
    outputs, targets = logits * 1, torch.tensor([3, 3, 3])
    loss = build_loss(_bad(write_spec, tmp_path, "loss.kind=bad.py:in_place"))
    value, correct = loss.of_batch(outputs, targets, (32, 32), 0)
    assert correct == 2 and targets.tolist() == [3, 3, 3] and outputs.equal(logits)
    value.backward()
    expected = logits.detach().requires_grad_()
    functional.cross_entropy(2 * expected, torch.zeros(3, dtype=torch.int64)).backward()
    assert_near(logits.grad, expected.grad, 1e-6)


class _Frozen:
    """An augmentation's results, in one array that each call fills, or views of the clip that it changed."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place, self.buffer = in_place, np.zeros((4, 32, 32, 3), np.uint8)

    def __call__(self, clip: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        target = clip if self.in_place else self.buffer
        target[:] = generator.integers(256)
        return target[:, ::-1]


@pytest.mark.parametrize("in_place", [True, False])
def test_each_view_of_a_clip_is_its_own(write_spec: WriteSpec, tmp_path: Path, in_place: bool) -> None:
    (tmp_path / "one.py").write_text("from tests.training.test_own_parts import _Frozen as Frozen\n")
    own = {"kind": f"{tmp_path}/one.py:Frozen", "options": {"in_place": in_place}}
    data = {"augment": ["scale_jitter", own], "repeats": 2}
    spec = load_spec(write_spec("views", data=data, scale={"clips_per_gpu": 2}))
    dataset = Dataset.open(spec, "train")
    plan = make_plan(spec, 1, len(dataset))
    with dataset.training_batches(plan.order(), 0, 1, range(1)) as batches:
        clips = next(batches).clips.numpy()
    values = [int(clip.flat[0]) for clip in clips]
    assert len(clips) == 2 and values[0] != values[1] and all((clip == clip.flat[0]).all() for clip in clips), values


@pytest.mark.parametrize("workers", [0, 1])
def test_an_os_error_of_augmentation_keeps_its_traceback(write_spec: WriteSpec, tmp_path: Path, workers: int) -> None:
    _bad(write_spec, tmp_path, "seed=0")
    word = f"data.augment=[scale_jitter,{tmp_path}/bad.py:Opens]"
    status, output = command(0, "train", str(tmp_path / "bad.yaml"), word, f"data.workers={workers}")
    assert status == 1 and 'bad.py", line ' in output and "No such file or directory: '/no/such/file'" in output
    assert "out of memory" not in output


def test_a_rare_draw_of_a_loss_is_keyed(write_spec: WriteSpec, tmp_path: Path) -> None:
    code = "import torch\ndef rare(logits, targets):\n    return logits.mean() * (len(logits) < 4 or torch.rand(()))\n"
    (tmp_path / "own.py").write_text(code)
    loss = build_loss(load_spec(write_spec(), [f"loss.kind={tmp_path}/own.py:rare"]))
    before = torch.get_rng_state()
    one, again, other = (loss.of_batch(torch.ones(5, 4), torch.zeros(5).long(), (1, 1), seed)[0] for seed in (1, 1, 2))
    assert one == again != other and torch.equal(torch.get_rng_state(), before)


GLOBAL = """
import random
import numpy as np
import torch
def rare(clip, generator, library):
    draw = {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[library]
    return np.full_like(clip, int(256 * generator.random()) if draw() < 0.1 else 0)
"""


@pytest.mark.parametrize("library", ["random", "numpy", "torch"])
def test_global_draws_of_an_augmentation_are_keyed(tmp_path: Path, library: str) -> None:
    """The global generators, and what is drawn from the augmentation's own, stay as they were."""
    (tmp_path / "own.py").write_text(GLOBAL)
    vary = OwnAugment(OwnPart.open("data.augment", f"{tmp_path}/own.py:rare", {"library": library}))
    clip = np.zeros((1, 1, 1, 1), np.uint8)

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]

    before = states()
    one, other = ([vary(clip, rng.key(0, "own", number)).item() for number in range(100)] for _ in range(2))
    drawn = [int(256 * rng.key(0, "own", number).random()) for number in range(100)]
    assert one == other and states() == before
    assert 2 <= np.count_nonzero(one) <= 25
    assert all(found in (0, right) for found, right in zip(one, drawn, strict=True))


def test_parts_of_one_name_are_all_compared(write_spec: WriteSpec, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "aug.py").write_text(f"def one(clip, generator):\n    return clip  # {name}\n")
    words = ",".join(f"{tmp_path}/{name}/aug.py:one" for name in "aba")
    sources = own_sources(load_spec(write_spec(), [f"data.augment=[scale_jitter,{words}]"]))
    digests = {name: file_sha256(tmp_path / name / "aug.py") for name in "ab"}
    key = "data.augment aug.py:one"
    assert sources == {
        f"{key} (SHA-256)": digests["a"],
        f"{key} 2 (SHA-256)": digests["b"],
        f"{key} 3 (SHA-256)": digests["a"],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "loss.kind=a.py:b loss.label_smoothing=0.1",
            "must be 0.0 with loss.kind a.py:b: only a built-in one reads it",
        ),
        ("loss.kind=a.py:b loss.class_weights=balanced", "class_weights: must be null with loss.kind a.py:b: only"),
        ("loss.options.gamma=2", "loss.options: must be {} with loss.kind softmax: only one of your own reads it"),
        ("loss.like=binary", "loss.like: must be softmax with loss.kind softmax: only one of your own reads it"),
        ("loss.kind=softmx", "'softmx' is not a choice; did you mean softmax? valid: softmax, binary, detection, pack"),
        ("data.augment=a.py:b", "'a.py:b' is not a choice; valid: scale_jitter, multi_scale_crop, rand_augment, whole"),
        ("data.augment=[a.py:b,whole]", "data.augment: must be one of scale_jitter, multi_scale_crop, rand_augment,"),
        ("data.augment=[rand_augment,scale_jitter]", "then augmentations of your own, got rand_augment, scale_jitter"),
        ("data.augment=[]", "then augmentations of your own, got none"),
        ("data.augment=[a.py:b]", "rand_augment, whole, then augmentations of your own, got a.py:b"),
        (
            "data.augment=[scale_jitter,{kind: a.py:b, option: 3}]",
            "data.augment.1.option: unknown key; did you mean op",
        ),
        ("evaluate.measures=[f1]", "measures.0.kind: 'f1' is not a choice; valid: package.module:callable, FI"),
        ("evaluate.measures=[a.py:top1]", "evaluate.measures: must have names that nothing else has, got top1"),
        ("evaluate.measures=[a.py:goodput]", "evaluate.measures: must have names that nothing else has, got goodput"),
        ("evaluate.measures=[a.py:f1_mean]", "evaluate.measures: must have names that nothing else has, got f1_mean"),
        ("evaluate.measures=[a.py:f1,b.py:f1]", "evaluate.measures: must have names that nothing else has, got f1"),
        ("checkpoint.keep_best=f1", "must be top1 or null with loss.kind softmax, got f1"),
        (
            "evaluate.measures=[a.py:f1] checkpoint.keep_best=f2",
            "must be top1, f1 or null with loss.kind softmax, got ",
        ),
    ],
)
def test_keys_that_cannot_be_are_refused(write_spec: WriteSpec, words: str, message: str) -> None:
    path = write_spec(evaluate={"every_epochs": 1})
    with pytest.raises(UserError) as raised:
        load_spec(path, words.split() if "{" not in words else [words])
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1
    assert load_spec(path, ["data.augment=[multi_scale_crop]"]).data.augment == "multi_scale_crop"  # a list of one


def test_detectors_take_no_own_part(write_spec: WriteSpec) -> None:
    words = ["task=detection", "data.augment=[whole,a.py:b]", "evaluate.measures=[a.py:f1]", "loss.kind=a.py:b"]
    with pytest.raises(UserError) as raised:
        load_spec(write_spec(), words)
    for message in (
        "data.augment: must have no augmentation of your own with task detection",
        "evaluate.measures: must be [] with task detection",
        "loss.kind: must be detection with task detection",
    ):
        assert message in str(raised.value)


TARGETS = """
import torch
from torch.nn import functional
def each(logits, targets):
    assert targets.shape == (len(logits),) and targets.dtype == torch.int64
    return functional.cross_entropy(logits, targets, reduction="none")
def mean(logits, targets):
    return functional.cross_entropy(logits, targets)
def shares(logits, targets):
    assert targets.shape == logits.shape and targets.dtype == logits.dtype
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
def shared(logits, targets):
    assert targets.shape == logits.shape and targets.dtype == logits.dtype
    return functional.cross_entropy(logits, targets, reduction="none")
"""


@pytest.mark.parametrize(
    ("name", "more", "kind"),
    [
        ("each", [], "softmax"),
        ("mean", [], "softmax"),
        ("shares", ["loss.like=binary"], "binary"),
        ("shared", ["data.mix.mixup=0.8"], "softmax"),
    ],
)
def test_targets_are_those_of_the_page(
    write_spec: WriteSpec, tmp_path: Path, name: str, more: list[str], kind: str
) -> None:
    """Each is a built-in loss, written in the way that the page says; of a batch and of a validation."""
    (tmp_path / "own.py").write_text(TARGETS)
    spec = load_spec(write_spec(precision="fp64"), [f"loss.kind={tmp_path}/own.py:{name}", *more])
    own, built_in, draw = build_loss(spec), Loss(kind), torch.Generator().manual_seed(1)
    logits = torch.randn(5, 4, dtype=torch.float64, generator=draw)
    several = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)
    given = several if kind == "binary" else torch.tensor([2, 3, 3, 0, 3])
    assert own(logits, given).item() == pytest.approx(built_in(logits, given).item(), rel=1e-14)
    assert own.of_batch(logits, given, (1, 1), 0)[1] == built_in.of_batch(logits, given, (1, 1), 0)[1]
    labels = np.array([[1, 0, 1, 0]] * 5, bool) if kind == "binary" else given.numpy()
    scores = Scores(np.arange(5), labels, logits.float().numpy(), np.arange(5) != 2)
    assert own.of_scores(scores) == pytest.approx(built_in.of_scores(scores), rel=1e-7)


def test_built_in_parts_are_reached_by_the_same_door(write_spec: WriteSpec) -> None:
    module = "summit_train.data.video.rand_augment:RandAugment"
    words = [
        "loss.kind=summit_train.training.loss:Loss", "loss.options.label_smoothing=0.25",
        f'data.augment=[scale_jitter,{{kind: "{module}", options: {{layers: 3}}}}]',
        'evaluate.measures=[{kind: "summit_train.tasks.classification.measures:top", options: {k: 3}}]',
    ]  # fmt: skip
    spec = load_spec(write_spec(), words)
    loss_and_measures(spec)
    loss, augment, measure = own_parts(spec, "loss", "data", "evaluate")
    logits, labels = torch.randn(6, 4), torch.arange(6) % 4
    expected = functional.cross_entropy(logits, labels, label_smoothing=0.25)
    assert torch.equal(loss.make("logits", "targets")(logits, labels), expected)
    clip = np.random.default_rng(1).integers(256, size=(2, 32, 32, 3), dtype=np.uint8)
    settings = RandAugmentSpec(layers=3)
    for seed in range(4):
        one, other = np.random.default_rng(seed), np.random.default_rng(seed)
        varied = augment.make("clip", "generator")(clip, one)
        assert np.array_equal(varied, apply_operations(draw_operations(settings, other), clip))
    scores = Scores(np.arange(6), labels.numpy(), logits.numpy(), np.ones(6, bool))
    assert measure.make("scores", "labels")(scores.scores, scores.labels) == scores.top(3)
