"""`summit-train init`: what it finds in a folder of real videos, the spec it writes, the commands it prints."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from summit_train.data.manifest import read_manifest
from summit_train.spec import load_spec
from tests.runs import full_disk
from tests.worlds import Say, refused

# What makes a run short, and one of the usual base small.
SHORT = "schedule.epochs=1 schedule.warmup_epochs=0"
SMALL = f"{SHORT} model.backbone=resnet18 model.width=0.125 data.crop=32 evaluate.short_side=32 evaluate.clips=1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, which is the current one, on a machine without a GPU."""
    monkeypatch.setattr("summit_train.cli.init._DRIVERS", ())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _class_folders(motion_set: Path, folder: Path, part: str, videos: int) -> None:
    """Copy the first videos of a part into class folders."""
    names = (motion_set / "classes.txt").read_text().split()
    with open(motion_set / f"{part}.csv") as file:
        rows = list(csv.DictReader(file))[:videos]
    for row in rows:
        class_folder = folder / f"moves {names[int(row['label'])]}"
        class_folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(motion_set / row["path"], class_folder)


def _lists(motion_set: Path, folder: Path, videos: int, *parts: str) -> None:
    """Copy the first videos of the training set, with lists of them under these names."""
    (folder / "videos").mkdir(parents=True)
    lines = (motion_set / "train.csv").read_text().splitlines()[: 1 + videos]
    for line in lines[1:]:
        shutil.copy(motion_set / line.split(",")[0], folder / "videos")
    for part in parts:
        (folder / part).write_text("\n".join(lines) + "\n")
    shutil.copy(motion_set / "classes.txt", folder)


def _commands(out: str) -> list[str]:
    return re.findall(r"^  (summit-train .*)$", out, re.M)


@pytest.fixture
def pasted(say: Say, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """Runs printed commands one after the other, in words as bash divides them, without reports; the output."""
    monkeypatch.setattr("summit_train.report.page.write_report", lambda runs, path: path)

    def words(line: str) -> list[str]:
        divided = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        return divided.stdout.split("\0")[1:-1]

    def run(lines: list[str]) -> str:
        said = [say(*words(line)) for line in lines]
        assert [status for status, _, _ in said] == [0] * len(lines), said
        return "".join(out for _, out, _ in said)

    return run


def test_class_folders_are_split_planned_and_trained_as_printed(
    say: Say, pasted: Callable[[list[str]], str], motion_set: Path, here: Path
) -> None:
    _class_folders(motion_set, here / "my videos/a 'set'", "train", 24)
    status, out, err = say("init", "my videos/a 'set'")
    assert (status, err) == (0, "")
    assert out.splitlines()[:3] == [
        "my videos/a 'set': 24 clips of 4 classes",
        "no GPU here: a small network on small frames, MobileNetV2 on 112 pixels; for a machine with one: --from "
        "tsm_finetune", "wrote a_set.yaml; next:",
    ]  # fmt: skip
    split, plan, train = _commands(out)
    assert (plan, train) == ("summit-train plan a_set.yaml", "summit-train train a_set.yaml")
    assert split.endswith(" a_set_folds --folds 5")
    said = pasted([split, plan, f"{train} {SMALL}"])
    spec = load_spec("a_set.yaml")
    assert (spec.model.num_classes, spec.model.arch, spec.data.root) == (4, "tsm", "my videos/a 'set'")
    assert (spec.optimizer.base_lr, spec.model.freeze_bn, spec.model.pretrained) == (0.000125, "none", None)
    text = (here / "a_set.yaml").read_text()
    assert "`summit-train configs shipped:NAME` prints what it extends" in text and "t.models.mobilenet_v2(" in text
    assert (spec.model.backbone, spec.data.crop, spec.evaluate.every_epochs) == ("mobilenet_v2", 112, 1)
    # 24 clips less a fold of 4 or more: a batch of two virtual GPUs of 8 is 16.
    assert (spec.scale.gpus, spec.scale.clips_per_gpu) == (2, 8)
    assert "16 clips" in said and "a_set: done" in said and (here / "runs/a_set/eval.json").is_file()


def test_folders_of_both_sets_are_planned_trained_and_predicted(
    say: Say, pasted: Callable[[list[str]], str], motion_set: Path, here: Path
) -> None:
    _class_folders(motion_set, here / "two sets/train", "train", 8)
    _class_folders(motion_set, here / "two sets/val", "val", 8)
    plan, train, predict = _commands(say("init", "two sets/", "--from", "shipped:motion/tsm")[1])
    assert predict == "summit-train predict runs/two_sets 'two sets/val'"
    assert load_spec("two_sets.yaml").scale.clips_per_gpu == 4
    said = pasted([plan, f"{train} {SHORT} model.width=0.125", predict])
    assert len(re.findall(r"^two sets/val/moves \w+/\w+\.mp4 ", said, re.M)) == 8


def test_class_folders_of_frames_are_split_trained_and_indexed(
    say: Say, pasted: Callable[[list[str]], str], here: Path
) -> None:
    """CLASS/CLIP/img_00001.jpg, with flow beside the frames of a clip, and files that are no clips."""
    for clip in range(8):
        folder = here / f"frames/{('left', 'right')[clip % 2]}/clip {clip}"
        folder.mkdir(parents=True)
        for name in ("img_00001", "img_00002", "img_00003", "flow_x_00001", "flow_y_00001"):
            Image.new("RGB", (40, 32), (20 * clip, 90, 40)).save(folder / f"{name}.jpg")
    for name in ("frames/left/cover1.jpg", "frames/right/a.gif", "frames/right/notes"):
        (here / name).touch()
    status, out, err = say("init", "frames")
    assert (status, err) == (0, "")
    what, skipped, *_ = out.splitlines()
    assert what == "frames: 8 clips of 2 classes"
    assert skipped == "no videos by their names: 1 .gif, 1 .jpg, 1 without an extension"
    split, plan, train = _commands(out)
    assert "frames: done" in pasted([split, plan, f"{train} {SMALL}"])
    status, out, _ = say("data", "index", "frames", "--out", "index/clips.csv", "--workers", 0)
    assert status == 0 and skipped in out.splitlines()
    indexed, listed = read_manifest("index/clips.csv"), read_manifest("frames")
    paths = [f"{name}/clip {clip}" for name, first in (("left", 0), ("right", 1)) for clip in range(first, 8, 2)]
    for manifest in (indexed, listed):
        assert [manifest.clip(clip).path for clip in range(8)] == paths
    assert indexed.frame_counts.tolist() == [3] * 8 and indexed.labels.tolist() == listed.labels.tolist()


@pytest.mark.parametrize("name", ["a ", "a\nb", " b"])
def test_classes_that_no_list_can_name_are_refused_before_the_work(say: Say, here: Path, name: str) -> None:
    for path in ("a/1.mp4", "a/2.mp4", f"{name}/1.mp4", f"{name}/2.mp4"):
        (here / "set" / path).parent.mkdir(parents=True, exist_ok=True)
        (here / "set" / path).touch()
    wrong = f"a class must have a name of one line without a blank around it, got {name!r}; rename it"
    for words in ("init set", "data index set --out out/list.csv", "data split set folds --folds 2"):
        assert refused(say(*words.split())) == f"set: {wrong}"
    assert sorted(path.name for path in here.iterdir() if path.name != "out") == ["set"]


def test_lists_are_named_and_a_list_alone_is_split(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "both", 12, "train.csv", "val.csv")
    assert [line.split()[1] for line in _commands(say("init", "both")[1])] == ["plan", "train", "predict"]
    data = load_spec("both.yaml").data
    assert (data.train, data.val, data.root) == ("both/train.csv", "both/val.csv", "both")
    assert say("plan", "both.yaml")[0] == 0
    # Three clips of each class, so three folds of them.
    _lists(motion_set, here / "one", 12, "clips.csv", "clips.left_out.csv")
    split, plan, _ = _commands(say("init", "one", "--out", "new/other.yaml")[1])
    assert split == "summit-train data split one/clips.csv new/other_folds --folds 3"
    assert say(*split.split()[1:])[0] == 0 and say(*plan.split()[1:])[0] == 0
    spec = load_spec("new/other.yaml")
    assert (spec.name, spec.data.val, spec.scale.clips_per_gpu) == ("other", "new/other_folds/fold1/val.csv", 4)


def test_packed_sets_are_named(say: Say, motion_set: Path, here: Path) -> None:
    for part in ("train", "val"):
        words = (motion_set / f"{part}.csv", here / "packed" / part, "--kind", "bytes", "--workers", 0)
        assert say("data", "pack", *words)[0] == 0
    assert "80 clips of 4 classes" in say("init", "packed", "--from", "motion/tsn")[1]
    assert say("plan", "packed.yaml")[0] == 0 and load_spec("packed.yaml").data.train == "packed/train"
    assert "packed/train: is one packed set; " in refused(say("init", "packed/train"))


def test_several_labels_are_trained_with_the_binary_loss(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    list_ = here / "set/train.csv"
    list_.write_text(re.sub(r",(\d),", r",\1;0,", list_.read_text(), count=1).replace(",0;0,", ",0;1,"))
    assert say("init", "set")[0] == 0 and load_spec("set.yaml").loss.kind == "binary"


def test_a_machine_with_a_gpu_gets_the_usual_network(
    say: Say, motion_set: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("summit_train.cli.init._DRIVERS", ("/nowhere", "/dev/null"))
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    assert "GPU" not in say("init", "set")[1]
    assert (load_spec("set.yaml").model.backbone, load_spec("set.yaml").data.crop) == ("resnet50", 224)
    assert "t.models.resnet50(" in (here / "set.yaml").read_text()


def test_a_base_that_is_named_is_taken_without_a_gpu_too(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    assert "GPU" not in say("init", "set", "--from", "tsm_finetune")[1]
    assert (load_spec("set.yaml").model.backbone, load_spec("set.yaml").data.crop) == ("resnet50", 224)


def test_a_preset_without_a_network_is_laid_over_the_usual_base(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    assert say("init", "set", "--from", "lars")[0] == 0
    assert "- shipped:tsm_finetune\n- shipped:lars\n" in (here / "set.yaml").read_text()
    assert say("plan", "set.yaml")[0] == 0
    trust, dropout = load_spec("set.yaml").optimizer.trust_ratio, load_spec("set.yaml").model.dropout
    assert trust is not None and trust.kind == "lars" and dropout == 0.8


def test_a_name_that_begins_with_a_dash_is_no_option(say: Say, motion_set: Path, here: Path) -> None:
    _class_folders(motion_set, here / "-dash", "train", 8)
    status, out, _ = say("init", "--out=-my/spec.yaml", "--", "-dash")
    split, plan, train = _commands(out)
    assert status == 0 and split == "summit-train data split ./-dash ./-my/spec_folds --folds 2"
    assert (plan, train) == ("summit-train plan ./-my/spec.yaml", "summit-train train ./-my/spec.yaml")
    assert say(*split.split()[1:])[0] == 0 and say(*plan.split()[1:])[0] == 0
    data = load_spec("./-my/spec.yaml").data
    assert (data.train, data.val, data.root) == (
        "./-my/spec_folds/fold1/train.csv", "./-my/spec_folds/fold1/val.csv", "./-dash",
    )  # fmt: skip


def test_a_full_disk_leaves_nothing_and_the_next_try_writes_the_spec(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    before = sorted(here.rglob("*"))
    with full_disk():
        said = say("init", "set")
    assert refused(said) == "set.yaml: cannot be written: File too large; try another folder with --out"
    assert sorted(here.rglob("*")) == before
    assert say("init", "set")[0] == 0 and load_spec("set.yaml").name == "set"


def test_a_file_that_another_command_writes_meanwhile_stays(
    say: Say, motion_set: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    monkeypatch.setattr("summit_train.cli.init._check", lambda *_: (here / "set.yaml").write_text("theirs"))
    assert refused(say("init", "set")) == "set.yaml: already exists; try another file with --out"
    assert (here / "set.yaml").read_text() == "theirs" and not list(here.glob(".set*"))


REFUSALS = [
    ("nosuch", "nosuch: no such folder; give the folder that holds your videos"),
    ("flat", "flat: has videos outside class folders; move those of each class into a folder of its own"),
    ("set/videos", "set/videos: has videos outside class folders"),
    ("empty", "empty: must be a manifest, or have a sub-folder of videos for each class"),
    ("one_class", "one_class: must have at least two classes, got one, a; give"),
    ("no_video", "no_video/b: holds no video; move this folder out of no_video"),
    ("lists", "lists: has a.csv, b.csv; name two of them train.csv and val.csv, or leave one"),
    ("apart", "apart/list.csv:2: videos/train_000000.mp4 is not in apart; move the list"),
    ("few", "few: cannot be split into training and validation clips; each class needs at least two clips"),
    ("few", "column group: the class 'a' must have clips in 2 groups to be on both sides of each of 2 folds, got 1 of"),
    ("sets", "sets: has test and train, which are sets of clips and not classes; rename them to train and val"),
    ("parts", "parts: has Training and validation, which are sets of clips and not classes; rename them to"),
    (
        "lacks",
        "lacks/val and lacks/train must have the same classes, as labels are their places; they differ in 'b'",
    ),
    ("$HOME", "$HOME: a spec cannot name this folder"),
    ("set --from sites/summit", "--from must be a spec or a preset, got the site sites/summit"),
    ("set --from sweeps/table3", "--from must be a spec or a preset, got the sweep sweeps/table3"),
    ("set --from machines/summit", "got the machine machines/summit; try tsm_finetune"),
    ("set --from kinetics/base", "--from must be a spec or a preset, got the base kinetics/base"),
    ("set --from tsm_finetun", "shipped:tsm_finetun not found; did you mean shipped:tsm_finetune?"),
    ("set --from configs/jester/tsn_r50_8f.yaml", "did you mean shipped:jester/tsn_r50_8f?"),
    ("set --from something_v1/tsm_r50_flow_8f", "make its flow with `summit-train data flow`"),
    ("set --from motion/boxes_tsm", "data.train: task detection needs a list with boxes"),
    ("set --out set/train.csv", "set/train.csv: already exists; try another file with --out"),
    ("few2 --out few2/few.yaml", "few2/few.yaml: must not be in few2, among the videos; run init in another"),
    ("set --out closed/set.yaml", "closed/set.yaml: cannot be written: "),
]


def test_what_cannot_be_done_is_one_line_and_writes_nothing(say: Say, motion_set: Path, here: Path) -> None:
    _lists(motion_set, here / "set", 8, "train.csv", "val.csv")
    _lists(motion_set, here / "lists", 1, "a.csv", "b.csv")
    videos = sorted((here / "set/videos").iterdir())
    (here / "closed").write_text("a file, which is no folder for root either")
    for path in ("flat/v.mp4", "one_class/a/v.mp4", "no_video/a/v.mp4", "few/a/v.mp4", "few/b/w.mp4", "$HOME/a/v.mp4",
                 "few2/a/v.mp4", "few2/a/w.mp4", "few2/b/x.mp4", "few2/b/y.mp4", "sets/train/a/v.mp4",
                 "sets/train/b/w.mp4", "sets/test/a/x.mp4", "sets/test/b/y.mp4", "parts/Training/a/v.mp4",
                 "parts/Training/b/w.mp4", "parts/validation/a/x.mp4", "parts/validation/b/y.mp4",
                 "lacks/train/a/v.mp4", "lacks/train/b/w.mp4", "lacks/train/c/x.mp4", "lacks/val/a/y.mp4",
                 "lacks/val/c/z.mp4"):  # fmt: skip
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(videos[0], here / path)
    for name in ("empty", "no_video/b", "apart"):
        (here / name).mkdir()
    shutil.copy(here / "set/train.csv", here / "apart/list.csv")
    before = sorted(here.rglob("*"))
    for words, part in REFUSALS:
        assert part in refused(say("init", *words.split())), words
        assert sorted(here.rglob("*")) == before, words
