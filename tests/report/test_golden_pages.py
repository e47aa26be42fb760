"""The page of a whole run, and what is other on the pages of runs that are not, compared whole with a golden file.

Figures are there with their values. After a change that is meant to change a page, write the file again, and read each
line of the difference:
    python -m tests.report.test_golden_pages
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from summit_train.core.files import write_text
from summit_train.report.index import write_index
from summit_train.report.page import render
from summit_train.report.records import RunRecord, read_runs
from tests.page_values import check_golden, page_text, write_golden
from tests.run_directories import Record, whole_log, write_folder
from tests.worlds import ROOT

GOLDEN = ROOT / "tests/golden/pages.txt"
T0 = 1_700_000_000.0
POINTS = [{"fraction": 0.1, "top1": 40.0, "top5": 80.0}, {"fraction": 1.0, "top1": 90.0, "top5": 100.0}]
OBSERVED = {"name": "run", "frames": 8, "videos": 101, "crops": 1, "observed": POINTS}
FINAL = {"top1_mean": 12.5, "top1_std": 0.25, "top5_mean": 50.0, "clips": 3, "crops": 1}
NODES = {"hosts": {f"n{i}": 6 for i in range(256)}, "device": "V100"}
NODES |= {"cuda": {"version": "12.4", "ok": True}, "gpus": [], "mpi": None, "lr": 1 / 3}


def start(step: int, **more: Any) -> Record:
    return {"kind": "start", "step": step, "ranks": 2, **more}


def until(step: int) -> list[Record]:
    return [line for line in whole_log() if line["step"] <= step]


def changed(kind: str, **values: Sequence[Any]) -> list[Record]:
    """The records of a whole run; those of a kind get the values by their order, the last one again and again."""
    lines = whole_log()
    for place, line in enumerate(line for line in lines if line["kind"] == kind):
        line |= {key: each[min(place, len(each) - 1)] for key, each in values.items()}
    return lines


def timed(*lines: Record) -> list[Record]:
    """Records with a step each, 10 s apart, of the steps of 8 s."""
    step = {"epoch": 0, "step_s": 8.0, "data_wait_s": 0.0}
    return [{"time": T0 + 10 * n} | (step if line["kind"] == "step" else {}) | line for n, line in enumerate(lines)]


def measured(squares: Sequence[float | None]) -> list[Record]:
    """Every second step has measured its noise: tr(Sigma) 64, and |G|^2 of `squares`, a half of the run each."""
    lines = whole_log()
    for line in lines:
        if line["kind"] == "step" and line["step"] % 2 == 0:
            square = squares[(line["step"] - 1) * len(squares) // 40]
            noise = None if square is None or square < 0 else 64 / square
            line |= {"noise_scale": noise, "gradient_variance": 64.0, "gradient_square": square}
    return lines


def window(step: int, *compute: float) -> Record:
    return {"kind": "rank_times", "time": 0, "step": step, "compute_s": compute, "data_wait_s": [0.5] * len(compute)}


def slow(step: int, rank: int) -> Record:
    return {"kind": "slow_rank", "time": 0, "step": step, "rank": rank, "host": f"n{rank}", "part": "data_wait"}


def averages() -> list[Record]:
    """Averages after steps 10 and 20, of which a resume from step 10 makes the second again; a batch that grows."""
    kinds = {"kind": "average", "epoch": 0, "bytes": 2e6}
    lines = [kinds | {"step": step, "seconds": seconds} for step, seconds in ((10, 0.5), (20, 0.25))]
    lines += [start(10), kinds | {"step": 20, "seconds": 1.5}]
    for epoch, clips in ((1, 2), (2, 4), (3, 4), (4, 1000)):
        batch = {"clips_per_gpu": clips, "global_batch": 4 * clips, "accuracy": 10.0, "best": 20.0}
        lines.append({"kind": "batch", "epoch": epoch, **batch})
    return [*whole_log(), *lines]


CLASSES = {"train": {"jump": 1200, "run": 3}, "val": {"run": 2, "swim": 4}}
MANY = {side: {f"class {number}": 2 for number in range(32)} for side in ("train", "val")}
OF_MANY = [[*range(1, 31), 10 * epoch, None] for epoch in range(1, 5)]  # percent: the last class has no video
RESUMED = [start(0, startup_s=2.0), *({"kind": "step", "step": step, "loss": 1.0} for step in (1, 2, 3))]
RESUMED += [start(2, startup_s=5.0), {"kind": "step", "step": 3, "loss": 2.0}, start(3)]
RATIOS = [{"kind": "trust_ratio", "step": step, "ratios": {"a": 0.1 * step, "b": 2.0}} for step in (1, 20, 40)]
STOP = {"kind": "early_stop", "epoch": 3, "step": 30, "measure": "top1", "best": 61.0, "best_epoch": 1}
RANKS = [window(step, 1.0, 1.0, 3.0, *[1.0] * 14) for step in (10, 20, 30, 40)]
RANKS += [slow(30, 2), slow(40, 2), *(slow(40, rank) for rank in range(10, 18))]
BROKEN = ("plan.json", "eval.json", "environment.json", "observed.json", "checkpoints/best.json")
NONE_OF_MAP = {"checkpoints": [{"path": "checkpoints/step_00000040.pt", "step": 40, "map": 75.0}], "map_std": 0.5}

# Case -> what is other than in a whole run.
CASES: dict[str, dict[str, Any]] = {
    "whole run": {},
    "no file": {"leave_out": ("eval.json", "metrics.jsonl", "plan.json", "environment.json")},
    "no log": {"leave_out": ("metrics.jsonl",), "files": {"eval.json": {"top5_mean": None, "checkpoints": []}}},
    "no final evaluation": {"leave_out": ("eval.json",)},
    "young": {"lines": until(5), "leave_out": ("eval.json", "plan.json"), "num_classes": 5},
    "killed": {
        "lines": [*until(25), start(20, ranks=1, time="noon")], "leave_out": ("eval.json",),
        "files": {"stopped": "checkpoint"},
    },
    "skipped": {"lines": changed("step", skipped=[0, 0, 0, 1, 0], bad_clips=[0, 3]), "arch": "tsn"},
    "no loss": {"lines": changed("step", loss=[None])},
    "not measured": {
        "lines": [line for line in whole_log() if line["kind"] != "eval"], "leave_out": ("eval.json",),
        "spec": {"loss": None, "crop": [1, 2], "optimizer": {}},
    },
    "uneven": {"lines": changed("start", ranks=[3])},
    "validated": {"lines": changed("eval", val_loss=[1.25, 1.5], seconds=[2.0], top1=[90.0, 40.0])},
    "best": {
        "spec": {"evaluate": {"last_checkpoints": 3}},
        "files": {
            "checkpoints/best.json": {"step": 2000, "measure": "top1", "value": 71.256},
            "eval.json": {"top1_macro_mean": 71.256, "mode": "stream", "crops": "full", "ema": FINAL},
        },
    },
    "more epochs, earlier": {"lines": [*until(30), {"kind": "more_epochs", "step": 30, "from": 3, "to": 4}]},
    "more epochs": {"lines": [*until(20), {"kind": "more_epochs", "step": 20, "from": 3, "to": 4}]},
    "another experiment": {"lines": [*until(30), start(30, forced=["seed: the checkpoint has 0, this run 1"])]},
    "early stop": {"lines": [*until(30), STOP]},
    "warned": {"lines": [*whole_log(), {"kind": "warning", "step": 40, "text": "it <b>burns</b>"}]},
    "several labels": {
        "lines": changed("eval", map=[20.0, 30.0]), "spec": {"loss": {"kind": "binary"}},
        "files": {"eval.json": NONE_OF_MAP | {"map_mean": 75.0, "classes_left_out": ["<c>"]}},
    },
    "without its measure": {"spec": {"loss": {"kind": "binary"}}, "files": {"eval.json": NONE_OF_MAP}},
    "classes": {"lines": changed("eval", classes=[[50.0, None]]), "files": {"plan.json": {"clips_per_class": CLASSES}}},
    "many classes": {
        "lines": changed("eval", classes=OF_MANY), "files": {"plan.json": {"clips_per_class": MANY}},
    },
    "changing classes": {"lines": changed("eval", classes=[[1.0], [], [2.0, 3.0], [4.0, 2.0]])},
    "shared clips": {"files": {"plan.json": {"shared_clips": 1200, "shared_groups": 1}}},
    "averages": {"lines": averages()},
    "other evaluations": {
        "files": {
            "evals/clips-3/eval.json": FINAL | {"overrides": {"evaluate.clips": 3}},
            "evals/<b>/eval.json": FINAL | {"overrides": {"data.val": "<i>.csv"}},
            "evals/torn/eval.json": '{"top1_mean"',
        },
    },
    "trust ratios": {"lines": [*whole_log(), *RATIOS, start(20)]},
    "noise scale": {"lines": measured([2.0, 1.0]), "spec": {"noise_scale": {"every_steps": 2}}},
    "unclear noise scale": {"lines": measured([-1.0, None])},
    "one virtual GPU": {"spec": {"noise_scale": {"every_steps": 10}}, "files": {"plan.json": {"virtual_gpus": 1}}},
    "jobs": {"lines": timed(*RESUMED)},
    "restarts": {
        "lines": timed(*(line | ({"job": f"{T0 - 20:.0f}"} if line["kind"] == "start" else {}) for line in RESUMED)),
        "files": {"job/restarts": "2026 job 7: exit status 1, without n2\n\n\0\n2026-01"},
    },
    "ranks": {"lines": [*whole_log(), *RANKS]},
    "uneven ranks": {"lines": [*whole_log(), window(10), window(20, 1.0, 2.0, 3.0) | {"data_wait_s": [1.0, 1.0]}]},
    "early recognition": {"files": {"observed.json": OBSERVED | {"anytime": POINTS}}},
    "early recognition by clips": {"files": {"observed.json": OBSERVED | {"frames": 16}}},
    "many nodes": {"files": {"environment.json": NODES}},
    "broken files": {"files": dict.fromkeys(BROKEN, "{'a: [\x00")},
    "wrong values": {
        "files": {
            "plan.json": {"clips_per_class": {"train": {"a": "x"}, "val": {}}},
            "eval.json": '{"videos": 3, "checkpoints": []}',
            "observed.json": '{"name": "run"}',
            "checkpoints/best.json": "[1]",
        },
    },
    "broken spec": {"files": {"spec.yaml": "name: ["}},
    "torn log": {"files": {"metrics.jsonl": f'{json.dumps(start(0))}\n{{"step": 1}}\n{{"kind": "step", "st'}},
}  # fmt: skip
COMPARED = (
    ("whole run", "skipped", "young", "several labels", "no log"),
    ("trust ratios", "early recognition", "killed"),
)
INDEXED = ("whole run", "no final evaluation", "killed", "several labels", "not measured", "no file")


def every_page() -> dict[str, str]:
    """Return the text of each case's page; of compared runs, what comes before the first; of two indexes."""
    paths = {name: write_folder(Path("runs"), name, **{"name": "run"} | CASES[name]) for name in CASES}
    pages = {name: page_text(render([RunRecord(path)])) for name, path in paths.items()}
    for names in COMPARED:
        page = page_text(render(read_runs([paths[name] for name in names])))
        pages[", ".join(names)] = page[: page.index("\nrun (runs/") + 1]
    Path("few").mkdir()
    for name in INDEXED:
        Path("few", name).symlink_to(paths[name].absolute())
    pages["an index"] = index_text(Path("few"))
    write_text("runs/submitted/job/spec.yaml", "name: waits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, content, **_: content.write(b"not drawn"))
        pages["an index of all"] = index_text(Path("runs"))
    return pages


def index_text(folder: Path) -> str:
    write_index(folder, Path("index.html"))
    return page_text(Path("index.html").read_text(encoding="utf-8"))


def golden_lines() -> Iterator[str]:
    """Yield the lines of the file.

    Of a case's page: the lines of the whole run's that it lacks, as `-first,count`, and those that it has instead.
    """
    pages = every_page()
    whole = pages["whole run"].splitlines()
    for name, page in pages.items():
        yield f"==== {name}"
        if name in CASES and page != pages["whole run"]:
            _, _, *lines = difflib.unified_diff(whole, page.splitlines(), n=0, lineterm="")
            kept = (line for line in lines if not line.startswith("-"))
            yield from (line.split()[1] if line.startswith("@@") else line for line in kept)
        else:
            yield from page.splitlines()


@pytest.mark.filterwarnings("error")
def test_the_pages_are_those_of_the_golden_file() -> None:
    check_golden(GOLDEN, golden_lines)


if __name__ == "__main__":
    write_golden(GOLDEN, golden_lines)
