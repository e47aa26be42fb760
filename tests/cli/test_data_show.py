"""`data show`: which clips are on the page, in what order, and that their pixels are those of the network's input."""

from __future__ import annotations

import base64
import io
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.dataset import Dataset
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.evaluation.scores import Scores
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.tasks.detection.boxes import BOX, Boxes
from tests.conftest import WriteSpec
from tests.flows import write_packed
from tests.scored_runs import CLIPS, NAMES, RGB, write_scored_run
from tests.worlds import Say, refused

_FIGURE = re.compile(r"<figure>\n(.*?)<figcaption>(.*?)</figcaption>\n</figure>", re.S)


def figures(page: Path) -> list[tuple[str, str]]:
    """What stands above each caption of the page, and the caption."""
    return _FIGURE.findall(page.read_text())


def frames_of(shown: str) -> NDArray[np.uint8]:
    """The frames of a film, (T, H, W, 3)."""
    count, width, height = (int(re.search(rf"--{name}: (\d+)", shown)[1]) for name in ("count", "width", "height"))
    (content,) = re.findall(r'src="data:image/jpeg;base64,([\w+/=]+)"', shown)
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(content, validate=True))))
    assert picture.shape == (height, count * width, 3)
    return picture.reshape(height, count, width, 3).swapaxes(0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six videos of two classes: 20 frames of 64 x 32, the n-th frame 10 n grey. One of them is torn."""
    grey = np.arange(0, 200, 10, np.uint8)[:, None, None, None] * np.ones((1, 32, 64, 3), np.uint8)
    for name in ("hop/a", "hop/b", "hop/c", "hop/d", "hop/e", "run/f"):
        (tmp_path / f"set/{name}.mp4").parent.mkdir(parents=True, exist_ok=True)
        write_video(tmp_path / f"set/{name}.mp4", grey)
    (tmp_path / "set/run/f.mp4").write_text("<torn>")
    return tmp_path / "set"


def test_whole_frames_are_spread_over_the_clip_and_clips_over_their_class(
    folder: Path, tmp_path: Path, say: Say
) -> None:
    page = tmp_path / "page.html"
    words = ("--out", page, "--frames", 5, "--pixels", 16)
    status, said, _ = say("data", "show", folder, *words, "--clips", 4)
    lines = said.splitlines()
    assert status == 0 and lines[0].startswith(f"{page}: 4 of 6 clips, 2 of 2 classes, ")
    assert len(lines) == 2 and lines[1].startswith("cannot be shown: ") and "f.mp4: is not a video" in lines[1]
    text, found = page.read_text(), figures(page)
    assert [Path(caption).stem for _, caption in found] == ["a", "c", "e", "f"]  # three of a class, from end to end
    assert text.index("<h3>hop</h3>") < text.index("e.mp4") < text.index("<h3>run</h3>") < text.index("f.mp4")
    assert "f.mp4: is not a video" in found[3][0] and "<torn>" not in text
    for shown, _ in found[:3]:
        frames = frames_of(shown)
        assert frames.shape == (5, 16, 32, 3)
        # The centres of five parts of four frames.
        assert frames.mean((1, 2, 3)).tolist() == pytest.approx([20, 60, 100, 140, 180], abs=4)
    assert say("data", "show", folder, *words, "--only", "run")[1].startswith(f"{page}: 1 of 6 clips, 1 of 2 classes")


def test_training_clips_are_those_of_the_epoch(write_spec: WriteSpec, tmp_path: Path, say: Say) -> None:
    spec, page = write_spec(data={"balance": "classes", "augment": "rand_augment"}), tmp_path / "page.html"
    listed = load_spec(spec).data.train
    words = ("data", "show", listed, "--spec", spec, "--epoch", 1, "--out", page, "--clips", 200, "seed=3")
    status, _, error = say(*words)
    assert status == 0, error
    dataset, seen = Dataset.open(load_spec(spec, ["seed=3"]), "train"), dict[str, NDArray[np.uint8]]()
    plan = make_plan(load_spec(spec, ["seed=3"]), 2, len(dataset))
    for rank in range(2):
        with dataset.training_batches(plan.order(), rank, 2, range(10, 20)) as batches:
            for batch in batches:
                names = map(dataset.manifest.path, batch.ids.tolist())
                seen |= {name: clip.numpy() for name, clip in zip(names, batch.clips, strict=True) if name not in seen}
    found = {caption.rpartition(": ")[2]: frames_of(shown) for shown, caption in figures(page)}
    assert found.keys() == seen.keys() and len(found) > 60
    # JPEG loses some of the noise that RandAugment makes; another epoch's clips are far away.
    near = [np.abs(found[name].astype(int) - seen[name]).mean() for name in found]
    assert np.median(near) < 6
    assert "epoch 1 of" in page.read_text() and "seed 3, 4 frames, rand_augment" in page.read_text()
    assert say(*words[:5], *words[7:])[0] == 0
    other = {caption.rpartition(": ")[2]: frames_of(shown) for shown, caption in figures(page)}
    assert np.median([np.abs(other[name].astype(int) - seen[name]).mean() for name in other if name in seen]) > 15


def test_the_draws_of_an_epoch_are_those_of_its_batches(write_spec: WriteSpec) -> None:
    """Bit for bit, whatever the balance: a clip's first turn in the epoch."""
    for balance in ("none", "classes"):
        spec = load_spec(write_spec(data={"balance": balance, "augment": "rand_augment"}))
        dataset = Dataset.open(spec, "train")
        order = make_plan(spec, 1, len(dataset)).order()
        read, drawn = dataset.training_clips(order, 1)
        first = dict[int, NDArray[np.uint8]]()
        with dataset.training_batches(order, 0, 1, range(10, 20)) as batches:
            for batch in batches:
                for clip, pixels in zip(batch.ids.tolist(), batch.clips, strict=True):
                    first.setdefault(clip, pixels.numpy())
        assert drawn.keys() == first.keys()
        for clip in list(first)[:12]:
            np.testing.assert_array_equal(read.clip(clip, drawn[clip], lambda *_: nullcontext())[0][0], first[clip])


@pytest.fixture
def scored(folder: Path, tmp_path: Path, write_spec: WriteSpec) -> Path:
    """A run of three classes with the scores RGB of a, b and c in `folder`.parent / "list.csv"."""
    (folder / "hop").rename(tmp_path / "videos")
    rows = "".join(f"{clip.path},{label}\n" for label, clip in enumerate(CLIPS))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}d.mp4,0\n")
    (tmp_path / "classes.txt").write_text("hop\nrun\nskip\n")
    data = {"train": str(tmp_path / "list.csv"), "val": "moved.csv", "root": str(tmp_path / "videos")}
    model = {"num_classes": 3, "shift_direction": "past"}
    spec, run = write_spec("scored", model=model, data=data), tmp_path / "runs/scored"
    write_scored_run(run, RGB)
    spec.rename(run / "spec.yaml")
    return run


def test_the_clips_of_a_run_begin_with_the_lowest_score(scored: Path, tmp_path: Path, say: Say) -> None:
    """RGB is sure of class 0 in `a` with 60 %, of class 1 in `b` with 40 %, of class 2 in `c` with 50 %."""
    run = scored
    page = tmp_path / "page.html"
    status, said, error = say("data", "show", tmp_path / "list.csv", "--run", run, "--out", page, "--clips", 2)
    assert status == 0 and "2 of 3 clips, 2 of 3 classes" in said, error
    captions = [caption for _, caption in figures(page)]
    assert captions == ["<b>run 40.0 %, taken for hop 50.0 %</b>: b.mp4", "<b>skip 50.0 %</b>: c.mp4"]
    frames = frames_of(figures(page)[0][0])
    assert frames.shape == (4, 32, 32, 3)  # the centre crop of validation
    assert frames.mean((1, 2, 3)).tolist() == pytest.approx([80, 90, 100, 110], abs=4)  # 4 neighbours, in the middle
    (tmp_path / "list.csv").write_text("path,label\nd.mp4,0\n")
    what = refused(say("data", "show", tmp_path / "list.csv", "--run", run, "--out", page))
    assert "list.csv: must have videos that" in what


def test_of_a_stream_one_clip_is_shown(scored: Path, tmp_path: Path, say: Say) -> None:
    page = tmp_path / "page.html"
    for mode, what in (("clips", f"As {scored} validates them;"), ("stream", f"A clip of each stream of {scored};")):
        words = ("data", "show", tmp_path / "list.csv", "--run", scored, "--out", page, f"evaluate.mode={mode}")
        assert say(*words)[0] == 0 and what in page.read_text()


def test_of_several_classes_a_caption_says_what_is_wrong(scored: Path, tmp_path: Path, say: Say) -> None:
    """`a` misses its only class, `b` has a class too many, `c` is right in all."""
    shares = np.array([[0.3, 0.1, 0.1], [0.1, 0.9, 0.98], [0.9, 0.2, 0.6]])
    hot = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], np.bool_)
    scores = Scores(np.arange(3), hot, np.log(shares / (1 - shares)), np.ones(3, np.bool_))
    scores.save(scored / "predictions/step_00000020.npz", CLIPS, NAMES)
    page = tmp_path / "page.html"
    assert say("data", "show", tmp_path / "list.csv", "--run", scored, "--out", page)[0] == 0
    assert [caption.partition("</b>")[0].removeprefix("<b>") for _, caption in figures(page)] == [
        "run: not skip, but 98.0 %",
        "hop: missed hop 30.0 %",
        "hop, skip: skip 60.0 %",
    ]


def test_a_list_whose_classes_are_not_those_of_the_run_is_refused(scored: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "classes.txt").write_text("run\nhop\nskip\n")
    what = refused(say("data", "show", tmp_path / "list.csv", "--run", scored, "--out", tmp_path / "page.html"))
    assert "must have the same classes" in what and "differ in their order" in what


def test_a_run_of_another_task_is_refused(scored: Path, tmp_path: Path, say: Say) -> None:
    spec = yaml.safe_load((scored / "spec.yaml").read_text()) | {"task": "detection", "loss": {"kind": "detection"}}
    spec["evaluate"] |= {"mode": "stream", "crops": "full"}
    spec["model"] |= {"dropout": 0.0}
    (scored / "spec.yaml").write_text(yaml.safe_dump(spec))
    what = refused(say("data", "show", tmp_path / "list.csv", "--run", scored, "--out", tmp_path / "page.html"))
    assert what == f"--run must be of a task that scores classes, got detection; try --spec {scored}"


@pytest.mark.parametrize("name", ["20261126", "null", "[x].csv", "a b #c: d.csv"])
def test_a_list_may_have_any_name(
    write_spec: WriteSpec, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = write_spec()
    listed = Path(load_spec(spec).data.train)
    (tmp_path / name).write_text(listed.read_text())
    (tmp_path / "null #1").symlink_to(listed.parent)
    monkeypatch.chdir(tmp_path)
    status, said, error = say("data", "show", name, "--spec", spec, "--root", "null #1", "--clips", 1)
    assert status == 0 and said.startswith("clips.html: 1 of 80 clips"), (said, error)


def test_the_page_says_what_of_training_it_does_not_show(write_spec: WriteSpec, tmp_path: Path, say: Say) -> None:
    spec, page = write_spec(), tmp_path / "page.html"
    words = ("data", "show", load_spec(spec).data.train, "--spec", spec, "--out", page, "--clips", 1)
    ranks, views = "As on one rank: scale.gpus is null", "The first of data.repeats 2 views."
    later = "Not shown: data.erase and data.mix, which change the batch afterwards."
    for overrides, said in (
        ((), ()),
        (("scale.gpus=null",), ()),
        (("data.balance=classes",), ()),
        (("data.balance=classes", "scale.gpus=null"), (ranks,)),
        (("data.repeats=2",), (views,)),
        (("data.erase=0.5", "data.mix.mixup=0.2"), (later,)),
    ):
        assert (done := say(*words, *overrides))[0] == 0, done
        assert tuple(text for text in (ranks, views, later) if text in page.read_text()) == said
    assert say(*words, "--epoch", 1)[0] == 0


def test_a_packed_set_is_shown_as_it_was_packed(folder: Path, tmp_path: Path, say: Say) -> None:
    """Each third frame of a region, and fields of flow."""
    rows = "set/hop/a.mp4,0,4,6,30,20\nset/hop/b.mp4,0,0,0,20,20\n"
    (tmp_path / "list.csv").write_text(f"path,label,left,top,width,height\n{rows}")
    packed, page = tmp_path / "packed", tmp_path / "page.html"
    options = ("--kind", "jpeg", "--every", 3, "--region", "columns", "--workers", 0)
    assert say("data", "pack", tmp_path / "list.csv", packed, *options)[0] == 0
    status, _, error = say("data", "show", packed, "--out", page, "--frames", 5)
    assert status == 0 and [frames_of(shown).shape[1:3] for shown, _ in figures(page)] == [(20, 30), (20, 20)], error
    text = page.read_text()
    assert "Whole frames, evenly spaced." in text and "--tile: 30px" in text

    fields = np.full((3, 2, 16, 24), 128, np.uint8)
    fields[:, 0] = np.array([20, 90, 200])[:, None, None]  # the x
    flow = write_packed(tmp_path / "flow", [fields], [0])
    status, _, error = say("data", "show", flow, "--out", page, "--frames", 3)
    assert status == 0 and "The x of whole fields of optical flow" in page.read_text(), error
    assert frames_of(figures(page)[0][0]).mean((1, 2, 3)).tolist() == pytest.approx([20, 90, 200], abs=4)


def test_a_box_outside_of_its_video_is_named_with_its_line(folder: Path, tmp_path: Path, say: Say) -> None:
    truth = np.array([(0, 0, 0, (4, 4, 20, 20), False, False), (1, 0, 0, (64, 4, 80, 20), False, False)], BOX)
    boxes = Boxes(truth, np.array([0, 2]))
    write_manifest(tmp_path / "list.csv", [ManifestRow("set/hop/a.mp4", ";", boxes=boxes)])
    status, said, _ = say("data", "show", tmp_path / "list.csv", "--out", tmp_path / "page.html")
    assert status == 0 and f"{tmp_path}/list.csv:4) lies outside the frame of 64 x 32" in said


def test_a_clip_of_several_classes_is_shown_under_the_one_that_is_wanted(
    folder: Path, tmp_path: Path, say: Say
) -> None:
    listed, page = tmp_path / "list.csv", tmp_path / "page.html"
    listed.write_text("path,label\nset/hop/a.mp4,0;1\nset/hop/b.mp4,1\nset/hop/c.mp4,;\n")
    words = ("data", "show", listed, "--out", page)
    assert ": 3 of 3 clips, 2 of 2 classes, " in say(*words)[1]
    assert re.findall("<h3>(.*)</h3>", page.read_text()) == ["0", "1", "no class"]
    assert ": 2 of 3 clips, 1 of 2 classes, " in say(*words, "--only", "1")[1]
    assert re.findall("<h3>(.*)</h3>", page.read_text()) == ["1"]


@pytest.mark.parametrize(
    ("sizes", "clips", "shown"),
    [
        ((50, 1, 1, 3), 12, (7, 1, 1, 3)),  # the larger one gets what the others leave
        ((4, 4, 4), 7, (2, 2, 3)),
        ((2,) * 9, 3, (1, 0, 0, 0, 1, 0, 0, 0, 1)),  # spread over the classes
        ((2, 1), 12, (2, 1)),
    ],
)
def test_as_many_clips_as_asked_for_are_shown(
    folder: Path, tmp_path: Path, say: Say, sizes: tuple[int, ...], clips: int, shown: tuple[int, ...]
) -> None:
    rows = [f"set/hop/a.mp4,{label}\n" for label, size in enumerate(sizes) for _ in range(size)]
    (tmp_path / "list.csv").write_text(f"path,label\n{''.join(rows)}")
    page = tmp_path / "page.html"
    assert say("data", "show", tmp_path / "list.csv", "--out", page, "--clips", clips, "--frames", 1)[0] == 0
    groups = re.split("<h3>", page.read_text())[1:]
    found = {int(group.partition("<")[0]): group.count("<figure>") for group in groups}
    assert tuple(found.get(label, 0) for label in range(len(sizes))) == shown
