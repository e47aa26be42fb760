"""What the axes of sweep files give, and what is written of sweeps that are partly done, compared whole with a file.

After a change that is meant to change it, write the file again, and read each line of the difference:
    python -m tests.sweep.test_golden_sweeps
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from summit_train.cluster.site import load_site
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.scores import Scores
from summit_train.plan import make_plan
from summit_train.spec import Spec, dump_spec, load_spec
from summit_train.sweep.figure import write_sweep, written
from summit_train.sweep.grid import Sweep, SweepRun, load_sweep, sweep_texts
from summit_train.sweep.start import plan_runs, planned_table
from summit_train.sweep.status import as_values
from tests.page_values import check_golden, write_golden
from tests.run_directories import PLAN, Record, whole_log, write_folder
from tests.worlds import ROOT

GOLDEN = ROOT / "tests/golden/sweeps.txt"
SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
SHIPPED = {  # a site, and the training clips
    "averaging_motion": ("local", 512),
    "batch_size_motion": ("local", 512),
    "large_batch_motion": ("local", 1024),
    "table3": ("summit", 240_000),
}
FILES = {
    "base.yaml": {
        "name": "base", "model": {"arch": "tsm", "num_classes": 12}, "data": {"train": "train.csv", "val": "val.csv"},
        "scale": {"gpus": 6, "clips_per_gpu": 8}, "optimizer": {"momentum": 0.8, "trust_ratio": None},
        "run_dir": "runs",
    },
    "large.yaml": {
        "extends": "more.yaml", "schedule": {"epochs": 7},
        "optimizer": {"lr_scaling": "sqrt", "trust_ratio": {"kind": "bounded", "upper": 5}},
    },
    "more.yaml": {"optimizer": {"trust_ratio": {"kind": "lars", "lower": 0.5}, "weight_decay": 0}},
    "small.yaml": {
        "model": {"arch": "tsm", "backbone": "resnet18", "num_classes": 12}, "data": {"train": "a", "val": "b"},
        "scale": {"clips_per_gpu": 4}, "schedule": {"epochs": 4, "warmup_epochs": 1}, "run_dir": "runs",
    },
}  # fmt: skip
PRESETS = """\
  plain: {optimizer.base_lr: 0.01}
  large: {extends: large.yaml, optimizer.trust_ratio.upper: 20, schedule.warmup_epochs: 2}
"""

# The axes of sweep files, and overrides.
AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("grid: {scale.gpus: [2, 4], optimizer.base_lr: [0.01, 1e-3]}\nnodes: 3\nat_once: 2\n", ()),
    ("zip: {seed: [0, 0, 1], scale.gpus: [2, 4, 4], nodes: [1, 2, 2]}\n", ()),
    ("zip: {seed: [0, 1], scale.gpus: [2, 4]}\n", ()),
    ("zip: {data.crop: [32, 64], data.flip: [true, false]}\n", ()),
    ("grid: {model.arch: [tsm, tsn]}\nzip: {scale.gpus: [2, 4]}\nnodes: 1\nruns:\n"
     "  - {name: baseline, nodes: 7, scale.clips_per_gpu: 16}\n  - {scale.gpus: 8, curve: large}\n"
     "  - {seed: 5, nodes: 9}\n", ()),
    (f"set: {{optimizer.base_lr: 0.5}}\npresets:\n{PRESETS}grid: {{seed: [0, 1], scale.gpus: [2, 4]}}\n", ()),
    ("presets: {a: {optimizer.base_lr: 0.1}, b: {}}\n", ()),
    ("presets: {a: {scale.gpus: 2}, b: {}}\ngrid: {optimizer.base_lr: [0.1, 1]}\n", ()),
    ("set: {schedule.epochs: 7, run_dir: there}\ngrid: {scale.gpus: [2, 4]}\n", ("seed=3", "schedule.epochs=9")),
    ("grid: {data.short_side: [[256, 256]], evaluate.short_side: [256], model.pretrained: ['a b/é.pt', null]}\n", ()),
    ("runs: [{}, {nodes: 4}]\n", ()),
    (f"grid: {{model.pretrained: [{'x' * 90}, {'x' * 91}]}}\n", ()),
    ("folds: cv/f{9..10}/lists\ngrid: {seed: [0, 1]}\n", ()),
    ("folds: packed/f{1..2}\n", ()),
    ("grid: {model.arch: [tsm, tsn], optimizer.base_lr: [0.1, 1]}\n", ()),
    ("grid: {model.arch: [tsm, tsn], seed: [0, 1]}\n", ()),
    ("grid: {data.flip: [true, false], model.arch: [tsm, tsn]}\nx: model.arch\n", ()),
    ("grid: {model.arch: [tsm, tsn]}\nruns: [{name: other, seed: 3}]\n", ()),
    ("grid: {data.crop: [32, 64]}\nzip: {data.flip: [true, false], seed: [1, 2]}\n", ()),
)  # fmt: skip


def measured(lines: list[Record], square: float) -> list[Record]:
    """Every fourth step has measured its noise."""
    for line in lines:
        if line["kind"] == "step" and line["step"] % 4 == 0:
            line |= {"noise_scale": 5.0, "gradient_square": square + line["step"] % 3, "gradient_variance": 64.0}
    return lines


def begun(sweep: Sweep, number: int, **options: Any) -> Path:
    """Write the folder of a sweep's run; the spec and the plan are its own."""
    run = sweep.runs[number]
    gpus = run.spec.scale.gpus or 1
    files = {"spec.yaml": dump_spec(run.spec)} | options.pop("files", {})
    files["plan.json"] = PLAN | {"ranks": 1, "virtual_gpus": gpus, "global_batch": 4 * gpus}
    return write_folder(run.spec.run_path.parent, run.name, files=files, top1=90.0 - number, **options)


def all_but_the_last(sweep: Sweep) -> None:
    """All runs are done but the last, which was stopped, and the one before, which was never begun."""
    for number in range(len(sweep.runs) - 2):
        begun(sweep, number)
    last = {"job/restarts": "2026 job 7: it failed\n", "stopped": ""}
    begun(sweep, len(sweep.runs) - 1, leave_out=("eval.json",), files=last)


def all_with_noise(sweep: Sweep) -> None:
    """The last run is not done. Of the last curve the noise scale is unclear at the smaller batch."""
    for number in range(len(sweep.runs)):
        square = -9.0 if number == len(sweep.runs) - 2 else 1.0 + number
        is_last = number == len(sweep.runs) - 1
        begun(sweep, number, lines=measured(whole_log(), square), leave_out=("eval.json",) if is_last else ())


def all_with_labels(sweep: Sweep) -> None:
    checkpoints = [{"path": f"a/step_{step:08}.pt", "step": step, "map": 12.0 + step} for step in (30, 40)]
    result = {"map_mean": 47.0, "map_std": 0.0, "videos": 7, "checkpoints": checkpoints}
    lines = [line | ({"map": 40.0} if line["kind"] == "eval" else {}) for line in whole_log()]
    for number in range(len(sweep.runs)):
        begun(sweep, number, lines=lines, files={"eval.json": result} if number else {})


def all_folds(sweep: Sweep) -> None:
    """Of 10 and 30 videos, with the scores of two; the last run is not done, and the third lacks its scores."""
    for number, run in enumerate(sweep.runs):
        videos = 10 if run.fold == "fold1" else 30
        leave_out = ("eval.json",) if number == len(sweep.runs) - 1 else ()
        path = begun(sweep, number, leave_out=leave_out, files={"eval.json": {"videos": videos, "top5_mean": None}})
        logits = np.log([[0.1, 0.6, 0.1, 0.2]] * 2)
        scores = Scores(np.arange(2), np.array([number % 4, 3]), logits, np.array([True, False]))
        if number != 2:
            scores.save(
                path / "predictions/step_00000040.npz", [Clip("a.mp4"), Clip("b.mp4")], [*"wxyz"] if number else []
            )


def one_setting(sweep: Sweep) -> None:
    """The last run is training. Of the others with a measure of the user's own; the first two have a baseline.

    Of four videos of two folds each, as in `all_folds`; the second fold has one class.
    """
    for number, run in enumerate(sweep.runs):
        top1 = (0, 25, 50, 100, 100, 100)[number]
        result = {"videos": 4, "top1_mean": top1, "top5_mean": None, "recall_mean": 0.25 + top1 / 200}
        leave_out = ("eval.json",) if number == len(sweep.runs) - 1 else ()
        files: dict[str, Any] = {"eval.json": result}
        if number < 2:
            files["baseline/baseline.json"] = {
                "top1": 40.0 + number, "top1_interval": [20, 60], "features": 8, "videos": 4, "weights": "w.pth",
            }  # fmt: skip
        path = begun(sweep, number, leave_out=leave_out, files=files)
        labels = np.array([0, 1, 3, 3]) if run.fold == "f1" else np.array([2, 2, 2, 2])
        predicted = [0, 1, 3, 0] if run.fold == "f1" else [2, 1, 1, 2]
        scores = Scores(np.arange(4), labels, np.eye(4)[predicted], np.arange(4) < 3 + number % 2)
        scores.save(path / "predictions/step_00000040.npz", [Clip(f"{name}.mp4") for name in "abcd"], [*"wxyz"])


Write = Callable[[Sweep], object]
JOBS = {"gpus-1": ("3", "gone"), "gpus-16": ("7", "queued")}
# Axes, what was begun, and jobs by run.
STUDIES: dict[str, tuple[str, Write, Mapping[str, tuple[str, str]]]] = {
    "not begun": ("grid: {scale.gpus: [1, 2]}\nnodes: 2\n", lambda sweep: None, {}),
    "not alike": (
        "grid: {nodes: [1, 2], scale.gpus: [2, 4]}\nruns: [{seed: 1, curve: y}, {seed: 2, curve: z}]\n",
        lambda sweep: None, {},
    ),
    "rates and seeds": ("zip: {seed: [0, 1], optimizer.base_lr: [0.1, 0.2]}\n", lambda sweep: None, {}),
    "batches": ("grid: {scale.gpus: [1, 2, 4, 8, 16]}\nnodes: 2\n", all_but_the_last, JOBS),
    "seeds": (
        "presets: {a: {}, b: {loss.label_smoothing: 0.1}}\ngrid: {scale.gpus: [4, 2], seed: [0, 1]}\n",
        all_with_noise, {},
    ),
    "rates": ("grid: {model.arch: [tsm, tsn], optimizer.base_lr: [0.1, 0.01, 1.0]}\n", all_with_noise, {}),
    "words": ("grid: {optimizer.clip_norm: [null, 20]}\nfolds: f{1..2}\n", all_but_the_last, {}),
    "labels": ("nodes: 2\nset: {loss.kind: binary}\ngrid: {scale.gpus: [1, 2]}\n", all_with_labels, {}),
    "one setting": (
        "set: {evaluate.measures: [./own.py:recall]}\nfolds: f{1..2}\ngrid: {seed: [0, 1, 2]}\n", one_setting, {},
    ),
    "folds": ("folds: folds/fold{1..2}\ngrid: {optimizer.base_lr: [0.1, 0.2], seed: [0, 1]}\n", all_folds, {}),
}  # fmt: skip


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of a spec by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def run_line(run: SweepRun, base: Spec) -> str:
    """A run's name, nodes, curve and fold, and the keys of its spec that are not the base's."""
    ours = flat(run.spec.model_dump(mode="json"))
    theirs = flat(base.model_dump(mode="json"))
    differing = [f"{key}={value}" for key, value in ours.items() if value != theirs.get(key) and key != "name"]
    return f"{run.name} | {run.nodes} | {run.curve} | {run.fold} | {' '.join(run.changes)} | {' '.join(differing)}"


def sweep_lines(name: str, base: str, axes: str, overrides: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what a sweep file gives, from which alone its own folder gives the same."""
    Path("sweep_file.yaml").write_text(f"name: {name}\nbase: {base}\n{axes}", encoding="utf-8")
    sweep = load_sweep("sweep_file.yaml", overrides)
    yield f"folder {sweep.folder}, at once {sweep.at_once}, x {sweep.x}"
    runs = [run_line(run, load_spec(base)) for run in sweep.runs]
    yield from runs
    for file, text in sweep_texts(sweep).items():
        path = Path("saved", file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    again = load_sweep("saved")
    assert (again.at_once, again.x) == (sweep.at_once, sweep.x)
    assert [run_line(run, load_spec(base)) for run in again.runs] == [
        line.replace("run_dir=", f"run_dir={Path.cwd()}/") for line in runs
    ]


def study_lines(name: str) -> Iterator[str]:
    """Yield what is written into the folder of a sweep, and the numbers of its JSON with six digits."""
    axes, write, jobs = STUDIES[name]
    Path("study.yaml").write_text(f"name: {name.replace(' ', '_')}\nbase: small.yaml\n{axes}")
    sweep = load_sweep("study.yaml")
    write(sweep)
    rows = write_sweep(sweep, jobs)
    yield f"written: {written(sweep)}"
    for file in ("table.txt", "clips.csv", "confusion.csv", "confusion.png", "accuracy.svg"):
        if (sweep.folder / file).is_file():
            yield from (sweep.folder / file).read_text(encoding="utf-8").splitlines()
    for part, found in as_values(sweep, rows).items():
        yield from (f"{part}: {rounded(each)}" for each in (found if isinstance(found, list) else [found]))
    if name == "batches":
        with (sweep.folder / "table.csv").open(newline="") as file:
            yield from (",".join(cell[:12] for cell in cells) for cells in csv.reader(file))


def rounded(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={rounded(part)}" for key, part in value.items() if part is not None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def shipped_lines(path: Path) -> Iterator[str]:
    """Yield the plans of a shipped sweep, and its solvers."""
    sweep = load_sweep(path)
    site, clips = SHIPPED[path.stem]
    planned = plan_runs(sweep, load_site(site), lambda spec, ranks: (make_plan(spec, ranks, clips), None), None)
    yield from str(planned_table(planned)).splitlines()
    for run in planned:
        ratio = run.spec.optimizer.trust_ratio
        solver = f"{run.spec.optimizer.name} {ratio and ratio.kind}, {run.spec.scale.clips_per_gpu} clips a GPU"
        yield f"{run.name}: {solver}, {run.plan.warmup_steps} steps of warm-up, {run.plan.epochs} epochs"


def golden_lines() -> Iterator[str]:
    """Yield the lines of the file."""
    for name, values in FILES.items():
        Path(name).write_text(yaml.safe_dump(values))
    Path("packed/f1/train").mkdir(parents=True)
    for axes, overrides in AXES:
        yield f"==== {' '.join((repr(axes), *overrides))}"
        yield from sweep_lines("study", "base.yaml", axes, overrides)
    for name in STUDIES:
        yield f"==== {name}"
        yield from study_lines(name)
    for path in SWEEPS:
        yield f"==== {path.stem}"
        yield from shipped_lines(path)


def test_sweeps_are_those_of_the_golden_file() -> None:
    check_golden(GOLDEN, golden_lines)


if __name__ == "__main__":
    write_golden(GOLDEN, golden_lines)
