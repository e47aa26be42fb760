"""A small storm of kills: three ranks, of which one is killed, end bit-equal."""

from __future__ import annotations

import json

from tests.worlds import ROOT, lines, run


def test_a_kill_on_three_ranks_leaves_no_trace() -> None:
    status, output = run(0, str(ROOT / "bench" / "storm.py"), "--kills", "1", "--comm", "torch", "--json")
    assert status == 0, output
    found = json.loads(lines(output)[-1])
    assert (found["ranks"], found["comm"], found["kills"]) == (3, "torch", 1)
    assert found["equal"] == found["runs"] >= 1
