from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.scores import Scores
from summit_train.report.page import comparison, render, write_report
from summit_train.report.records import read_runs

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}</title>"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The page as a browser takes it apart: tags in order, attributes, text; every tag must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def values(self, tag: str, attribute: str) -> list[str]:
        return [value for t, name, value in self.attributes if (t, name) == (tag, attribute)]


def test_several_runs_are_compared_and_nothing_comes_from_outside(write_run):
    runs = write_run("tsm_demo"), write_run("tsn_demo", arch="tsn", top1=25.0, leave_out=("metrics.jsonl",))
    html = render(read_runs(runs))
    page = Page(html)
    assert "2 runs compared" in page.text and "25.00 ± 0.71 %" in page.text
    assert len(page.values("img", "src")) == 5 + 5 + 1  # both, the first, the second
    assert page.values("a", "href") == ["#run-1", "#run-2"] and page.values("h2", "id") == ["run-1", "run-2"]
    references = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert references and all(value.startswith(("data:image/svg+xml;base64,", "#run-")) for value in references)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", html))


def test_hostile_texts_stay_texts(write_run):
    path = write_run("a", name=HOSTILE)
    (path / "environment.json").write_text('{"<b>host</b>": "<script>2</script>", "surrogate": "\\ud800"}')
    (path / "plan.json").write_text('{"<i>": {"</table>": ["<u>"]}}')
    eval_json = path / "eval.json"
    eval_json.write_text(eval_json.read_text().replace("checkpoints/step", "<script>3<script>"))
    report = write_report([path, write_run("b", leave_out=("metrics.jsonl",))], path / "report.html")
    page = Page(report.read_text(encoding="utf-8"))
    assert not {"script", "i", "u"} & set(page.tags) and page.tags.count("img") == page.tags.count("figure")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text and "<script>2</script>" in page.text and "<script>3<script>_00000040.pt" in page.text


def test_a_bad_argument_writes_nothing(write_run, tmp_path):
    run, page = write_run(leave_out=("metrics.jsonl",)), tmp_path / "page.html"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refusals = [([run], out, "is not a regular file; give") for out in (tmp_path, pipe)]
    for runs, out, reason in [*refusals, ([run, tmp_path / "nowhere"], page, "nowhere")]:
        with pytest.raises(UserError, match=reason):
            write_report(runs, out)
    assert not page.exists() and pipe.is_fifo()


def test_every_colour_of_text_can_be_read_on_its_background() -> None:
    """A contrast of 4.5, as WCAG 2 asks for (AA)."""

    def light(colour: str) -> float:
        digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    own = resources.files("summit_train.report")
    schemes = re.findall(r":root \{(.*?)\}", own.joinpath("style.css").read_text())
    assert len(schemes) == 2
    for scheme in schemes:
        colours = {name: light(colour) for name, colour in re.findall(r"--(\w+): #(\w+);", scheme)}
        for name in ("text", "dim", "bad"):
            high, low = sorted((colours[name], colours["back"]), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, scheme)
    assert ".broken { color: var(--bad); }" in own.joinpath("index.html.j2").read_text()


def scored(write_run, name, clips, files=None, **spec):
    path = write_run(name, leave_out=("metrics.jsonl",), spec=spec, files=files or {})
    scores = Scores(
        np.arange(len(clips)), np.zeros(len(clips), int), np.eye(3)[list(clips.values())], np.ones(len(clips), bool)
    )
    scores.save(path / "predictions/step_00000040.npz", list(map(Clip, clips)), ("a", "b", "c"))
    return path


def test_two_runs_are_compared_on_the_videos_of_both(write_run):
    """All videos are of class 0. Of those of both, x is right in B alone, and y in neither."""
    own = {"loss": {"kind": "./loss.py:Focal"}, "data": {"num_frames": 8, "augment": ["crop"]}}
    first = scored(write_run, "A", {"w": 0, "x": 1, "y": 2}, **own)
    second = scored(write_run, "B", {"x": 0, "y": 1, "z": 0, "v": 0}, loss={"kind": "softmax"}, data={"num_frames": 8})
    assert comparison(*read_runs([first, second])) == [
        "2 videos scored by both runs: only A has 0 right, only B 1; p = 1 (McNemar's exact test)",
        "They scored 3 and 4 videos",
        "data.augment differs: crop and —",
        "loss.kind differs: ./loss.py:Focal and softmax",
    ]


@pytest.mark.parametrize(
    ("lost", "clips", "why"),
    [
        ("eval.json", {"x": 0}, "B: has no predictions; run `summit-train eval .*B/spec.yaml`"),
        ("predictions/step_00000040.npz", {"x": 0}, "B: has no predictions/step_00000040.npz; run"),
        (None, {"z": 0}, "A/predictions.* and .*B/predictions.* have no video in common"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_runs_that_cannot_be_compared_say_why(lost, clips, why, write_run):
    """One that still trains has no eval.json."""
    runs = [scored(write_run, "A", {"x": 0}), scored(write_run, "B", clips)]
    if lost:
        (runs[1] / lost).unlink()
    page = Page(render(read_runs(runs)))
    assert re.search(f"Not compared video by video: .*{why}", page.text)


@pytest.mark.usefixtures("undrawn")
def test_the_baseline_is_beside_the_accuracy(write_run):
    file = "baseline/baseline.json"
    found = {"top1": 78.9, "top1_interval": [55.204, 95.3], "features": 512, "videos": 64, "weights": "w.pth"}
    page = Page(render(read_runs([write_run(files={file: found})])))
    assert "baseline: frozen features78.90 %" in page.text.replace("\n", "")
    assert "frozen features: top-1 78.90 %, 95 % interval 55.20 to 95.30 %" in page.text
    assert "baseline: random features" in render(read_runs([write_run("r", files={file: found | {"weights": None}})]))
    assert f"{file}: is of 3 other videos, left out" in render(
        read_runs([write_run("o", files={file: found | {"videos": 3}})])
    )
    broken = render(read_runs([write_run("b", files={file: {"top1": "x"}})]))
    assert f"{file}: has wrong values, left out" in broken
