"""Ranks that were started with different specs, lists, code or networks are refused before the first step."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import summit_train
from summit_train.__main__ import main
from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.models import build_model
from summit_train.models.build import build_network
from summit_train.spec import load_spec
from summit_train.training.agreement import check_agreement, code_digest, identity
from summit_train.training.inputs import Inputs, read_inputs
from tests.conftest import WriteSpec
from tests.worlds import Say, forked, lines

HOST = socket.gethostname()
HERE = Path(summit_train.__file__).parent
AGREEMENT = "summit_train.training.agreement"


class _Second(World):
    """Rank 1 of 2, whose rank 0 was started with `first`."""

    rank, size = 1, 2

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__()
        self._first = first

    def broadcast(self, value: Any) -> Any:
        return "rank 0 on node1", str(HERE), self._first

    def together(self, work: Callable[[], Any]) -> Any:
        return work()


@pytest.fixture
def inputs(write_spec: WriteSpec) -> Inputs:
    return read_inputs(load_spec(write_spec()), 1)


def _first_rank(inputs: Inputs) -> dict[str, Any]:
    return identity(inputs.spec, inputs.datasets, build_network(inputs.spec)).values()


def _compare(world: World, inputs: Inputs) -> None:
    check_agreement(world, inputs.spec, inputs.datasets, build_network(inputs.spec))


@pytest.mark.parametrize(
    ("place", "value", "key"),
    [
        ("summit_train.__version__", "0.0.9", "summit_train (version)"),
        ("torch.__version__", "1.0", "torch (version)"),
        (f"{AGREEMENT}.code_digest", lambda package: "abc", "summit_train (digest of the code)"),
        (
            f"{__name__}.build_network",
            lambda spec: build_model("tsn", "resnet18", 2, 4),
            "network (digest of names and shapes)",
        ),
    ],
)
def test_other_code_is_named(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, place: str, value: object, key: str
) -> None:
    world = _Second(_first_rank(inputs))
    _compare(world, inputs)
    monkeypatch.setattr(place, value)
    with pytest.raises(UserError) as caught:
        _compare(world, inputs)
    assert str(caught.value).startswith(f"rank 1 on {HOST} differs from rank 0 on node1: {key} must be '")


def test_one_rank_digests_the_code_of_a_node(inputs: Inputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world, digested = _Second(_first_rank(inputs)), list[Path]()
    monkeypatch.setattr(f"{AGREEMENT}.code_digest", lambda package: digested.append(package) or code_digest(package))
    _compare(world, inputs)
    world.local_rank = 1
    _compare(world, inputs)
    assert digested == [HERE]
    monkeypatch.setattr("summit_train.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(UserError, match=r"differs from rank 0 on node1: summit_train \(digest of the code\) must be"):
        _compare(world, inputs)
    assert digested == [HERE, tmp_path]


def test_a_nodes_own_copy_of_the_data_is_no_difference(inputs: Inputs) -> None:
    data = inputs.spec.data.model_copy(update={"root": "/local/7/videos", "stage": "/local/7"})
    elsewhere = replace(inputs, spec=inputs.spec.model_copy(update={"data": data}))
    _compare(_Second(_first_rank(inputs)), elsewhere)
    assert _first_rank(elsewhere) == _first_rank(inputs)


def test_the_digest_of_the_code_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    (tmp_path / "a/one.pyc").write_text("no source")
    assert code_digest(tmp_path) == first
    (tmp_path / "a/one.py").write_text("x = 2\n")
    second = code_digest(tmp_path)
    (tmp_path / "a/one.py").rename(tmp_path / "a/two.py")
    assert len({first, second, code_digest(tmp_path)}) == 3


def test_a_rank_that_hangs_while_it_is_compared_is_watched(
    write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    def compare(*arguments: object, **others: object) -> None:
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
        raise UserError("compared")

    monkeypatch.setattr("summit_train.training.start.check_agreement", compare)
    status, _, said = say("train", write_spec())
    assert status == 2 and "compared" in said, said


def _refused(ranks: int, words: Sequence[str], more: Sequence[str] = ()) -> str:
    """The output of `summit-train ...`, refused on ranks of which the last one is started with more words."""
    status, output = forked(ranks, lambda: main([*words, *(more if this_launch().rank == ranks - 1 else [])]))
    assert status == 2 and "Traceback" not in output, output
    return output


@pytest.mark.parametrize(
    ("ranks", "key", "first", "other"),
    [
        (2, "optimizer.base_lr", "0.005", "0.006"),
        (2, "parallel.method", "'synchronous'", "'averaging'"),
        (3, "schedule.epochs", "2", "3"),
    ],
)
def test_a_rank_with_another_spec_is_named(write_spec: WriteSpec, ranks: int, key: str, first: str, other: str) -> None:
    words = ("train", str(write_spec(scale={"gpus": 6, "clips_per_gpu": 2})))
    output = _refused(ranks, words, [f"{key}={other.strip(chr(39))}"])
    (line,) = (line for line in lines(output) if line.startswith("summit-train"))
    differs = f"rank {ranks - 1} on {HOST} differs from rank 0 on {HOST}: {key} must be {first}, got {other}"
    assert line == f"summit-train: {differs}; start all ranks with the same spec, lists and code"


def test_a_rank_with_a_reversed_list_is_named(write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    rows = (motion_set / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
    (tmp_path / "classes.txt").write_text((motion_set / "classes.txt").read_text())
    words = ("train", str(write_spec()), f"data.root={motion_set}")
    output = _refused(2, words, [f"data.train={tmp_path / 'train.csv'}"])
    assert f"rank 1 on {HOST} differs from rank 0 on {HOST}: data.train (fingerprint) must be '" in output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["evaluate.clips=2"], "evaluate.clips must be 1, got 2"),
        (["--observed", "0.5"], "command must be 'eval', got 'eval --observed'"),
    ],
)
def test_evaluating_ranks_are_compared_too(trained_run: Path, more: list[str], said: str) -> None:
    assert said in _refused(2, ["eval", str(trained_run)], more)


def test_a_rank_whose_own_decay_gives_other_rates_is_named(write_spec: WriteSpec, tmp_path: Path) -> None:
    imports = "from summit_train.core.comm.launch import this_launch\n"
    (tmp_path / "decay.py").write_text(f"{imports}def by_rank(*place): return 1 + this_launch().rank\n")
    output = _refused(2, ["train", str(write_spec(schedule={"decay": f"{tmp_path}/decay.py:by_rank"}))])
    assert f"rank 1 on {HOST} differs from rank 0 on {HOST}: schedule.decay (digest of its LRs) must be '" in output
