"""What the scripts of papers/ make without measuring, compared whole with a golden file, and what they refuse.

After a change that is meant to change one, write the file again, and read each line of the difference:
    python -m tests.papers.test_golden_papers
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from summit_train.counts import count_network
from summit_train.spec import dump_spec
from tests.conftest import WriteSpec
from tests.detectors import detector_spec
from tests.page_values import check_golden, write_golden
from tests.papers.test_date import write_mnist
from tests.worlds import ROOT, bench_script

date, figure3, figure4, figure6, fit_summit, latency = (
    bench_script(name) for name in ("date", "figure3", "figure4", "figure6", "fit_summit", "latency")
)
GOLDEN = ROOT / "tests/golden/papers.txt"
PAPER = "shipped:kinetics/tsm_r50_8f_1536gpu --clips 240000 --machine"
SCRIPTS = (
    *((latency, f"--table {number} --published --out out.svg") for number in (2, 3, 5, 6)),
    (figure4, "shipped:sweeps/table3 --out out.svg"),
    (figure6, f"{PAPER} summit --out out.svg"),
    (figure6, f"{PAPER} summit model.arch=tsn --nodes 8"),
    (figure6, f"{PAPER} ib_cluster --nodes 8 --json"),
    (fit_summit, ""),
)


COSTS = ("multiply_adds", "parameters")
# The rows of a table by name: family and data set, the published cost, and the counted one.
ROWS = {
    "printed": ("TSM", "Kinetics", (5e9, 3e6), (4e9, 2e6)),
    "counted": ("TSM", "Kinetics", (None, None), (4e9, 2e6)),
    "without a size": ("ECO", "Kinetics", (6e9, None), (None, None)),
    "without a cost": ("TSM", "Kinetics", (None, None), (None, None)),
    "another set": ("TSM", "Jester", (None, None), (4e9, 2e6)),
}


def table_of_rows() -> dict[str, Any]:
    rows = []
    for label, (family, data_set, published, counted) in ROWS.items():
        paper = {"family": family, "top1": {data_set: 70.0}, "clips": 10} | dict(zip(COSTS, published, strict=True))
        rows.append({"label": label, "published": paper} | dict(zip(COSTS, counted, strict=True)))
    table = {"number": 3, "title": "a table", "setting": "ten clips"}
    return {"rows": rows, "data_sets": ["Kinetics"], "overrides": ["a=b"], "table": table}


def one_done(*args: Any) -> dict[str, Any]:
    """The values of a sweep, of which one run is done, and one that trains has validated."""
    values: dict[str, Any] = AS_VALUES(*args)
    values["runs"][6] |= {"state": "done", "top1": 73.5, "top1_std": 0.25}
    values["runs"][7] |= {"state": "running", "top1": 12.5}
    return values


AS_VALUES = figure4.as_values


def golden_lines() -> Iterator[str]:
    """Yield the lines of the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure4, "as_values", one_done)
        patch.setattr(latency, "count_network", count_network)  # which keeps its counts
        for script, words in SCRIPTS:
            yield f"==== {script.__name__}.py {words}"
            patch.setattr("sys.argv", [script.__name__, *shlex.split(words)])
            with redirect_stdout(StringIO()) as out:
                assert script.main() == 0
            yield from out.getvalue().splitlines()
            if "--out" in words:
                yield from Path("out.svg").read_text(encoding="utf-8").splitlines()
    yield "==== a table with rows that lack a cost"
    latency.draw(Path("rows.svg"), table_of_rows())
    yield from Path("rows.svg").read_text(encoding="utf-8").splitlines()


def test_the_papers_tables_are_those_of_the_golden_file() -> None:
    check_golden(GOLDEN, golden_lines)


REFUSED = [
    (figure3, "table1 --specs SPEC --out table.txt", "--out table.txt: the name of a figure ends in"),
    (figure3, "table1 --specs SPEC --out /dev/null/a.png", "--out /dev/null/a.png: cannot be written: Not a directory"),
    (figure3, "table1 --specs SPEC --batch 0", "--batch must be above 0"),
    (figure3, "b --specs SPEC --frames-per-second -1", "--frames-per-second must be above 0"),
    (figure3, "c --specs SPEC --ranks 2", "two or more numbers"),
    (figure4, "shipped:sweeps/table3 --out a.jpg", "ends in .png"),
    (figure6, f"{PAPER} summit --nodes 8192 --out a.jpg", "ends in .png, .svg, .pdf"),
    (figure6, f"{PAPER} summit --nodes 8192 --out /dev/null/a.png", "cannot be written"),
    (latency, "", "give one SPEC or more, or --table with one of 2, 3, 5, 6"),
    (latency, "a.yaml --table 2", "give one SPEC or more, or --table"),
    (latency, "a.yaml --out a.png", "--published and --out are for a table of the paper: add --table"),
    (latency, "--table 2 --out a.gif", "the name of a figure ends in"),
    (latency, "--table 2 --precision fp8", "precision"),
    (latency, "--table 2 --batch 0", "--batch must be above 0"),
    (latency, "SPEC DETECTOR", "the SPECs must be of one task, got classification and detection"),
    (date, "lenet --batches 8192", "--batches: 256 is more than the 64 training samples"),
    (date, "lenet --methods date --batches 9 --samples 4", "--samples: a batch of 9 makes 2 virtual"),
    (date, "lenet --methods date --batches 64 --bounds 2 1", "--bounds LOWER must be at most"),
    (date, "lenet --methods date --batches 64 0", "--batches must be above 0, got [64, 0]"),
    (date, "lenet --methods date --batches 64 --lrs nan", "--lrs must be above 0"),
    (date, "lenet --methods date --batches 64 --epochs 0", "--epochs must be above 0, got 0"),
    (date, "lenet --methods date --batches 64 --out SPEC", "cannot be written: Not a directory"),
    (date, "ptb", "/ptb.train.txt not found, nor ptb.train.txt.gz"),
]


@pytest.mark.parametrize(("script", "words", "message"), REFUSED)
def test_mistakes_are_one_line(
    script: ModuleType,
    words: str,
    message: str,
    write_spec: WriteSpec,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    spec = str(write_spec(data={"train": "missing.csv"}))
    (tmp_path / "detector.yaml").write_text(dump_spec(detector_spec()))
    places = {"SPEC": spec, "DETECTOR": str(tmp_path / "detector.yaml")}
    data = ["--data", str(write_mnist(tmp_path / "mnist")), "--out", str(tmp_path / "out")] if script is date else []
    assert script.main([*data, *(places.get(word, word) for word in words.split())]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


if __name__ == "__main__":
    write_golden(GOLDEN, golden_lines)
