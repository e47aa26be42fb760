"""`data show`: which clips are on the page, in what order, and that their pixels are those of the network's input."""

from __future__ import annotations

import base64
import io
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.dataset import Dataset
from summit_train.data.video.encode import write_video
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.conftest import WriteSpec
from tests.scored_runs import CLIPS, RGB, write_scored_run
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
    status, said, _ = say("data", "show", folder, *words, "--clips", 6)
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


def test_the_clips_of_a_run_begin_with_the_lowest_score(
    folder: Path, tmp_path: Path, say: Say, write_spec: WriteSpec
) -> None:
    """RGB is sure of class 0 in `a` with 60 %, of class 1 in `b` with 40 %, of class 2 in `c` with 50 %."""
    (folder / "hop").rename(tmp_path / "videos")
    rows = "".join(f"{clip.path},{label}\n" for label, clip in enumerate(CLIPS))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}d.mp4,0\n")
    (tmp_path / "classes.txt").write_text("hop\nrun\nskip\n")
    data = {"train": str(tmp_path / "list.csv"), "val": "moved.csv", "root": str(tmp_path / "videos")}
    spec, run = write_spec("scored", model={"num_classes": 3}, data=data), tmp_path / "runs/scored"
    write_scored_run(run, RGB)
    spec.rename(run / "spec.yaml")
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
    assert "list.csv: has none of the videos that" in what


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pixels 8", "--pixels must be 16 to 512, got 8"),
        ("--clips 0", "--clips must be 1 to 2,000, got 0"),
        ("--epoch 1", "--epoch must be used with --spec, key=value with --spec or --run"),
        ("--run r --epoch 0", "--epoch must be used with --spec, key=value with --spec or --run"),
        ("data.crop=8", "--epoch must be used with --spec, key=value with --spec or --run"),
        ("--only walk", "--only must have classes of {folder}, got walk"),
        ("--out {folder}", "{folder}: is a directory"),
    ],
)
def test_what_does_not_fit_together_is_refused(folder: Path, say: Say, words: str, message: str) -> None:
    given = words.format(folder=folder).split()
    assert message.format(folder=folder) in refused(say("data", "show", folder, *given))
