"""bench/mmaction2.py, with a stand-in for the other environment: what each side is given, and the ratios."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.worlds import bench_script

MMACTION2 = bench_script("mmaction2")
STAND_IN = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "-c":
    sys.exit(print({{}}))
job = json.loads(sys.argv[-1])
folder = pathlib.Path(job["files"]).parent
with open({seen!r}, "a") as seen:
    pictures = len(list((folder / "pictures").glob("img_*.jpg")))
    seen.write(json.dumps([sys.argv[1:-1], job, (folder / "list.txt").read_text(), pictures]) + "\\n")
print(json.dumps({{"seconds": [9.0] * 3 + [4.0 if job["channels_last"] else 6.0] * 2}}))
"""


@pytest.mark.nightly
def test_both_sides_have_equal_clips_and_the_ratio_is_theirs_over_ours(
    motion_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video = motion_set / "videos" / "train_000000.mp4"
    peer, seen = tmp_path / "python", tmp_path / "seen"
    peer.write_text(STAND_IN.format(python=sys.executable, seen=str(seen)))
    peer.chmod(0o755)
    honest, trained = MMACTION2.subprocess.run, []

    def run(command: list[str], **how: Any) -> Any:
        if "data" in command:  # in this process, as importing torch takes longer
            with redirect_stdout(StringIO()):
                return subprocess.CompletedProcess(command, main(command[command.index("data") :]))
        if "train" not in command:
            return honest(command, **how)
        spec = load_spec(command[command.index("train") + 1], command[command.index("train") + 2 :])
        store = open_store(spec.data, read_manifest(spec.data.train))
        trained.append((type(store).__name__, make_plan(spec, 1, len(store.manifest)).total_steps))
        steps = [{"kind": "step", "step_s": seconds} for seconds in (9.0, 9.0, 9.0, 9.0, 2.0, 2.0)]
        spec.run_path.mkdir()
        (spec.run_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"kind": "start"}, *steps])))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(MMACTION2.subprocess, "run", run)
    words = "--precisions fp32 --ranks 1 --clips 2 --steps 6 --repeats 1 --crop 32 --json"
    monkeypatch.setattr(sys, "argv", ["mmaction2.py", str(peer), str(video), *words.split()])
    assert MMACTION2.main() == 0
    raw, packed = json.loads(capsys.readouterr().out)["rows"]
    assert trained == [("FileStore", 6), ("ShardStore", 6)]
    for row, kind in ((raw, "raw"), (packed, "packed")):
        assert (row["kind"], row["precision"], row["ranks"]) == (kind, "fp32", 1)
        assert row["step_s"]["here"]["median"] == 2.0
        assert [ratio["median"] for ratio in row["ratios"].values()] == [3.0, 2.0]
    asked = [json.loads(line) for line in seen.read_text().splitlines()]
    for start, job, listed, pictures in asked:
        assert start == [str(MMACTION2.PEER)] and (job["ranks"], job["clips"], job["crop"]) == (1, 2, 32)
        lines = listed.splitlines()
        assert len(lines) == 12 and [line.rsplit(maxsplit=1)[1] for line in lines] == [str(n) for n in range(12)]
        source = video if not job["is_pictures"] else f"{Path(job['files']).parent / 'pictures'} 8"
        assert lines[0] == f"{source} 0" and pictures == (8 if job["is_pictures"] else 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--steps 5", "--steps must be at least 6, got 5"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--ranks 1 0", "--ranks must be at least 1, got 0"),
        ("", "a.mp4: no such file"),
    ],
)
def test_wrong_options_are_refused_first(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mmaction2.py", "no_python", "a.mp4", *words.split()])
    with pytest.raises(UserError, match=said):
        MMACTION2.main()
