"""Every shipped spec is dry-run: it loads, it plans, and it opens with what a reader needs."""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from summit_train.data.video.augment import crop_sizes
from summit_train.models.count import count_network, stream_elements
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.catalog import ARCHITECTURES
from summit_train.spec.model_data import DetectorSpec
from tests.worlds import bench_script

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OTHERS = ("sites", "sweeps", "machines")  # folders whose files are no specs
FILES = [path for path in sorted(CONFIGS.rglob("*.y*ml")) if path.relative_to(CONFIGS).parts[0] not in OTHERS]
# Sets on which the TSM paper's authors train with one recipe, section 5.1.1.
TSM_SETS = ("ucf101", "hmdb51", "something_v1", "something_v2", "jester")


@cache
def specs() -> dict[Path, Spec]:
    """Load every file that has a name of its own; the others are bases, which specs extend."""
    named = [path for path in FILES if re.search(r"^name:", path.read_text(encoding="utf-8"), re.M)]
    return {path: load_spec(path) for path in named}


def _name(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def _opening(path: Path) -> str:
    """The comment lines before the first key."""
    return "\n".join(takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()))


def _network(spec: Spec) -> tuple[str, str | None, str | bool, int]:
    """Return what makes a network and its cost, but for the number of classes."""
    return spec.model.arch, spec.model.backbone, spec.model.non_local, spec.data.num_frames


# Folder -> specs: those of the TSM paper's Tables 2 to 7 (journal version) and what they compare with.
PROMISED = {
    "kinetics": "tsm_r50_8f tsm_r50_8f_1536gpu tsn_r50_8f i3d_3x3x3_r50_16f i3d_3x1x1_r50_32f tsm_mobilenet_v2_8f "
    "tsn_mobilenet_v2_8f tsm_resnext101_8f tsn_resnext101_8f tsm_nl_r50_8f tsn_nl_r50_8f eco_lite_16f "
    "slowfast_r50_4x16 x3d_m ir_csn_152_32f tsm_online_r50_8f",
    "motion": "tsm tsn tsm_online",
    "something_v1": "eco_lite_16f i3d_replace_r50_8f trn_r50_8f tsm_r50_8f tsm_r50_16f tsm_r101_8f tsn_r50_8f",
    "something_v2": "trn_r50_8f tsm_r50_8f tsm_r50_16f tsm_r101_8f tsn_r50_8f",
    "jester": "tsm_mobilenet_v2_8f tsm_online_mobilenet_v2_8f tsm_r50_8f tsn_r50_8f",
    "ucf101": "tsm_r50_8f tsn_r50_8f",
    "hmdb51": "tsm_r50_8f tsn_r50_8f",
    "imagenet_vid": "rfcn_tsm_online_r101 rfcn_tsn_r101",
}


def test_the_promised_specs_are_there() -> None:
    names = set(map(_name, specs()))
    assert names >= {f"{folder}/{name}" for folder, promised in PROMISED.items() for name in promised.split()}
    assert any(name.startswith("weizmann/") for name in names)


def test_each_loads_and_plans_on_every_number_of_ranks() -> None:
    for path, spec in specs().items():
        gpus = spec.scale.gpus
        assert gpus, f"{path}: a shipped spec says how many virtual GPUs it is for"
        batch = gpus * spec.scale.clips_per_gpu
        clips = 240_000 if path.parent.name == "kinetics" else 5 * batch + 1
        plans = {ranks: make_plan(spec, ranks, clips) for ranks in {1, -(-gpus // 3), gpus}}
        for ranks, plan in plans.items():
            assert plan.accumulation - 1 < gpus / ranks <= plan.accumulation, path
            assert plan.global_batch == batch, path
            assert plan.warmup_steps < plan.total_steps, path
        # Warm-up and decay leave a course in between: the LR is as good as gone at the end. FGFA's recipe has no
        # warm-up, and a tenth of the LR at the end.
        is_fgfas = path.parent.name == "imagenet_vid"
        assert (plan.warmup_steps > 0) != is_fgfas, path
        last = plans[gpus].learning_rate(plans[gpus].total_steps - 1)
        assert last <= (0.1 if is_fgfas else 0.01) * plans[gpus].peak_lr, path


def test_imported_data_sets_have_specs_and_labels_with_a_side_are_not_mirrored() -> None:
    flips: dict[str, set[bool]] = {}
    for path, spec in specs().items():
        flips.setdefault(path.parent.name, set()).add(spec.data.flip)
    sides = ("something_v1", "something_v2", "jester")
    others = ("kinetics", "kinetics600", "kinetics700", "ucf101", "hmdb51")
    expected = {name: {False} for name in sides} | {name: {True} for name in others}
    assert {name: flips[name] for name in sides + others} == expected


def test_the_tsm_authors_recipes() -> None:
    """Section 5.1.1 of the TSM paper and its code; UCF101 and HMDB51 are fine-tuned from Kinetics with frozen norms."""
    ours = {path: spec for path, spec in specs().items() if path.parent.name in TSM_SETS}
    assert {path.parent.name for path in ours} == set(TSM_SETS)
    for path, spec in ours.items():
        model, optimizer = spec.model, spec.optimizer
        recipe = (optimizer.base_lr, optimizer.weight_decay, spec.schedule.epochs, model.freeze_bn)
        factor = 1 if model.arch == "trn" else 5
        assert (optimizer.head_lr_factor, optimizer.clip_norm, spec.data.sampling) == (factor, 20, "uniform"), path
        if path.parent.name in ("ucf101", "hmdb51"):
            assert (*recipe, model.dropout) == (0.000125, 5e-4, 25, "all_but_first", 0.8), path
            assert model.pretrained == f"runs/{model.arch}_r50_8f", path
        else:
            dropout = 0.3 if model.arch == "eco_lite" else 0.5
            assert (*recipe, model.dropout) == (0.00125, 1e-4, 50, "none", dropout), path


def test_the_detectors_recipe_is_fgfas() -> None:
    """LR 2.5e-4 on the sum of 4 GPUs, a tenth of it from 1.333 of 2 epochs; the twins differ in the shift."""
    online, twin = (specs()[CONFIGS / f"imagenet_vid/{name}.yaml"] for name in PROMISED["imagenet_vid"].split())
    plan = make_plan(online, 4, 56_000)
    assert plan.global_batch == 4 and plan.steps_per_epoch == 14_000
    assert [plan.learning_rate(step) for step in (0, 18_661, 18_662)] == pytest.approx([4 * 2.5e-4, 1e-3, 1e-4])
    assert online.model.detector == twin.model.detector == DetectorSpec(freeze_stem=True)
    assert count_network(online).multiply_adds == pytest.approx(8 * 168.25e9, rel=1e-4)  # 600 x 1000 pixels
    changed = {"arch": "tsn", "shift_direction": "both"}
    assert online.model.model_copy(update=changed) == twin.model and online.data == twin.data


def test_weights_of_a_run_are_those_of_a_shipped_spec() -> None:
    of_run = {str(spec.run_path): spec for spec in specs().values()}
    started = [spec for spec in of_run.values() if (spec.model.pretrained or "").startswith("runs/")]
    assert len(started) >= 5
    for spec in started:
        source = of_run[str(spec.model.pretrained)]
        assert (source.model.title, source.model.non_local) == (spec.model.title, spec.model.non_local)
        assert source.data.num_frames == spec.data.num_frames


def test_a_spec_of_flow_differs_from_its_rgb_stream_in_the_input() -> None:
    """TSM's code: five fields, crops without the smallest, 5 times the LR in the first layer. AAVG: ten fields."""
    named = {_name(path): spec for path, spec in specs().items()}
    flow = {name for name, spec in named.items() if spec.data.modality == "flow"}
    assert len(flow) == 10 and {name for name in named if "flow" in name} == flow
    for name in flow:
        assert named[name].data.input.channels == (20 if name.startswith("aavg") else 10)
        if name.startswith("something"):
            rgb = named[name.replace("_flow", "")]
            changed = {"modality", "train", "val"}
            assert named[name].data.model_copy(update={key: getattr(rgb.data, key) for key in changed}) == rgb.data
            factor = named[name].optimizer.model_copy(update={"first_lr_factor": 1.0})
            assert factor == rgb.optimizer and named[name].optimizer.first_lr_factor == 5
            assert named[name].model == rgb.model and named[name].scale == rgb.scale
    # AAVG, section II: crops with sides of 256, 224, 192, 168 in a frame of 340 x 256, and 84.5 and 85.0 % on UCF101.
    for data_set in ("ucf101", "hmdb51"):
        for stream in ("rgb", "flow", "flow_transfer"):
            data = named[f"aavg/{data_set}_{stream}"].data
            sizes = crop_sizes(data.crop, 340, 256, data.crop_scales or data.input.crop_scales)
            assert {side for size in sizes for side in size} == {256, 224, 192, 168}
            assert (data.num_frames, data.flow_length if stream != "rgb" else 10) == (1, 10)
    assert named["aavg/ucf101_flow"].model.pretrained == named["aavg/ucf101_rgb"].model.pretrained


def test_every_row_of_the_tsm_papers_tables_that_can_be_trained_has_a_spec() -> None:
    """And the spec quotes its accuracy. Ensembles are left out."""
    paper = bench_script("published_tsm")
    folders = {paper.SOMETHING: "something_v1", paper.KINETICS: "kinetics"}
    of_network = {
        (path.parent.name, *_network(spec)): path
        for path, spec in reversed(specs().items())
        if spec.data.modality == "rgb"
    }
    rows = [
        row for table in paper.TABLES.values() for row in table.rows if row.network and len(row.network.frames) == 1
    ]
    assert len(rows) >= 20
    for row in rows:
        for data_set, top1 in row.top1.items():
            assert row.network is not None
            network = (row.network.arch, row.network.backbone, row.network.non_local or False, row.network.frames[0])
            assert f"{top1:.1f} %" in _opening(of_network[(folders[data_set], *network)]), row.label


@pytest.mark.nightly
def test_numbers_that_specs_quote_are_their_networks() -> None:
    """Those of one network are counted once; published figures are rounded, and not looked at here."""
    quoted: dict[tuple[object, ...], tuple[Path, set[tuple[str, str]]]] = {}
    for path, spec in specs().items():
        numbers = re.search(r"Numbers:\s+([\d,]{9,}) parameters\b.*?([\d.]+) G", _opening(path), re.S)
        if numbers is not None:
            network = (*_network(spec), spec.model.num_classes)
            quoted.setdefault(network, (path, set()))[1].add((numbers[1], numbers[2]))
    assert len(quoted) >= 10
    for path, numbers_there in quoted.values():
        found = count_network(specs()[path])
        assert numbers_there == {(f"{found.parameters:,}", f"{found.multiply_adds / 1e9:.2f}")}


def test_each_opens_with_what_a_reader_needs() -> None:
    for path in specs():
        text = _opening(path)
        assert not re.search(r"@\w+@|TODO|TBD", text), f"{path}: a figure that is still to be filled in"
        assert "%" in text, f"{path}: what accuracy is to be expected?"
        assert re.search(r"\b(node-hours?|hours?|minutes?|min|h)\b", text), f"{path}: what does it cost?"
        assert re.search(rf"summit-train train shipped:{_name(path)}(\s|$)", text), f"{path}: its own command"


def test_online_specs_stream_and_quote_their_caches() -> None:
    online = {path: spec for path, spec in specs().items() if "online" in path.stem}
    assert len(online) == 4
    for path, spec in online.items():
        text = _opening(path)
        assert (spec.model.shift_direction, spec.evaluate.mode) == ("past", "stream")
        quoted = re.search(r"caches ([\d,]+) elements, ([\d.]+) MiB in fp32", text)
        assert quoted is not None or path.parent.name == "motion"
        if quoted is not None:
            elements = stream_elements(spec) or 0
            assert (quoted[1], quoted[2]) == (f"{elements:,}", f"{4 * elements / 2**20:.2f}")


def test_every_architecture_has_a_spec_and_every_spec_a_run_directory() -> None:
    assert {spec.model.arch for spec in specs().values()} == set(ARCHITECTURES)
    assert len({spec.run_path for spec in specs().values()}) == len(specs())


def test_a_base_says_what_it_is_and_is_extended() -> None:
    """A spec extends it, or a preset of a sweep."""
    bases = [path for path in FILES if path not in specs()]
    extended = set()
    for file in [*FILES, *(CONFIGS / "sweeps").glob("*.yaml")]:
        values = yaml.safe_load(file.read_text())
        for section in (values, *values.get("presets", {}).values()):
            own = section.get("extends", [])
            extended |= {(file.parent / base).resolve() for base in ([own] if isinstance(own, str) else own)}
    assert extended >= {path.resolve() for path in bases} and all(map(_opening, bases))
