"""`bench lr`: the rule by hand, and a set on which its suggestion learns and 30 times as much does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from summit_train.bench.find_lr import as_text, draw, suggestion
from summit_train.data.video.encode import write_video
from tests.conftest import WriteSpec
from tests.runs import records
from tests.worlds import Say, command, lines, train


def _rows(losses: list[float]) -> list[dict[str, float]]:
    """Step i has the base_lr 2^i / 1000."""
    return [{"step": i + 1, "base_lr": 2**i / 1000, "lr": 2**i / 100, "loss": loss} for i, loss in enumerate(losses)]


def test_a_third_of_where_the_mean_loss_is_lowest() -> None:
    """The mean of 9 is lowest around the only window that has nine ones: steps 10 to 18, centre 14."""
    found = suggestion(_rows([2.0] * 9 + [1.0] * 9 + [5.0] * 3))
    assert found["base_lr"] == float(f"{2**13 / 1000 / 3:.1e}") == 2.7
    assert found["reason"] == "the mean loss is lowest, 1.000 from 2.000, at a base_lr of 8.2; a third of that"
    means = [row["mean_loss"] for row in found["rows"]]
    assert means[4] == 2.0 and means[13] == 1.0 and means[9] == pytest.approx((4 * 2 + 5 * 1) / 9)
    # one loss that is not finite is left out of the mean
    assert suggestion(_rows([2.0] * 9 + [1.0] * 9 + [math.inf]))["base_lr"] is not None


def test_without_a_descent_there_is_no_suggestion() -> None:
    found = suggestion(_rows([2.0] * 9 + [1.95] * 9 + [5.0] * 9))
    assert found["base_lr"] is None and "the loss fell from 2.000 to no less than 1.950" in found["reason"]
    assert suggestion(_rows([2.0] * 9 + [1.93] * 9 + [5.0] * 9))["base_lr"] == 2.7
    assert "try a higher --to" in suggestion(_rows([2.0 - 0.05 * i for i in range(20)]))["reason"]


@pytest.mark.parametrize("losses", [[2.0] * 7 + [9.0], [2.0, 1.0, math.nan], [math.nan]])
def test_a_loss_that_diverges_at_once_gives_no_suggestion(losses: list[float], tmp_path: Path) -> None:
    found = suggestion(_rows(losses))
    right = f"the loss diverges within {len(losses)} step{'s' * (len(losses) > 1)}; try a lower --from"
    assert found["base_lr"] is None and found["reason"] == right
    assert [row["loss"] for row in found["rows"]] == [loss if math.isfinite(loss) else None for loss in losses]
    values = {"name": "a", "solver": "sgd", "global_batch": 8} | found
    assert as_text(values).endswith(f"no suggestion: {right}")
    draw(tmp_path / "lr.png", values)
    json.dumps(values, allow_nan=False)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 training and 20 validation clips of four colours under noise."""
    folder, rng = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for name, number in (("train", 80), ("val", 20)):
        for i in range(number):
            colour = np.array([(180, 70, 70), (70, 180, 70), (70, 70, 180), (120, 120, 120)][i % 4])
            frames = np.clip(colour + rng.normal(0, 40, (4, 32, 32, 3)), 0, 255).astype(np.uint8)
            write_video(folder / f"{name}{i}.mp4", frames, 25, quality=12)
        rows = [f"{name}{i}.mp4,{i % 4}\n" for i in range(number)]
        (folder / f"{name}.csv").write_text("path,label\n" + "".join(rows))
    return folder


@pytest.mark.nightly
def test_the_suggestion_learns_and_30_times_it_does_not(write_spec: WriteSpec, colours: Path, tmp_path: Path) -> None:
    keys = {
        "data": {"train": str(colours / "train.csv"), "val": str(colours / "val.csv")},
        "model": {"dropout": 0.0},
        "optimizer": {"head_lr_factor": 5},
        "schedule": {"epochs": 4, "decay": "none"},
        "evaluate": {"every_epochs": 1},
    }
    spec = write_spec(**keys)
    status, out = command(0, "bench", "lr", str(spec), "--json")
    assert status == 0, out
    values = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    rows = values["rows"]
    assert len(rows) < 100 and rows[-1]["loss"] > rows[0]["loss"]  # it diverged
    losses = {}
    for factor in (1, 30):
        train(0, spec, f"optimizer.base_lr={factor * values['base_lr']}", f"name=at{factor}")
        losses[factor] = min(record["val_loss"] for record in records(tmp_path / f"runs/at{factor}", "eval"))
    assert losses[1] < 0.5 * math.log(4) and losses[30] > math.log(4), (values["reason"], losses)


def test_a_range_that_begins_too_high_is_one_to_lower(write_spec: WriteSpec, say: Say) -> None:
    status, out, _ = say("bench", "lr", write_spec(), "--steps", "20", "--from", "1e20", "--to", "1e300")
    assert status == 0 and "no suggestion: the loss diverges within " in out and "try a lower --from" in out


def test_its_steps_and_the_time_left_are_said_and_its_rows_kept(
    write_spec: WriteSpec, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("summit_train.core.progress._PLAIN_EVERY_SECONDS", 0)
    words = (write_spec(), "--steps", "18", "--to", "1e-5", "--json", "--out", tmp_path / "lr.png")
    status, out, err = say("bench", "lr", *words)
    values = json.loads(out)
    assert values == json.loads((tmp_path / "lr.json").read_text())
    assert [row["base_lr"] for row in values["rows"][:2]] == pytest.approx([1e-6, 1e-6 * 10 ** (1 / 17)])
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "runs").exists()
    said = [line for line in lines(err) if " steps, " in line]
    assert status == 0 and [line.split(",")[0] for line in said] == [f"{done}/18 steps" for done in range(1, 19)]
    assert said[-1] == "18/18 steps, 0 s left"
