"""A short soak: a run that is killed and poisoned with NaN ends in the bits of one without faults."""

from __future__ import annotations

import json

import pytest

from tests.worlds import PATIENCE_S, lines, run


@pytest.mark.nightly
def test_a_kill_and_a_nan_on_two_ranks_leave_no_trace():
    often = ["--steps", "80", "--every", "0.1", "--checkpoint-s", "0.5", "--stall-s", str(PATIENCE_S)]
    few = ["--kinds", "kill,NaN", "--faults", "2", "--ranks", "2", "--comm", "torch"]
    status, output = run(0, "-m", "tests.soak", *often, *few, "--json")
    assert status == 0, output
    found = json.loads(lines(output)[-1])
    assert {fault["kind"] for fault in found["faults"]} == {"kill", "NaN"}
    assert all(fault["status"] not in (None, 0) for fault in found["faults"])
    assert all(fault["named"] for fault in found["faults"] if fault["kind"] == "NaN")
    assert (found["runs"], found["equal"], found["starts"], found["left"]) == (1, 1, 3, [])
