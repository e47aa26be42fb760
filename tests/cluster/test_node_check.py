"""The check of the nodes: its judgement on given numbers, its measures, and real ranks, one of them slowed down."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from summit_train.__main__ import main
from summit_train.cli import doctor
from summit_train.cluster import node_check
from summit_train.cluster.node_check import by_node, files_of, nodes_text, pairings, read_rate, slow_nodes
from summit_train.core.comm.launch import this_launch
from summit_train.core.run_folder import CHECK_NODES
from summit_train.data.dataset import Dataset
from summit_train.spec import load_spec
from tests.killing import slowed
from tests.runs import assert_bit_equal, final_state
from tests.worlds import forked, lines, main_without_reports, train

RANKS, SLOW = 3, 1


def test_a_node_is_as_fast_as_its_slowest_rank_and_compared_in_each_measure():
    """n3 has 0.79 of the median of the products; n1 has 0.8 of that of the memory. n2 could not read any data."""
    ranks = [
        ("n1", {"products": 110.0, "memory": 8.0, "data": 4.0}),
        ("n1", {"products": 100.0, "memory": 9.0, "data": 5.0}),
        ("n2", {"products": 100.0, "memory": 10.0}),
        ("n2", {"products": 105.0, "memory": 20.0}),
        ("n3", {"products": 79.0, "memory": 11.0, "data": 1.0, "network": 3.0}),
    ]
    nodes = by_node(ranks)
    assert nodes == {
        "n1": {"products": 100.0, "memory": 8.0, "data": 4.0},
        "n2": {"products": 100.0, "memory": 10.0},
        "n3": {"products": 79.0, "memory": 11.0, "data": 1.0, "network": 3.0},
    }
    found = [(one.node, one.measure, one.rate, one.median, one.nodes) for one in slow_nodes(nodes)]
    assert found == [("n3", "products", 79.0, 100.0, 3), ("n3", "data", 1.0, 2.5, 2)]
    assert [str(one) for one in slow_nodes(nodes)] == [
        "slow in matrix products: 79 multiply-adds/s, 0.79 of the median of 3 nodes, 100 multiply-adds/s",
        "slow in reading the data: 1 B/s, 0.40 of the median of 2 nodes, 2.5 B/s",
    ]
    assert nodes_text({"n1": nodes["n1"], "n2": nodes["n2"]}) == (
        "2 nodes, the median of each one's slowest rank: matrix products 100 multiply-adds/s, copying memory 9 B/s, "
        "reading the data 4 B/s, exchanging with other nodes not measured"
    )


@pytest.mark.parametrize("rates", [[5.0], [5.0, 3.4], [5.0] * 4, [4.0, 5.0, 6.0]])
def test_even_nodes_are_not_slow(rates):
    assert slow_nodes({f"n{number}": {"memory": rate} for number, rate in enumerate(rates)}) == []


def test_of_two_nodes_one_is_slow_below_two_thirds_of_the_other():
    (slow,) = slow_nodes({"n1": {"memory": 6.0}, "n2": {"memory": 3.9}})
    assert (slow.node, slow.median) == ("n2", 4.95)


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [
        ("a", []),
        ("aa", []),
        ("ab", [{0: 1, 1: 0}]),
        ("abc", [{0: 1, 1: 0}, {1: 2, 2: 1}, {2: 0, 0: 2}]),
        ("abcd", [{0: 1, 1: 0, 2: 3, 3: 2}, {1: 2, 2: 1, 3: 0, 0: 3}]),
        ("aabb", [{0: 2, 2: 0, 1: 3, 3: 1}]),
        ("abba", [{0: 1, 1: 0, 3: 2, 2: 3}]),
        ("aab", [{0: 2, 2: 0}]),  # rank 1 has no counterpart
    ],
)
def test_the_nodes_meet_around_a_ring(nodes, rounds):
    assert pairings(nodes) == rounds


@pytest.mark.parametrize("count", range(3, 12))
def test_every_node_meets_two_others_one_at_a_time(count):
    rounds = pairings([str(rank % count) for rank in range(2 * count)])
    assert len(rounds) == 2 + count % 2
    partners = [[of[rank] % count for of in rounds if rank in of] for rank in range(2 * count)]
    assert all(sorted(found) == sorted({(rank - 1) % count, (rank + 1) % count}) for rank, found in enumerate(partners))
    assert all(of[of[rank]] == rank for of in rounds for rank in of)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the module `time`; its `now` is set by hand."""
    hand = SimpleNamespace(now=0.0)
    hand.perf_counter = lambda: hand.now
    monkeypatch.setattr(node_check, "time", hand)
    return hand


@pytest.mark.parametrize(
    ("seconds", "calls", "rate"),
    [
        # A slow first call, and four turns of two calls; the third one is the best.
        ([9.0, 0.2, 0.2, 0.25, 0.125, 0.125, 0.125, 0.5], 8, 2 / 0.25),
        ([3.0, 3.0, 3.0, 3.0], 3, 1 / 3.0),  # no further turn after four seconds
    ],
)
def test_the_best_of_a_few_turns_counts(clock, seconds, calls, rate):
    left = iter(seconds)

    def once() -> None:
        clock.now += next(left)

    assert node_check.best_rate(once, 1.0) == pytest.approx(rate)
    assert len(list(left)) == len(seconds) - calls


def _file(path: Path, size: int) -> tuple[Path, float]:
    path.write_bytes(bytes(size))
    return path, 0.0


def test_too_few_bytes_say_nothing_and_what_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(node_check, "_READ_BYTES", 3000)
    monkeypatch.setattr(node_check, "_BLOCK_BYTES", 1000)
    files = [(tmp_path / "absent", 0.0), _file(tmp_path / "a", 2000)]
    assert read_rate(files) is None
    (rate,) = [read_rate([*files, _file(tmp_path / "b", 1000)])]
    assert rate is not None and rate > 0
    assert read_rate([(_file(tmp_path / "c", 5000)[0], 0.5)]) is None, "the first half is skipped"
    assert read_rate([(tmp_path / "c", 0.0)]) is not None


def test_reading_ends_after_some_turns_or_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(node_check, "_READ_BYTES", 1000)
    monkeypatch.setattr(node_check, "_BLOCK_BYTES", 1000)
    files = [_file(tmp_path / str(number), 3000) for number in range(9)]
    left = iter(files)
    assert read_rate(left) is not None and next(left) == files[2], "four turns of a block"
    monkeypatch.setattr(node_check, "_MOST_S", 1e-9)
    left = iter(files)
    assert read_rate(left) is not None and next(left) == files[1]


def test_the_ranks_read_different_files(write_spec, tmp_path):
    train = Dataset.open(load_spec(write_spec(), []), "train")
    parts = [[path for path, _ in files_of(train, rank, 4)] for rank in range(4)]
    assert [len(part) for part in parts] == [20] * 4 and len({path for part in parts for path in part}) == 80
    assert all(path.is_file() for part in parts for path in part)


def test_ranks_that_share_a_shard_read_different_parts(write_spec, motion_set, tmp_path):
    packed = str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "train.csv"), packed, "--kind", "bytes", "--workers", "0"]) == 0
    train = Dataset.open(load_spec(write_spec(data={"train": packed, "val": packed}), []), "train")
    shard = tmp_path / "packed/000000.tar"
    assert [list(files_of(train, rank, 4)) for rank in range(4)] == [[(shard, rank / 4)] for rank in range(4)]


def _on_nodes(spec: Path) -> int:
    """Train as a rank on a node of its own, which the job asks to check the nodes; rank SLOW is slowed down."""
    node_check._TURNS = 2
    rank = this_launch().rank
    os.environ |= {"SLURMD_NODENAME": f"n{rank}", CHECK_NODES: "1"}
    with slowed() if rank == SLOW else nullcontext():
        return main_without_reports(["train", str(spec)])


SMALL = {"scale": {"gpus": RANKS, "clips_per_gpu": 2}, "schedule": {"epochs": 1}}


def test_a_slow_node_is_left_out_where_the_job_has_spares(write_spec, tmp_path):
    spec, run = write_spec(**SMALL), tmp_path / "runs/run"
    (run / "job").mkdir(parents=True)
    (run / "job/spares").write_text("3 3\n")
    status, output = forked(RANKS, lambda: _on_nodes(spec))
    assert status == 1, output
    named = dict(line.split(" ", 1) for line in (run / "job/bad_nodes").read_text().splitlines())
    assert named[f"n{SLOW}"].startswith("slow in matrix products: "), output
    said = [line for line in lines(output) if "job/bad_nodes now names" in line]
    assert len(said) == 1 and f"n{SLOW}" in said[0] and "takes spare nodes instead" in said[0], output
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.nightly
def test_without_spares_a_slow_node_is_a_warning_and_training_is_the_same(write_spec, tmp_path):
    """Though the job could lose nodes."""
    spec, job = write_spec("checked", **SMALL), tmp_path / "runs/checked/job"
    job.mkdir(parents=True)
    (job / "spares").write_text("0 3\n")
    status, output = forked(RANKS, lambda: _on_nodes(spec))
    assert status == 0, output
    assert f"warning: n{SLOW} is slow in matrix products: " in output
    assert "the job has 0 spare nodes" in output and not (job / "bad_nodes").exists()
    train(RANKS, write_spec("plain", **SMALL))
    assert_bit_equal(final_state(tmp_path / "runs/checked"), final_state(tmp_path / "runs/plain"))


def test_the_doctor_checks_the_nodes_of_its_ranks(tmp_path):
    def work() -> int:
        doctor.examine = lambda *_, **__: iter(())  # type: ignore[assignment]  # the other checks have their own tests
        os.environ["SLURMD_NODENAME"] = f"n{this_launch().rank}"
        return main(["doctor", "--check-nodes", "--run-dir", str(tmp_path)])

    status, output = forked(2, work)
    assert status == 0, output
    (line,) = [line for line in lines(output) if line.split()[1] == "speeds"]
    assert "2 nodes, the median of each one's slowest rank: matrix products " in line
    assert "reading the data not measured" in line and "exchanging with other nodes not" not in line
