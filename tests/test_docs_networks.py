"""docs/networks.md: every network and every count; docs/recipes.md: its examples."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from summit_train.models import VideoNetwork, build_model
from summit_train.models.build import build_network
from summit_train.models.count import count
from summit_train.models.shift import TemporalShift
from summit_train.spec import load_spec
from summit_train.spec.catalog import ARCHITECTURES, BACKBONES
from summit_train.sweep.grid import load_sweep

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/networks.md").read_text(encoding="utf-8")
Row = dict[str, str]


def _tables() -> list[list[Row]]:
    """Return the rows of each table of the page, cells by the column's title."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        title, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        tables.append([dict(zip(title, row, strict=True)) for row in rows])
    return tables


NETWORKS, ON_BACKBONES, NON_LOCAL, TRANSFORMERS = _tables()[:4]


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def _network(arch: str, backbone: str | None, frames: int, non_local: str | None) -> tuple[VideoNetwork, str, str]:
    """Return the network on the meta device, its parameters and its G, as the page writes them."""
    options = {} if non_local is None else {"non_local": non_local}
    with torch.device("meta"):
        network = build_model(arch, backbone, frames, 400, **options)  # type: ignore[arg-type]
        found = count(network, 224)
    return network, f"{found.parameters:,}", f"{found.multiply_adds / 1e9:.2f}"


def _frames(row: Row) -> int:
    return int(re.findall(r"\d+", row["Frames"])[0])


def test_the_page_has_every_network_and_every_backbone() -> None:
    assert sorted(word for row in NETWORKS for word in _words(row["`model.arch`"])) == sorted(ARCHITECTURES)
    assert [word for row in ON_BACKBONES for word in _words(row["`model.backbone`"])] == list(BACKBONES)


@pytest.mark.parametrize("row", NETWORKS, ids=lambda row: row["`model.arch`"])
def test_a_networks_row(row: Row) -> None:
    (arch,) = _words(row["`model.arch`"])
    known = ARCHITECTURES[arch]
    assert _network(arch, None, _frames(row), None)[1:] == (row["Parameters"], row["G"])
    least = re.search(r"at least (\d+)", row["Frames"])
    assert int(least[1] if least else known.frames_step) == known.minimum_frames
    assert known.frames_step == 1 or f"a multiple of {known.frames_step}" in row["Frames"]
    backbones = {"all": 8, "all but MobileNetV2": 7, "with bottlenecks": 5, "its own": 0, "ViT-S, B, L": 3}
    assert backbones.get(row["Backbones"], 1) == len(known.backbones)
    files = _words(row["Read"])
    assert files
    assert [name for name in files if not (ROOT / "summit_train/models" / name).is_file()] == []


@pytest.mark.parametrize("row", ON_BACKBONES, ids=lambda row: row["`model.backbone`"])
def test_a_backbones_row(row: Row) -> None:
    (backbone,) = _words(row["`model.backbone`"])
    network, parameters, multiply_adds = _network("tsm", backbone, 8, None)
    shifts = sum(isinstance(module, TemporalShift) for module in network.modules())
    assert (parameters, multiply_adds, str(shifts)) == (row["Parameters"], row["G"], row["Shifts of TSM"])


@pytest.mark.parametrize("row", NON_LOCAL, ids=lambda row: row["Network"])
def test_a_non_local_row(row: Row) -> None:
    arch, form = _words(row["Network"])
    form = form.removeprefix("non_local: ")
    assert _network(arch, "resnet50", _frames(row), form)[1:] == (row["Parameters"], row["G"])


@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: f"{row['`model.backbone`']} {row['Adapter']}")
def test_a_transformers_row(row: Row) -> None:
    (backbone,), (adapter,) = _words(row["`model.backbone`"]), _words(row["Adapter"])
    with torch.device("meta"):
        found = count(build_model("vit", backbone, _frames(row), 400, adapter=adapter), 224)  # type: ignore[arg-type]
    assert (row["Parameters"], row["G"]) == (f"{found.parameters:,}", f"{found.multiply_adds / 1e9:.2f}")


def test_mobilenets_width_is_torchvisions() -> None:
    """Lin et al.'s rounding gives 5,115,536 parameters at a width of 1.4."""
    with torch.device("meta"):
        network = build_model("tsn", "mobilenet_v2", width=1.4)
    differences = (ROOT / "papers/differences.md").read_text(encoding="utf-8")
    assert f"{sum(parameter.numel() for parameter in network.parameters()):,} here" in differences


def test_your_own_network_of_the_page_has_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm is a stand-in here, as it needs torchvision."""
    page = (ROOT / "docs/own_parts.md").read_text(encoding="utf-8")
    ((code, _), (keys, _)) = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.S | re.M) for kind in ("python", "yaml"))

    def create_model(name: str, num_classes: int, drop_path_rate: float) -> nn.Module:
        assert (name, drop_path_rate) == ("vit_base_patch16_224", 0.1)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(code)
    (tmp_path / "base.yaml").write_text("data: {train: train.csv, val: val.csv}")
    (tmp_path / "mine.yaml").write_text(f"name: mine\nextends: base.yaml\n{keys}")
    spec = load_spec(tmp_path / "mine.yaml")
    assert (spec.data.crop, spec.evaluate.short_side) == (224, 224)
    network = build_network(spec)
    assert network(torch.zeros(2, 8, 3, 224, 224)).shape == (2, 400)


def test_the_examples_of_the_recipes_load(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    mine, rates = re.findall(r"^```yaml\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "mine.yaml").write_text(mine)
    (tmp_path / "lr.yaml").write_text(rates)
    spec, sweep = load_spec(tmp_path / "mine.yaml"), load_sweep(tmp_path / "lr.yaml")
    assert (spec.model.freeze_bn, spec.optimizer.head_lr_factor, spec.model.dropout) == ("all_but_first", 5, 0.8)
    # LR 0.001 at batch 64, 25 epochs.
    assert spec.optimizer.base_lr * 64 / spec.optimizer.base_batch == pytest.approx(0.001)
    assert spec.schedule.epochs == 25
    # A third of it and three times as much, over two seeds.
    factors = {round(run.spec.optimizer.base_lr / spec.optimizer.base_lr, 1) for run in sweep.runs}
    assert factors == {0.3, 1.0, 3.2} and len(sweep.runs) == 6
