"""The threshold of class activation maps: the quantile by hand, and when a saved one counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.inference.cam.activation import Heatmap, Mapper
from summit_train.inference.cam.threshold import MapHistogram, Threshold, load_threshold, threshold_for
from summit_train.inference.trained import open_trained
from tests.runs import changed_copy, final_state

CPU = torch.device("cpu")


def _histogram(values: Iterable[float]) -> MapHistogram:
    histogram = MapHistogram()
    histogram.add(np.array(list(values)))
    return histogram


@pytest.mark.parametrize(
    ("values", "fraction", "threshold", "kept"),
    [
        (range(1, 11), 0.2, 9.0, 0.2),  # 9 and 10 of ten
        (range(1, 11), 0.21, 8.0, 0.3),  # two would be too few
        (range(1, 36), 0.2, 29.0, 0.2),  # 0.2 * 35 is 7.000000000000001 in binary
        ([5.0], 0.2, 5.0, 1.0),
        ([1, 1, 1, 1, 1], 0.2, 1.0, 1.0),  # equal values cannot be told apart
        ([-8, -4, -2, -1, -0.5], 0.4, -1 - 2**-11 + 2**-23, 0.4),  # the bin's least value
        ([-1.0, -0.0, 0.0, -2.0, -3.0], 0.4, 0.0, 0.4),  # the zeros are one value
        ([1e-30, 1e30, -1e30, 0, 0], 0.2, pytest.approx(1e30, rel=2**-11), 0.2),
    ],
)
def test_the_quantile_by_hand(values: Iterable[float], fraction: float, threshold: Any, kept: float) -> None:
    found, share = _histogram(values).threshold(fraction)
    assert found == threshold and share == pytest.approx(kept)


def test_any_number_of_values_to_a_2048th() -> None:
    generator, histogram = np.random.default_rng(0), MapHistogram()
    everything = generator.normal(0.3, 2.0, (100, 8, 7, 7))
    for one in everything:
        histogram.add(one.astype(np.float32))
    threshold, kept = histogram.threshold(0.2)
    exact = np.sort(everything.ravel())[-everything.size // 5]
    assert histogram.total == everything.size
    assert exact * (1 - 2**-11) <= threshold <= exact
    assert kept == (everything.astype(np.float32) >= threshold).mean() and 0.2 <= kept < 0.2005


@pytest.fixture
def val(motion_set: Path, tmp_path: Path) -> list[str]:
    """Overrides that name ten validation videos."""
    return _set(tmp_path / "val.csv", motion_set, range(10))


def _set(path: Path, motion_set: Path, videos: Iterable[int], *more: str) -> list[str]:
    rows = [line.split(",")[:2] for line in (motion_set / "val.csv").read_text().splitlines()[1:]]
    path.write_text("\n".join(["path,label", *(",".join(rows[video]) for video in videos), *more]) + "\n")
    return [f"data.val={path}", f"data.root={motion_set}"]


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of a run; its threshold is saved in it."""
    return Path(shutil.copytree(trained_run, tmp_path / "runs/run"))


def _found(path: Path, beside: Path, *overrides: str) -> tuple[Threshold, Path, bool]:
    shown: list[int] = []

    def follow(items: Iterable[Any], total: int, _: str) -> Iterator[Any]:
        shown.append(total)
        return iter(items)

    found = threshold_for(Mapper(open_trained(path, overrides), CPU), beside, follow)
    assert shown == ([] if found[2] else [10])
    return found


def test_it_is_the_quantile_of_all_maps_of_the_validation_set(run: Path, val: list[str], tmp_path: Path) -> None:
    found, file, was_saved = _found(run, tmp_path / "cam.json", *val)
    assert file == run / "cam.json" and not was_saved and not (tmp_path / "cam.json").exists()
    mapper = Mapper(open_trained(run, val), CPU)
    data, manifest = mapper.trained.spec.data, read_manifest(tmp_path / "val.csv")
    heatmaps = list(mapper.heatmaps(open_store(data, manifest), range(10), "fail"))
    assert all(isinstance(one, Heatmap) for one in heatmaps)
    places = np.sort(np.concatenate([one.map.ravel() for one in heatmaps if isinstance(one, Heatmap)]))[::-1]
    assert found.pixels == places.size == 10 * 4 and found.videos == 10
    exact = places[7]  # the eighth of forty
    assert abs(found.threshold - exact) <= abs(exact) * 2**-11 and found.threshold <= exact
    assert found.kept == pytest.approx((places >= found.threshold).mean()) and found.fraction == 0.2
    assert found.checkpoint.endswith("step_00000020.pt") and found.step == 20 and found.bad_videos == ()
    assert found.views["num_frames"] == 4 and found.views["crop"] == "centre square"
    assert json.loads(file.read_text())["threshold"] == found.threshold


def test_a_saved_one_counts(run: Path, val: list[str], tmp_path: Path) -> None:
    first, file, _ = _found(run, tmp_path / "cam.json", *val)
    file.write_text(file.read_text().replace(f'"threshold": {first.threshold!r}', '"threshold": 77.5'))
    again, place, was_saved = _found(run, tmp_path / "cam.json", *val)
    assert again.threshold == 77.5 and place == file and was_saved


@pytest.mark.parametrize("change", ["checkpoint", "views", "validation", "damaged"])
def test_it_is_worked_out_again(run: Path, val: list[str], motion_set: Path, tmp_path: Path, change: str) -> None:
    first, file, _ = _found(run, tmp_path / "cam.json", *val)
    overrides = list(val)
    if change == "checkpoint":
        (path,) = (run / "checkpoints").glob("*20.pt")
        state = final_state(run)
        weights = state["model"]
        assert isinstance(weights, dict)
        weights["fc.weight"] *= 2
        torch.save(state, path)
        path.with_name(path.name + ".sha256").unlink()
    elif change == "views":
        overrides += ["evaluate.short_side=40"]
    elif change == "validation":
        overrides = _set(tmp_path / "val.csv", motion_set, range(1, 11))
    else:
        file.write_text("{")
    target = next((run / "checkpoints").glob("*20.pt")) if change == "checkpoint" else run
    again, place, was_saved = _found(target, tmp_path / "cam.json", *overrides)
    assert not was_saved and place == file and load_threshold(file) == again
    if change == "checkpoint":
        assert again.threshold == pytest.approx(2 * first.threshold, rel=1e-3) and again.sha256 != first.sha256


def test_a_lone_checkpoint_saves_beside_and_needs_the_validation_set(
    trained_run: Path, val: list[str], tmp_path: Path
) -> None:
    alone = changed_copy(trained_run, tmp_path / "alone.pt")
    _, file, was_saved = _found(alone, tmp_path / "out/cam.json", *val)
    assert file == tmp_path / "out/cam.json" and not was_saved
    gone = "data.val=nowhere/val.csv"
    with pytest.raises(
        UserError, match=r"there is no nowhere/val\.csv .*data\.val=MANIFEST.*--threshold VALUE"
    ) as error:
        _found(alone, tmp_path / "out/cam.json", gone)
    assert "\n" not in str(error.value)
    # Without the manifest at hand its name counts.
    values = json.loads(file.read_text()) | {"val": "nowhere/val.csv"}
    file.write_text(json.dumps(values))
    assert _found(alone, tmp_path / "out/cam.json", gone)[2]


def test_bad_validation_videos(run: Path, motion_set: Path, tmp_path: Path) -> None:
    overrides = _set(tmp_path / "val.csv", motion_set, range(3), "missing.mp4,0")
    with pytest.raises(UserError, match=r"missing\.mp4: No such file"):
        measured(run, tmp_path, *overrides)
    with pytest.raises(RunFailed, match=r"1 of 4 videos could not be read, more than data\.max_bad_fraction"):
        measured(run, tmp_path, *overrides, "data.on_bad_clip=skip")
    found = measured(run, tmp_path, *overrides, "data.on_bad_clip=skip", "data.max_bad_fraction=0.5")
    assert found.videos == 3 and found.pixels == 3 * 4
    assert found.bad_videos == ((str(motion_set / "missing.mp4"), "No such file or directory"),)
    assert load_threshold(run / "cam.json") == found


def measured(run: Path, tmp_path: Path, *overrides: str) -> Threshold:
    mapper = Mapper(open_trained(run, overrides), CPU)
    return threshold_for(mapper, tmp_path / "cam.json", lambda items, *_: iter(items))[0]
