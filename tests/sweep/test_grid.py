"""Any axes give their runs, with names that hold, and a mistake in a sweep file is named with its line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from summit_train.cluster.site import load_site
from summit_train.core.errors import UserError
from summit_train.plan import make_plan
from summit_train.sweep.grid import MOST_RUNS, Sweep, load_sweep, sweep_texts
from summit_train.sweep.start import plan_runs
from tests.worlds import ROOT, bench_script

FOLDER = ROOT / "configs/sweeps"
TABLE_3 = bench_script("published").TABLE_3
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


def _write(folder: Path, text: str) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "typo.yaml").write_text("optimizer:\n  lr_scalin: sqrt\n")
    path = folder / "sweep_file.yaml"
    path.write_text(f"name: study\nbase: base.yaml\n{text}")
    return path


def _names(sweep: Sweep) -> list[str]:
    return [run.name for run in sweep.runs]


def test_more_values_on_an_axis_leave_the_names_of_the_runs_that_were(write: Write) -> None:
    before = load_sweep(write("grid: {scale.gpus: [2]}\nzip: {seed: [0, 1], data.crop: [64, 96]}\n"))
    after = load_sweep(write("grid: {scale.gpus: [2, 4]}\nzip: {seed: [0, 1, 2], data.crop: [64, 96, 128]}\n"))
    assert set(_names(before)) < set(_names(after))


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
    for name, text in sweep_texts(sweep).items():
        (folder / name).write_text(text, encoding="utf-8")
    again = load_sweep(folder)
    own, other = (
        [dataclasses.replace(run, spec=run.spec.model_copy(update={"run_dir": ""})) for run in one.runs]
        for one in (sweep, again)
    )
    assert own == other and again.folder == sweep.folder.absolute()


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
    ("presets:\n  a: {extends: typo.yaml}\n", r"typo\.yaml:2: optimizer\.lr_scalin: unknown key"),
    ("grid: {loss.kind: [softmax, binary]}\n", r"sweep_file\.yaml:1: loss\.kind must be the same in all runs"),
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


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("no.yaml", r".*no\.yaml does not exist; the path must be relative to the sweep file"),
        ("shipped:dte", "shipped:dte not found; did you mean shipped:date"),
        ("configs/motion/tsm.yaml", ".*tsm.yaml does not exist; did you mean shipped:motion/tsm"),
    ],
)
def test_a_base_that_is_not_there_is_named(write: Write, base: str, message: str) -> None:
    path = write("runs: [{}]\n")
    path.write_text(path.read_text().replace("base.yaml", base))
    with pytest.raises(UserError, match=f"sweep_file.yaml:2: base: {message}"):
        load_sweep(path)


@pytest.mark.parametrize(
    ("axes", "override", "key"),
    [
        ("grid: {scale.gpus: [2, 4]}\n", "scale.gpus=3", r"scale\.gpus"),
        ("grid: {scale.gpus: [2, 4]}\n", "scale={gpus: 3}", r"scale\.gpus"),
        ("presets: {a: {optimizer.base_lr: 0.1}, b: {}}\n", "optimizer.base_lr=1", r"optimizer\.base_lr"),
    ],
)
def test_an_override_of_what_the_runs_differ_in_is_refused(write: Write, axes: str, override: str, key: str) -> None:
    with pytest.raises(UserError, match=f"the runs of this sweep differ in {key}"):
        load_sweep(write(axes), [override])


def test_the_plan_of_each_row_of_table_3_is_the_papers() -> None:
    """The LR is 0.00125 for every 8 samples; of 384 nodes at most, the last two rows accumulate."""
    planned = plan_runs(
        load_sweep(FOLDER / "table3.yaml"),
        load_site("summit"),
        lambda spec, ranks: (make_plan(spec, ranks, 240_000), None),
        None,
    )
    for row, run in zip(TABLE_3, planned, strict=True):
        plan = run.plan
        assert (run.name, plan.virtual_gpus, plan.global_batch) == (f"nodes-{row.nodes}", row.gpus, row.global_batch)
        assert plan.peak_lr == pytest.approx(0.00125 * row.global_batch / 8) and plan.epochs == 100
        assert run.nodes is not None and plan.ranks == 6 * run.nodes <= 6 * 384
        assert plan.accumulation * plan.ranks == row.gpus and (run.nodes == row.nodes) == (row.nodes <= 384)


def test_a_run_here_takes_the_fewest_ranks_that_are_as_fast_as_all(make_sweep: Callable[..., Sweep]) -> None:
    sweep = make_sweep("grid: {scale.gpus: [1, 3, 4, 5, 6, 7, 8, 9, 10]}\n")
    site = load_site("local", ["ranks_per_node=4"])
    planned = plan_runs(sweep, site, lambda spec, ranks: (make_plan(spec, ranks, 512), None), None)
    assert [run.plan.ranks for run in planned] == [1, 3, 4, 3, 3, 4, 4, 3, 4]


def test_every_sweep_opens_with_what_a_reader_needs_and_has_a_folder_of_its_own() -> None:
    files = sorted(FOLDER.glob("*.yaml"))
    for path in files:
        opening = "".join(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines(keepends=True)))
        assert "@" not in opening, "a figure that is still to be filled in"
        assert all(word in opening for word in ("Source:", "Expect:", "Cost:", "Commands:", "%"))
        assert f"summit-train sweep shipped:sweeps/{path.stem} " in opening
    assert len({load_sweep(path).folder for path in files}) == len(files) == 4
