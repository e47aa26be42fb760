"""How latency is measured: who runs when, for how long at most, and what is made of the times."""

from __future__ import annotations

import pytest

from summit_train.bench.latency import LatencyBench, Passes, Rounds, measure_rounds, timed_values


class _Clockwork(LatencyBench):
    """A bench whose passes take `pass_s` seconds of a clock of its own."""

    def __init__(self, pass_s: float, log: list[tuple[float, int, int]]) -> None:
        self._pass_s, self._log = pass_s, log

    def passes(self, clips: int, most: int, seconds: float) -> list[float]:
        taken = max(1, min(most, -int(-seconds // self._pass_s)))
        self._log.append((self._pass_s, clips, taken))
        return [self._pass_s] * taken


def _measured(seconds: float, repeats: int) -> tuple[list[Rounds], list[tuple[float, int, int]]]:
    log: list[tuple[float, int, int]] = []
    found = measure_rounds([_Clockwork(1.0, log), _Clockwork(2.0, log)], 4, Passes(4, 10, repeats, seconds))
    return found, log


def test_every_network_has_its_passes_in_turns() -> None:
    found, log = _measured(seconds=1000, repeats=12)
    assert [[len(turn) for turn in rounds] for rounds in found] == [[3, 3, 2, 2, 2]] * 2
    assert log[:2] == [(1.0, 4, 10), (2.0, 4, 10)]  # warm-up
    # A B, B A, ...; each turn after a pass that is not counted.
    assert [pass_s for pass_s, _, _ in log[2::2]] == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    assert {taken for _, _, taken in log[2::2]} == {1}


def test_few_passes_are_as_many_turns() -> None:
    found, _ = _measured(seconds=1000, repeats=2)
    assert [[len(turn) for turn in rounds] for rounds in found] == [[1, 1]] * 2


def test_a_slow_machine_ends_with_the_same_turns_of_all() -> None:
    found, log = _measured(seconds=0.5, repeats=1000)
    assert found == [[[1.0]], [[2.0]]] and log[:2] == [(1.0, 4, 1), (2.0, 4, 1)]


def test_what_is_made_of_the_times() -> None:
    values = timed_values([[0.2, 0.4, 0.3], [0.1]], [[2.0], [4.0]], [[0.1], [0.2]], batch=8)
    assert (values["median_ms"], values["min_ms"], values["max_ms"]) == pytest.approx((250, 100, 400))
    assert (values["passes"], values["turns"], values["throughput_passes"]) == (4, 2, 2)
    assert values["relative_latency"] == pytest.approx({"min": 0.5, "median": 1.75, "max": 3})
    assert values["clips_per_second"] == 3 and values["clips_per_second_spread"]["max"] == 4
