"""A sweep file -> many specs: axes, names, places of mistakes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.sweep.grid import MOST_RUNS, Sweep, load_sweep, sweep_texts

BASE = {
    "name": "base",
    "model": {"arch": "tsm", "num_classes": 4},
    "data": {"train": "train.csv", "val": "val.csv"},
    "scale": {"gpus": 6, "clips_per_gpu": 8},
    "run_dir": "elsewhere/runs",
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a sweep file with its base beside it; the axes are YAML, so that lines are known."""
    return partial(_write, tmp_path)


def _write(folder: Path, text: str, base: dict[str, Any] | None = None) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(base or BASE))
    path = folder / "sweep_file.yaml"
    path.write_text(f"name: study\nbase: base.yaml\n{text}")
    return path


def _saved(sweep: Sweep, folder: Path) -> Sweep:
    """The sweep that its own folder gives."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sweep_texts(sweep).items():
        (folder / name).write_text(text, encoding="utf-8")
    return load_sweep(folder)


def _names(sweep: Sweep) -> list[str]:
    return [run.name for run in sweep.runs]


def test_a_grid_is_every_value_with_every_other_and_the_last_axis_runs_fastest(write: Write) -> None:
    sweep = load_sweep(write("grid: {scale.gpus: [2, 4], optimizer.base_lr: [0.01, 1e-3]}\nnodes: 3\nat_once: 2\n"))
    assert _names(sweep) == [
        "gpus-2_base_lr-0.01", "gpus-2_base_lr-0.001", "gpus-4_base_lr-0.01", "gpus-4_base_lr-0.001",
    ]  # fmt: skip
    assert [(run.spec.scale.gpus, run.spec.optimizer.base_lr) for run in sweep.runs] == [
        (2, 0.01), (2, 0.001), (4, 0.01), (4, 0.001),
    ]  # fmt: skip
    assert {(run.nodes, run.spec.scale.clips_per_gpu) for run in sweep.runs} == {(3, 8)} and sweep.at_once == 2
    assert sweep.folder == Path("elsewhere/runs/study")
    assert [run.spec.run_path for run in sweep.runs] == [sweep.folder / name for name in _names(sweep)]


def test_zip_goes_in_step_and_names_by_the_first_keys_that_tell_the_rows_apart(write: Write) -> None:
    sweep = load_sweep(write("zip: {seed: [0, 0, 1], scale.gpus: [2, 4, 4], nodes: [1, 2, 2]}\n"))
    assert _names(sweep) == ["seed-0_gpus-2", "seed-0_gpus-4", "seed-1_gpus-4"]
    assert [(run.spec.seed, run.spec.scale.gpus, run.nodes) for run in sweep.runs] == [(0, 2, 1), (0, 4, 2), (1, 4, 2)]
    # nodes are no part of an experiment, so they are no key of the spec
    assert all("nodes" not in run.changes for run in sweep.runs)
    assert _names(load_sweep(write("zip: {seed: [0, 1], scale.gpus: [2, 4]}\n"))) == ["seed-0", "seed-1"]


def test_explicit_runs_stand_beside_the_grid_and_may_have_names_and_nodes(write: Write) -> None:
    text = """\
grid: {model.arch: [tsm, tsn]}
zip: {scale.gpus: [2, 4]}
runs:
  - {name: baseline, nodes: 7, scale.clips_per_gpu: 16}
  - {scale.gpus: 8, curve: large}
  - {seed: 5, nodes: 9}
nodes: 1
"""
    sweep = load_sweep(write(text))
    assert _names(sweep) == [
        "arch-tsm_gpus-2", "arch-tsm_gpus-4", "arch-tsn_gpus-2", "arch-tsn_gpus-4", "baseline", "gpus-8", "seed-5",
    ]  # fmt: skip
    assert [run.nodes for run in sweep.runs] == [1, 1, 1, 1, 7, 1, 9]
    # One curve of the figure for each point of the grid; the scale is its axis.
    assert [run.curve for run in sweep.runs] == ["arch-tsm"] * 2 + ["arch-tsn"] * 2 + ["", "large", ""]


LARGE = """\
extends: more.yaml
optimizer: {lr_scaling: sqrt, trust_ratio: {kind: bounded, upper: 5}}
schedule: {epochs: 7}
"""
PRESETS = """\
set: {optimizer.base_lr: 0.5}
presets:
  plain: {optimizer.base_lr: 0.01}
  large: {extends: large.yaml, optimizer.trust_ratio.upper: 20, schedule.warmup_epochs: 2}
grid: {seed: [0, 1], scale.gpus: [2, 4]}
"""


def _with_presets(write: Write) -> Path:
    base = BASE | {"optimizer": {"momentum": 0.8, "trust_ratio": None}}
    path = write(PRESETS, base)
    (path.parent / "large.yaml").write_text(LARGE)
    (path.parent / "more.yaml").write_text("optimizer: {trust_ratio: {kind: lars, lower: 0.5}, weight_decay: 0}\n")
    return path


def test_a_preset_is_a_files_keys_then_its_own_with_every_point_of_the_grid(write: Write, tmp_path: Path) -> None:
    sweep = load_sweep(_with_presets(write))
    points = ["seed-0_gpus-2", "seed-0_gpus-4", "seed-1_gpus-2", "seed-1_gpus-4"]
    assert _names(sweep) == [f"{preset}_{point}" for preset in ("plain", "large") for point in points]
    # A curve of the figure is a preset: seeds are its bars, the scale its axis.
    assert [run.curve for run in sweep.runs] == ["plain"] * 4 + ["large"] * 4
    plain, large = sweep.runs[1].spec, sweep.runs[7].spec
    assert (plain.optimizer.base_lr, plain.optimizer.lr_scaling, plain.optimizer.trust_ratio) == (0.01, "linear", None)
    assert (plain.schedule.epochs, plain.schedule.warmup_epochs, plain.seed, plain.scale.gpus) == (100, 5, 0, 4)
    trust = large.optimizer.trust_ratio
    assert trust is not None and (trust.kind, trust.lower, trust.upper) == ("bounded", 0.5, 20)
    assert (large.optimizer.base_lr, large.optimizer.weight_decay, large.optimizer.momentum) == (0.5, 0, 0.8)
    assert (large.schedule.epochs, large.schedule.warmup_epochs, large.seed, large.scale.gpus) == (7, 2, 1, 4)
    sweep = load_sweep(_with_presets(write), [f"run_dir={tmp_path / 'runs'}"])
    assert _saved(sweep, sweep.folder).runs == sweep.runs


def test_presets_alone_are_a_sweep_and_a_key_of_a_preset_is_none_to_override(write: Write) -> None:
    path = write("presets: {a: {optimizer.base_lr: 0.1}, b: {}}\n")
    sweep = load_sweep(path)
    assert [(run.name, run.curve, run.spec.optimizer.base_lr) for run in sweep.runs] == [
        ("a", "a", 0.1), ("b", "b", 0.00125),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"differ in optimizer\.base_lr"):
        load_sweep(path, ["optimizer.base_lr=1"])


def test_a_mistake_in_a_presets_file_is_named_with_its_line_there(write: Write) -> None:
    path = _with_presets(write)
    (path.parent / "large.yaml").write_text("optimizer:\n  lr_scalin: sqrt\n")
    with pytest.raises(UserError, match=r"large\.yaml:2: optimizer\.lr_scalin: unknown key"):
        load_sweep(path)


def test_set_and_overrides_are_laid_over_the_base_of_every_run(write: Write) -> None:
    path = write("set: {schedule.epochs: 7, run_dir: there}\ngrid: {scale.gpus: [2, 4]}\n")
    sweep = load_sweep(path, ["seed=3", "schedule.epochs=9"])
    assert {(run.spec.schedule.epochs, run.spec.seed) for run in sweep.runs} == {(9, 3)}
    assert sweep.folder == Path("there/study")


def test_more_values_on_an_axis_leave_the_names_of_the_runs_that_were(write: Write) -> None:
    before = load_sweep(write("grid: {scale.gpus: [2]}\nzip: {seed: [0, 1], data.crop: [64, 96]}\n"))
    after = load_sweep(write("grid: {scale.gpus: [2, 4]}\nzip: {seed: [0, 1, 2], data.crop: [64, 96, 128]}\n"))
    assert set(_names(before)) < set(_names(after))


def test_names_are_folder_names_and_keys_of_one_last_word_are_in_full(write: Write) -> None:
    text = (
        "grid: {data.short_side: [[256, 256]], evaluate.short_side: [256], model.pretrained: ['a b/\u00e9.pt', null]}\n"
    )
    name = "data.short_side-256-256_evaluate.short_side-256_pretrained"
    assert _names(load_sweep(write(text))) == [f"{name}-a-b-.pt", f"{name}-null"]


VALUES = {
    "scale.gpus": st.integers(1, 10**6),
    "optimizer.base_lr": st.floats(1e-9, 1e9, exclude_min=True),
    # A long one is cut, and ends in a digest.
    "model.pretrained": st.none() | st.text("bcd", min_size=1, max_size=120),
    "data.flip": st.booleans(),
    "data.short_side": st.lists(st.integers(256, 999), min_size=2, max_size=2).map(sorted),
}


@st.composite
def _sweeps(draw: st.DrawFn) -> dict[str, Any]:
    """grid and zip over distinct keys, with distinct values on each axis."""
    keys = draw(st.permutations(sorted(VALUES)))
    on_grid = draw(st.integers(0, 2))
    in_step = draw(st.integers(0 if on_grid else 1, 2))
    rows = draw(st.integers(1, 3))

    def axis(key: str, least: int, most: int) -> list[Any]:
        return draw(st.lists(VALUES[key], min_size=least, max_size=most, unique_by=repr))

    most = {key: 2 if key == "data.flip" else 3 for key in keys}
    grid = {key: axis(key, 1, most[key]) for key in keys[:on_grid]}
    rows = min([rows, *(most[key] for key in keys[on_grid : on_grid + in_step])])
    return {"grid": grid, "zip": {key: axis(key, rows, rows) for key in keys[on_grid : on_grid + in_step]}}


@given(axes=_sweeps())
def test_any_axes_give_their_runs_once_with_folder_names_that_hold(
    axes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    sweep = load_sweep(_write(folder, yaml.safe_dump(axes, sort_keys=False)))
    rows = len(next(iter(axes["zip"].values()))) if axes["zip"] else 1
    wanted = rows * math.prod(map(len, axes["grid"].values()))
    assert len(sweep.runs) == wanted
    names = _names(sweep)
    assert len({name.casefold() for name in names}) == wanted
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.,+=@_-]{0,79}", name) for name in names), names
    # Each run has just the values that its changes say, and the sweep's own folder gives the same runs.
    again = _saved(sweep, folder)
    own, other = (
        [dataclasses.replace(run, spec=run.spec.model_copy(update={"run_dir": ""})) for run in one.runs]
        for one in (sweep, again)
    )
    assert own == other and again.folder == sweep.folder.absolute()


def test_the_saved_sweep_stands_alone(write: Write, tmp_path: Path) -> None:
    text = "set: {seed: 4}\nruns: [{name: a, scale.gpus: 2}]\nat_once: 3\n"
    sweep = load_sweep(write(text), ["schedule.epochs=9"])
    again = _saved(sweep, tmp_path / "saved")
    assert again.at_once == 3
    spec = again.runs[0].spec
    assert (spec.seed, spec.schedule.epochs, spec.scale.gpus) == (4, 9, 2)


MISTAKES = [
    ("nodes: 1\n", r"sweep_file\.yaml:1: a sweep must have runs; give grid, zip, presets or runs"),
    ("gird: {seed: [1]}\n", r"sweep_file\.yaml:3: gird: unknown key; did you mean grid\?"),
    ("grid: {seed: 1}\n", r"sweep_file\.yaml:3: grid\.seed: .*array"),
    ("grid:\n  seed: []\n", r"sweep_file\.yaml:4: grid\.seed: .*at least 1"),
    ("grid:\n  scale.gpu: [2, 4]\n", r"sweep_file\.yaml:4: scale\.gpu: unknown key; did you mean gpus\?"),
    ("grid:\n  seed: [1]\n  scale.gpus: [2, 4.5]\n", r"sweep_file\.yaml:5: scale\.gpus: .*got 4\.5"),
    ("runs:\n  - {seed: 1}\n  - seed: 2\n    model.arch: tms\n", r"file\.yaml:6: model\.arch: 'tms' is not a choice"),
    ("runs:\n  - {seed: 1}\n  - {nodes: 0, seed: 2}\n", r"sweep_file\.yaml:5: runs\.1\.nodes: "),
    ("runs:\n  - {name: a/b}\n", r"sweep_file\.yaml:4: runs\.0\.name: String should match .* got 'a/b'"),
    ("runs:\n  - {name: a, seed: 1}\n  - {name: A, seed: 2}\n", r"sweep_file\.yaml:5: two runs have the name A"),
    ("zip:\n  seed: [1, 2]\n  scale.gpus: [2]\n", r"yaml:5: zip\.scale\.gpus: must have as many values as seed, 2"),
    ("grid: {seed: [1]}\nzip:\n  seed: [2]\n", r"file\.yaml:5: seed: seed is an axis already; remove it"),
    ("grid: {optimizer.trust_ratio: [null]}\nzip:\n  optimizer.trust_ratio.kind: [lars]\n",
     r"yaml:5: optimizer\.trust_ratio\.kind: optimizer\.trust_ratio is an axis already"),
    ("grid: {model.pretrained: [a b, A/B]}\n", r"sweep_file\.yaml:3: two runs have the name pretrained-A-B; list them"),
    ("grid:\n  name: [a]\n", r"sweep_file\.yaml:4: name: must be a key of the spec"),
    ("grid:\n  run_dir: [a]\n", r"sweep_file\.yaml:4: run_dir: must be a key of the spec"),
    ("grid:\n  nodes: [1, x]\n", r"sweep_file\.yaml:4: grid\.nodes: must be whole numbers above 0, got \[1, 'x'\]"),
    ("set:\n  scale: {gpus: 2}\nruns: [{}]\n", r"sweep_file\.yaml:4: scale is a section; write scale\.gpus"),
    ("grid: {seed: [1, 1]}\n", r"sweep_file\.yaml:3: seed-1 \(.*\) and seed-1 are one and the same run"),
    ("grid: {seed: [1], scale.gpus: [6]}\nruns:\n  - {seed: 1}\n", r"sweep_file\.yaml:5: .*one and the same run"),
    (f"grid: {{seed: {list(range(MOST_RUNS + 1))}}}\n", r"yaml:3: 1,001 runs; a sweep may have at most 1,000"),
    ("grid: {seed: [1]}\nat_once: 0\n", r"sweep_file\.yaml:4: at_once: "),
    ("presets:\n  a: {seed: 1}\n  b: {scale.gpu: 2}\n", r"yaml:5: scale\.gpu: unknown key; did you mean gpus\?"),
    ("grid: {optimizer.name: [sgd]}\npresets:\n  a:\n    optimizer: {name: lamb}\n",
     r"yaml:6: optimizer: optimizer\.name is an axis already; remove"),
    ("grid: {seed: [1]}\npresets:\n  a:\n    seed: 2\n", r"yaml:6: seed: seed is an axis already; remove"),
    ("grid: {optimizer.trust_ratio: [null]}\npresets:\n  a:\n    optimizer.trust_ratio.kind: lars\n",
     r"yaml:6: optimizer\.trust_ratio\.kind: optimizer\.trust_ratio is an axis already; remove"),
    ("zip: {scale.gpus: [1]}\npresets:\n  a:\n    scale: 2\n", r"yaml:6: scale: scale\.gpus is an axis already"),
    ("presets:\n  a: {extends: no.yaml}\n", r"yaml:4: presets\.a\.extends: .*no\.yaml does not exist; the path"),
    ("presets:\n  a: {extends: shipped:dte}\n", r"yaml:4: presets\.a\.extends: shipped:dte not found; did you mean"),
    ("presets:\n  a: {extends: configs/date.yaml}\n", r"extends: .* does not exist; did you mean shipped:date\?"),
    ("presets:\n  a: {name: b}\n", r"sweep_file\.yaml:4: name: must be a key of the spec"),
    ("presets:\n  a: {nodes: 4}\n", r"sweep_file\.yaml:4: nodes: unknown key"),
    ("presets:\n  a/b: {seed: 4}\n", r"sweep_file\.yaml:4: presets\.a/b.*: String should match"),
    ("presets: {a: {seed: 4}, b: {seed: 4}}\n", r"sweep_file\.yaml:3: a \(.*\) and b are one and the same run"),
    ("folds: cv/fold\n", r"yaml:3: folds: must be .* numbers, such as folds/fold\{1\.\.5\}, got 'cv/fold'"),
    ("folds: cv/fold{2..2}\n", r"yaml:3: folds: must be .*, got 'cv/fold\{2\.\.2\}'"),
    ("folds: f{1..3}\ngrid: {data.val: [a, b]}\n", r"yaml:3: data\.val: data\.val is an axis already; remove"),
    ("folds: f{1..1001}\n", r"1,001 runs; a sweep may have at most 1,000"),
    ("folds: a{1..2}/f{1..2}\n", r"yaml:3: folds: must be the path"),
    ("folds: f{01..03}\n", r"yaml:3: folds: must be the path"),
    ("folds: f{1..2}\npresets: {a: {data.train: t}, b: {}}\n", r"yaml:3: data\.train: data\.train is an axis already"),
    ("x: seed\ngrid: {seed: [0, 1]}\n", r"yaml:3: x: must be a key that every run changes, .* or list, got seed"),
    ("x: data.crop\ngrid: {seed: [0, 1]}\n", r"yaml:3: x: must be a key that every run changes, .* got data\.crop"),
    ("runs: [{}]\nreference: {label: x, points: []}\n", r"yaml:4: reference: was removed; `python papers/figure4\.py"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_sweep(write(text))


def test_a_sweep_may_have_as_many_runs_as_an_array(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("summit_train.sweep.grid.MOST_RUNS", 3)
    assert len(_names(load_sweep(write("grid: {seed: [1, 2, 3]}\n")))) == 3
    for four in ("grid: {seed: [1, 2, 3, 4]}\n", "grid: {seed: [1, 2, 3]}\nruns: [{seed: 4}]\n"):
        with pytest.raises(UserError, match="4 runs; a sweep may have at most 3"):
            load_sweep(write(four))


def test_a_base_that_is_not_there_is_named(write: Write) -> None:
    path = write("runs: [{}]\n")
    (path.parent / "base.yaml").unlink()
    with pytest.raises(UserError, match=r"sweep_file\.yaml:2: base: .*base\.yaml does not exist; the path must be"):
        load_sweep(path)
    for base, message in (
        ("shipped:dte", "shipped:dte not found; did you mean shipped:date"),
        ("configs/motion/tsm.yaml", ".*tsm.yaml does not exist; did you mean shipped:motion/tsm"),
    ):
        path.write_text(f"name: study\nbase: {base}\nruns: [{{}}]\n")
        with pytest.raises(UserError, match=f"sweep_file.yaml:2: base: {message}"):
            load_sweep(path)


@pytest.mark.parametrize("override", ["scale.gpus=3", "scale={gpus: 3}"])
def test_an_override_of_what_the_runs_differ_in_is_refused(write: Write, override: str) -> None:
    with pytest.raises(UserError, match=r"the runs of this sweep differ in scale\.gpus"):
        load_sweep(write("grid: {scale.gpus: [2, 4]}\n"), [override])


def test_an_entry_that_changes_nothing_is_the_base(write: Write) -> None:
    assert _names(load_sweep(write("runs: [{}, {nodes: 4}]\n"))) == ["base", "nodes-4"]


def test_a_long_name_is_cut_and_ends_in_a_digest_of_all(write: Write) -> None:
    first, second = _names(load_sweep(write(f"grid: {{model.pretrained: [{'x' * 90}, {'x' * 91}]}}\n")))
    assert first != second and len(first) == len(second) == 80
    assert re.fullmatch("pretrained-x{60}-[0-9a-f]{8}", first)


def test_runs_of_one_sweep_have_one_kind_of_loss(tmp_path: Path) -> None:
    base = "name: any\nmodel: {arch: tsn, num_classes: 4}\ndata: {train: t.csv, val: v.csv}\n"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "kinds.yaml").write_text("name: kinds\nbase: base.yaml\ngrid: {loss.kind: [softmax, binary]}\n")
    with pytest.raises(UserError, match=r"kinds\.yaml:1: loss\.kind must be the same in all runs"):
        load_sweep(tmp_path / "kinds.yaml")


def test_folds_are_the_innermost_axis_with_the_lists_of_each(write: Write, tmp_path: Path) -> None:
    sweep = load_sweep(write("folds: cv/f{9..10}/lists\ngrid: {seed: [0, 1]}\n"))
    assert _names(sweep) == ["seed-0_f9", "seed-0_f10", "seed-1_f9", "seed-1_f10"]
    assert [(run.fold, run.curve, run.changes["data.train"], run.spec.data.val) for run in sweep.runs[:2]] == [
        ("f9", "", "cv/f9/lists/train.csv", "cv/f9/lists/val.csv"),
        ("f10", "", "cv/f10/lists/train.csv", "cv/f10/lists/val.csv"),
    ]
    saved = _saved(sweep, tmp_path / "saved")
    assert (_names(saved), [run.fold for run in saved.runs]) == (_names(sweep), ["f9", "f10", "f9", "f10"])
    packed = tmp_path / "packed/f1/train"
    packed.mkdir(parents=True)
    first, second = load_sweep(write(f"folds: {tmp_path}/packed/f{{1..2}}\n")).runs
    assert (first.name, first.spec.data.train, Path(second.spec.data.train).name) == ("f1", str(packed), "train.csv")


@pytest.mark.parametrize(
    ("axes", "x", "curves"),
    [
        ("grid: {optimizer.base_lr: [0.1, 1], model.arch: [tsm, tsn]}", "optimizer.base_lr", {"arch-tsm", "arch-tsn"}),
        ("grid: {model.arch: [tsm, tsn], optimizer.base_lr: [0.1, 1]}", "optimizer.base_lr", {"arch-tsm", "arch-tsn"}),
        ("grid: {model.arch: [tsm, tsn], seed: [0, 1]}", "model.arch", {""}),
        ("grid: {scale.gpus: [1, 2], optimizer.base_lr: [0.1, 1]}", None, {"base_lr-0.1", "base_lr-1"}),
        (
            "grid: {data.flip: [true, false], model.arch: [tsm, tsn]}\nx: model.arch",
            "model.arch",
            {"flip-true", "flip-false"},
        ),
        ("grid: {seed: [0, 1]}", None, {""}),
        ("grid: {model.arch: [tsm, tsn]}\nruns: [{name: other, seed: 3}]", None, {"arch-tsm", "arch-tsn", ""}),
        (
            "presets: {a: {scale.gpus: 2}, b: {}}\ngrid: {optimizer.base_lr: [0.1, 1]}",
            None,
            {"a_base_lr-0.1", "a_base_lr-1", "b_base_lr-0.1", "b_base_lr-1"},
        ),
        (
            "grid: {data.crop: [32, 64]}\nzip: {data.flip: [true, false], seed: [1, 2]}",
            "data.crop",
            {"flip-true", "flip-false"},
        ),
        ("zip: {data.crop: [32, 64], data.flip: [true, false]}", "data.crop", {""}),
    ],
)
def test_the_axis_of_the_figure_is_the_batch_or_the_first_key_that_has_numbers(
    write: Write, tmp_path: Path, axes: str, x: str | None, curves: set[str]
) -> None:
    sweep = load_sweep(write(f"{axes}\n"))
    assert (sweep.x, {run.curve for run in sweep.runs}) == (x, curves)
    assert _saved(sweep, tmp_path / "saved").x == x
