"""Signals and stalls, in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest

from summit_train.training.watch import StopRequest
from tests.worlds import run

_STALL = """
import sys, time
from summit_train.training.watch import Watchdog
waits = sys.argv[1] == "waits"
began = time.monotonic()
with Watchdog("rank 3 on node7", 1.0, lambda: print("ending all", time.monotonic() - began, flush=True)) as watchdog:
    watchdog.at("in step 1")
    time.sleep(0.5)
    watchdog.at("loading the clips of step 2", waits=waits)
    time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["alone", "waits"])
def test_a_rank_that_stalls_says_where_and_ends_all(mode: str) -> None:
    status, output = run(0, "-c", _STALL, mode, timeout=30)
    assert status == 1
    assert "rank 3 on node7: no progress for" in output and "while loading the clips of step 2" in output
    assert 'File "<string>", line 10 in <module>' in output  # where every thread stood
    assert float(output.partition("ending all ")[2].split()[0]) > (1.5 if mode == "alone" else 2.0)


def test_a_rank_that_goes_on_is_left_alone() -> None:
    program = """
import time
from summit_train.training.watch import Watchdog
with Watchdog("rank 0", 1.0, lambda: print("ended")) as watchdog:
    for step in range(8):
        watchdog.at(f"in step {step}")
        time.sleep(0.25)
with Watchdog("rank 0", None, lambda: print("ended")):
    time.sleep(0.1)
"""
    assert run(0, "-c", program, timeout=30) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_is_a_request_within_the_block_only(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopRequest().listening() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number.name
    assert signal.getsignal(number) is former


def test_a_process_that_leaves_on_request_is_not_ended_by_another_signal() -> None:
    """Not even when Python has taken down its own handlers, at the very end."""
    program = """
import atexit, os, signal, sys
from summit_train.training.watch import StopRequest
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
with StopRequest().listening() as stop:
    stop.leave()
os.kill(os.getpid(), signal.SIGUSR2)
sys.exit(85)
"""
    assert run(0, "-c", program, timeout=30) == (85, "")
