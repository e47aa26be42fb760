"""papers/date.py: DATE's networks, data, recipes and runs, on tiny files of the real formats."""

from __future__ import annotations

import gzip
import json
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from summit_train.core.errors import UserError
from tests.closeness import assert_near
from tests.worlds import bench_script, forked

tasks, date = bench_script("date_tasks"), bench_script("date")
SETTINGS = {"seed": 0, "lr": None, "precision": "fp64", "bounds": None}


def _run(task: str, method: str, batch: int, **more: Any) -> Any:
    epochs = tasks.TASKS[task].schedule.epochs
    return date.Training(task=task, method=method, batch=batch, **(SETTINGS | {"epochs": epochs} | more))


# --- networks


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        # Two convolutions and three layers, weights and biases: LeCun et al. 1998, with all maps connected.
        ("LeNet", 6 * 25 + 6 + 16 * 6 * 25 + 16 + 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10),
        # The paper's kernel of 256 x 512, and cuDNN's two biases.
        ("RowsLSTM", 28 * 128 + 128 + 256 * 512 + 2 * 512 + 128 * 10 + 10),
        # Two kernels of 400 x 800.
        ("WordLSTM", 10_000 * 200 + 2 * (400 * 800 + 2 * 800) + 200 * 10_000 + 10_000),
    ],
)
def test_parameters_by_hand(network: str, parameters: int) -> None:
    model = getattr(tasks, network)()
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    if network == "WordLSTM":
        largest = max(float(weight.detach().abs().max()) for weight in model.parameters())
        assert largest == pytest.approx(0.1, rel=1e-3)


def test_the_rows_of_an_image_are_the_steps() -> None:
    """The last row reaches the logits through one step, the first through 28; columns are the input."""
    model = tasks.RowsLSTM().double()
    image = torch.zeros(1, 1, 1, 28, 28, dtype=torch.float64, requires_grad=True)
    model(image).sum().backward()
    assert image.grad is not None
    strength = image.grad[0, 0, 0].abs().sum(1)
    assert strength[27] > 100 * strength[0] > 0


def test_the_state_of_each_virtual_gpu_is_carried_on() -> None:
    model = tasks.WordLSTM(words=7, hidden=5).double()
    words = torch.arange(2 * 3 * 8).view(2, 3, 8) % 7  # virtual GPU, row, word
    model.begin_epoch(2)
    parts = [[model(words[gpu, :, step : step + 4]) for gpu in range(2)] for step in (0, 4)]
    for gpu in range(2):
        whole, _ = model.unrolled(words[gpu], None)
        got = torch.cat([parts[step][gpu].view(3, 4, 7) for step in range(2)], 1).flatten(0, 1)
        assert_near(got, whole, 1e-12)
    model.begin_epoch(1)
    assert_near(model(words[0, :, :4]), parts[0][0], 1e-12)  # forgotten


# --- data


def write_mnist(folder: Path, train: int = 64, test: int = 32) -> Path:
    """Write digits of random pixels, brighter with the label, so that something can be learned."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for part, number in (("train", train), ("t10k", test)):
        labels = np.arange(number, dtype=np.uint8) % 10
        images = generator.integers(0, 20, (number, 28, 28), dtype=np.uint8) + 20 * labels[:, None, None]
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">4B3i", 0, 0, 8, 3, *images.shape) + images.tobytes()
        )
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4Bi", 0, 0, 8, 1, number) + labels.tobytes())
    return folder


def _write_ptb(folder: Path, lines: int = 61) -> Path:
    folder.mkdir(exist_ok=True)
    line = " ".join("abcdefghi")
    for part, number in (("train", lines), ("valid", 41), ("test", 41)):
        (folder / f"ptb.{part}.txt").write_text(f" {line} \n" * number)
    return folder


def test_mnist_is_read(tmp_path: Path) -> None:
    digits = tasks.read_mnist(write_mnist(tmp_path))
    assert digits.images.shape == (64, 1, 28, 28, 1) and digits.images.dtype == torch.uint8
    assert digits.labels.tolist()[:12] == [*range(10), 0, 1] and len(digits.test_labels) == 32
    assert digits.images[9].min() >= 180  # its label is 9
    share = tasks.Share(rank=1, ranks=2, virtual_gpus=4, samples=8, steps=2)
    steps = list(digits.epoch(0, share, 3))
    assert [[(b.step, b.virtual_gpu) for b in step] for step in steps] == [[(6, 2), (6, 3)], [(7, 2), (7, 3)]]
    assert torch.equal(steps[0][0].labels, digits.labels[steps[0][0].ids])
    whole = [digits.epoch(0, tasks.Share(rank, 2, 4, 8, 2), 3) for rank in range(2)]
    ids = torch.cat([batch.ids for rank in whole for step in rank for batch in step])
    assert ids.sort().values.tolist() == list(range(64))


def test_ptb_is_read(tmp_path: Path) -> None:
    text = tasks.read_ptb(_write_ptb(tmp_path))
    # All words are equally frequent, so they are numbered by the alphabet: <eos>, a, b, ...
    assert text.words.tolist()[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2] and len(text.words) == 610
    assert text.num_samples == 30  # (610 - 1) / 20
    share = tasks.Share(rank=1, ranks=2, virtual_gpus=4, samples=2, steps=3)
    steps = list(text.epoch(0, share, 1))
    assert [[(b.step, b.virtual_gpu) for b in step] for step in steps] == [[(n, 2), (n, 3)] for n in (3, 4, 5)]
    length = 609 // 8  # of a row
    for step, micro_batches in enumerate(steps):
        for batch in micro_batches:
            for row, targets in enumerate(batch.labels.view(2, 20)):
                first = (2 * batch.virtual_gpu + row) * length + 20 * step
                assert torch.equal(batch.clips[row], text.words[first : first + 20])
                assert torch.equal(targets, text.words[first + 1 : first + 21])


def test_the_perplexity_of_a_network_that_knows_nothing_is_its_number_of_words(tmp_path: Path) -> None:
    model = tasks.WordLSTM(words=12, hidden=4)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    found = tasks.read_ptb(_write_ptb(tmp_path)).score(model, torch.device("cpu"))
    assert found == {"test": pytest.approx(12, rel=1e-5), "valid": pytest.approx(12, rel=1e-5)}


IMAGES, SIZES = "train-images-idx3-ubyte", struct.Struct(">4B3i").pack


@pytest.mark.parametrize(
    ("task", "name", "content", "said"),
    [
        ("lenet", IMAGES, b"\x89PNG....", "not an IDX file of bytes (it begins with 89 50 4e 47)"),
        ("lenet", IMAGES, b"", "it begins with nothing"),
        ("lenet", IMAGES, SIZES(0, 0, 8, 3, 64, 28, 28) + b"1", "must have 50,192 bytes"),
        ("lenet", IMAGES, SIZES(0, 0, 8, 3, 1, 2, 2) + b"1234", "got images (1, 2, 2) and labels (64,)"),
        ("lenet", IMAGES, None, f"{IMAGES} not found, nor {IMAGES}.gz"),
        ("ptb", "ptb.test.txt", b"a b c\n", "must have more than 400 words, got 4"),
        ("ptb", "ptb.test.txt", b"\xff" * 900, "not a text (invalid start byte at byte 0)"),
        ("ptb", "ptb.test.txt", b"zebra " * 500, "ptb.test.txt: the word 'zebra' is not in the training text"),
        ("ptb", "ptb.test.txt.gz", b"zebra " * 500, "ptb.test.txt.gz: not a whole gzip file"),
    ],
)
def test_bad_data_are_refused(tmp_path: Path, task: str, name: str, content: bytes | None, said: str) -> None:
    (_write_ptb if task == "ptb" else write_mnist)(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        tasks.TASKS[task].read(tmp_path)
    assert said in str(refused.value) and "\n" not in str(refused.value)


# --- recipes


def test_the_worked_example() -> None:
    """Section 3.6 at 8,192, up to the partial batch of an epoch, which the paper counts: 7 steps, not 7.32."""
    task = tasks.TASKS["lenet_momentum"]
    solver, schedule = date.recipe(task, _run("lenet_momentum", "date", 8192), 60_000)
    assert (solver.name, solver.momentum, solver.trust_ratio.kind) == ("sgd", 0.9, "bounded")
    assert schedule.peak_lr == pytest.approx(1.25e-3 * math.sqrt(8), rel=1e-12)
    assert (schedule.warmup_steps, schedule.total_steps) == (117, 210)
    for step, lr in ((1, 3.016989e-5), (58, 1.749854e-3), (117, 3.529877e-3)):  # the example's, reading C
        assert schedule.learning_rate(step - 1) == pytest.approx(lr, rel=2e-3)
    for step in (118, 150, 200):
        assert schedule.learning_rate(step - 1) == pytest.approx(schedule.peak_lr * (210 - step) / 93, rel=1e-12)
    assert schedule.learning_rate(209) == 1e-6
    with pytest.raises(UserError, match="from 2 x 8,192 / 1,024"):
        date.recipe(task, _run("lenet_momentum", "date", 8192, epochs=16), 60_000)


def test_the_examples_manual_scaling() -> None:
    """Peak 0.01 at 8,192, two epochs of warm-up, a tenth after epochs 10, 20 and 27."""
    _, schedule = date.recipe(tasks.TASKS["lenet_momentum"], _run("lenet_momentum", "linear", 8192), 60_000)
    rates = [schedule.learning_rate(7 * epoch - 1) for epoch in (2, 10, 20, 27, 30)]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4, 1e-5])


def test_the_language_models_recipe() -> None:
    """LR 1 and clipping at 5 are of the sum over 20 steps; a trust ratio takes the factor out of the LR."""
    task = tasks.TASKS["ptb"]
    solver, schedule = date.recipe(task, _run("ptb", "baseline", 20), 46_479)
    assert (schedule.peak_lr, solver.clip_norm, solver.momentum, schedule.total_steps) == (20, 0.25, 0, 13 * 2323)
    rates = [schedule.learning_rate(2323 * epoch) for epoch in range(13)]
    assert rates == pytest.approx([20.0 * 0.5 ** max(0, epoch - 3) for epoch in range(13)])
    solver, schedule = date.recipe(task, _run("ptb", "date", 640), 46_479)
    assert schedule.peak_lr == pytest.approx(math.sqrt(32)) and schedule.warmup_steps == 232
    assert (solver.trust_ratio.lower, solver.trust_ratio.upper) == (pytest.approx(2), pytest.approx(200))
    solver, schedule = date.recipe(task, _run("ptb", "adam", 640, lr=0.002), 46_479)
    assert (solver.name, solver.clip_norm) == ("adam", 0.25)
    assert schedule.peak_lr == schedule.learning_rate(900) == 0.002


def test_the_runs_of_a_call() -> None:
    args = date.arguments(["lstm", "--data", "x"])
    runs = list(date.runs_of(tasks.TASKS["lstm"], args))
    assert [r.lr for r in runs if (r.method, r.batch) == ("grid", 8192)] == [0.01, 0.02, 0.04, 0.08, 0.16]
    assert [r.batch for r in runs if r.method == "date"] == [512, 2048, 8192]
    assert [r.batch for r in runs if r.method == "baseline"] == [128]
    assert len({r.name for r in runs}) == len(runs) == 1 + 4 * 3 + 3 * 3 + 5


# --- runs


WORDS = ("--precision", "fp64", "--epochs", "2")


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("lenet", "--methods date lars --batches 32 --samples 16"),
        ("lstm", "--methods adam --lrs 0.01 --batches 32 --samples 16"),
        pytest.param(
            "ptb",
            "--methods date baseline --batches 20 --samples 10 --bounds 0.01 0.1 --lrs 0.1",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_ranks_are_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, options: str) -> None:
    """Two micro-batches of one rank are one of each of two; a second call has nothing to train."""
    folder = _write_ptb(tmp_path / "data", 121) if task == "ptb" else write_mnist(tmp_path / "data")
    words = (task, "--data", str(folder), *WORDS, *options.split())
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert date.main([*words, "--out", str(alone)]) == 0
    assert tasks.TASKS[task].title in capsys.readouterr().out
    status, said = forked(2, partial(date.main, [*words, "--out", str(together)]))
    assert status == 0 and tasks.TASKS[task].title in said, said
    assert (together / f"{task}.png").read_bytes()[:4] == b"\x89PNG"
    found, others = ([json.loads(path.read_text()) for path in sorted(out.glob("*.json"))] for out in (alone, together))
    for one, other in zip(found, others, strict=True):
        assert [epoch["loss"] for epoch in one["curve"]] == pytest.approx([e["loss"] for e in other["curve"]], rel=1e-9)
        assert one["test"] == pytest.approx(other["test"], rel=1e-9)
        assert one["curve"][1]["loss"] < one["curve"][0]["loss"]
        assert (one["virtual_gpus"], one["environment"]["ranks"], other["environment"]["ranks"]) == (2, 1, 2)
    assert date.main([*words, "--out", str(alone)]) == 0
    assert f"{len(found)} of {len(found)} runs are in" in capsys.readouterr().err


# --- results


def test_seeds_are_put_together_and_the_best_lr_is_drawn(tmp_path: Path) -> None:
    machine = {"hosts": {"h": 1}, "ranks": 1, "processor": "p", "cores": 2, "device": "cpu", "torch": "2"}
    common = {"task": "lstm", "epochs": 25, "precision": "fp32", "bounds": None, "peak_lr": 0.1, "diverged": False}
    common["environment"] = machine | {"threads_per_rank": 1}
    runs = [("baseline", 128, None, seed, test) for seed, test in enumerate((98.5, 98.7, 98.9))]
    runs += [("date", 8192, None, 0, 98.0), ("adam", 8192, 0.001, 0, 97.0), ("adam", 8192, 0.0005, 0, 97.5)]
    runs += [("grid", 8192, 0.01, 0, 90.0), ("grid", 8192, 0.1, 0, 11.0)]
    for number, run in enumerate(runs):
        values = common | dict(zip(("method", "batch", "lr", "seed", "test"), run, strict=True))
        (tmp_path / f"lstm_{number}_seed.json").write_text(json.dumps(values))
    task, found = tasks.TASKS["lstm"], date.read_results(tmp_path, "lstm")
    rows = date.rows_of(found)
    assert [(row["method"], row["batch"]) for row in rows][:2] == [("baseline", 128), ("date", 8192)]
    assert (rows[0]["mean"], rows[0]["std"]) == (pytest.approx(98.7), pytest.approx(0.2))
    adam = [row for row in rows if row["method"] == "adam"]
    assert [row["mean"] for row in date.curve_of(task, adam)] == [97.5]
    text = date.table_text(task, found)
    assert "98.70 \N{PLUS-MINUS SIGN} 0.20" in text and "98.7" in text.splitlines()[2]
    date.write_figure(tmp_path / "lstm.png", task, found)
    assert (tmp_path / "lstm.png").stat().st_size > 10_000
