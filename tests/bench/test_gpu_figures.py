"""bench/gpu/figures.py draws every row and ratio of its JSON files, whole ones and those of a part that was cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.worlds import bench_script

figures = bench_script("gpu/figures")

MACHINE = {"hosts": {"made_up": 1}, "processor": "made up", "cores": 16, "threads_per_rank": 1, "torch": "2.11"}
MACHINE |= {"device": "a made-up GPU", "ranks": 1}


def row(
    network: str, precision: str, rate: float, execution: str = "accelerated", mode: str = "train"
) -> dict[str, Any]:
    """A row with made-up figures."""
    rates = {"min": 0.95 * rate, "median": rate, "max": 1.02 * rate}
    use = {"min": 0.3, "median": 0.35, "max": 0.36}
    names = {"network": network, "mode": mode, "precision": precision, "execution": execution}
    return names | {"batch": figures.SHOWN[mode], "clips_per_second": rates, "utilisation": use}


def made_up_speed() -> dict[str, Any]:
    """All networks in all precisions, TSM in all executions, in both modes."""
    rows, rates = [], {"fp32": 40.0, "tf32": 90.0, "fp16": 180.0, "bf16": 175.0}
    for mode, more in (("train", 1), ("inference", 3)):
        for precision, rate in rates.items():
            for number, network in enumerate(("tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1")):
                rows.append(row(network, precision, more * rate * (1 - 0.1 * number), mode=mode))
        rows += [row("tsm", "bf16", more * (140 + 10 * i), one, mode) for i, one in enumerate(figures.EXECUTIONS[1:])]
    rows.append(row("images", "bf16", 181))
    name = "train bf16 batch 16: seconds of tsm {} / tsm accelerated"
    spread, of = {"min": 1.01, "median": 1.023, "max": 1.04}, {"network": "tsm"}
    ratios = [{"name": name.format(one), "of": of, "ratio": spread} for one in figures.EXECUTIONS[1:] * 4]
    peaks = dict.fromkeys(figures.PRECISIONS, 3e14)
    return {"rows": rows, "ratios": ratios, "peaks": peaks, "images": "torchvision", "environment": MACHINE}


def made_up_kernels() -> dict[str, Any]:
    """Shares of six groups and fifteen kernels with the long names that templates have."""
    groups = [
        {"group": group, "share": share, "seconds": share * 0.09}
        for group, share in (
            ("convolution", 0.5),
            ("normalisation", 0.25),
            ("elementwise and sums", 0.15),
            ("other", 0.1),
        )
    ]
    name = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<$x_{}$>(TensorIterator&)>"
    top = [groups[i % 4] | {"name": name.format(i), "share": 0.2 / (i + 1), "calls": 3.0} for i in range(15)]
    copies = {"share": 0.011, "exposed_share": 0.011}
    values = {"groups": groups, "top": top, "copies": copies, "busy": 0.982, "step_s": 0.091}
    return values | {"row": "train tsm bf16 batch 16 accelerated", "skipped": {}, "environment": MACHINE}


def test_the_figures_are_drawn_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["figures.py", "--out", str(tmp_path / "out")]
    for name, values in (("speed", made_up_speed()), ("kernels", made_up_kernels())):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
        words += [f"--{name}", str(tmp_path / f"{name}.json")]
    monkeypatch.setattr("sys.argv", words)
    assert figures.main() == 0
    for name in ("speed", "kernels"):
        with Image.open(tmp_path / "out" / f"{name}.png") as picture:
            assert picture.width > 1900 and len(set(picture.convert("L").resize((200, 100)).tobytes())) > 20


def test_a_part_that_was_cut_off_has_a_figure_too(tmp_path: Path) -> None:
    values = made_up_speed() | {"rows": [], "ratios": []}
    figures.draw_speed(tmp_path / "empty.png", values)
    figures.draw_speed(tmp_path / "one.png", values | {"rows": [row("tsm", "bf16", 100)]})
    assert (tmp_path / "empty.png").exists() and (tmp_path / "one.png").exists()


def test_a_panel_has_each_row_once_and_one_batch() -> None:
    values = made_up_speed()
    again, other = values["rows"][0] | {"again": True}, values["rows"][0] | {"batch": 32}
    values["rows"] += [again, other]
    shown = figures.rows_of(values, "train")
    assert len(shown) == 4 * 4 + 5 + 1 and again not in shown and other not in shown
    lines = figures.ratio_lines(values["ratios"])
    assert len(lines) == 17 and lines[-1] == "and 4 more in the JSON file"
    assert lines[0].startswith("1.023 (1.010 .. 1.040)")
