"""Every shipped spec is dry-run: it loads, it plans, and it opens with what a reader needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from summit_train.plan import make_plan
from summit_train.spec import load_spec

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OTHERS = ("sites", "sweeps", "machines")  # folders whose files are no specs
FILES = [path for path in sorted(CONFIGS.rglob("*.y*ml")) if path.relative_to(CONFIGS).parts[0] not in OTHERS]
# A spec has a name of its own; a base is what specs extend.
SPECS = [path for path in FILES if "name" in yaml.safe_load(path.read_text(encoding="utf-8"))]
BASES = [path for path in FILES if path not in SPECS]

each_spec = pytest.mark.parametrize("path", SPECS, ids=lambda path: str(path.relative_to(CONFIGS)))
each_base = pytest.mark.parametrize("path", BASES, ids=lambda path: str(path.relative_to(CONFIGS)))


def _opening(path: Path) -> list[str]:
    """The comment lines before the first key."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first_key = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return lines[:first_key]


def test_the_promised_specs_are_there() -> None:
    names = {str(path.relative_to(CONFIGS).with_suffix("")) for path in SPECS}
    assert names >= {
        "kinetics/tsm_r50_8f",
        "kinetics/tsm_r50_8f_1536gpu",
        "kinetics/tsn_r50_8f",
        "kinetics/i3d_3x3x3_r50_16f",
        "kinetics/i3d_3x1x1_r50_32f",
        "motion/tsm",
        "motion/tsn",
    }
    assert any(name.startswith("weizmann/") for name in names)


@each_spec
def test_it_loads_and_plans_on_every_number_of_ranks(path: Path) -> None:
    spec = load_spec(path)
    gpus = spec.scale.gpus
    assert gpus, "a shipped spec says how many virtual GPUs it is for"
    batch = gpus * spec.scale.clips_per_gpu
    clips = 240_000 if path.parent.name == "kinetics" else 5 * batch + 1
    divisors = [ranks for ranks in range(1, gpus + 1) if gpus % ranks == 0]
    plans = {ranks: make_plan(spec, ranks, clips) for ranks in {divisors[0], divisors[len(divisors) // 2], gpus}}
    assert gpus in plans
    for ranks, plan in plans.items():
        assert plan.accumulation * ranks == gpus
        assert plan.global_batch == batch
        assert 0 < plan.warmup_steps < plan.total_steps
    # Warm-up and decay leave a course in between: the LR is as good as gone at the end.
    assert plans[gpus].learning_rate(plans[gpus].total_steps - 1) < 0.01 * plans[gpus].peak_lr


def test_every_data_set_that_is_imported_has_a_spec_and_labels_with_a_side_are_not_mirrored() -> None:
    flips = {path.parent.name: load_spec(path).data.flip for path in SPECS}
    sides = ("something_v1", "something_v2", "jester")
    others = ("kinetics", "kinetics600", "kinetics700", "ucf101", "hmdb51")
    assert {name: flips[name] for name in sides + others} == dict.fromkeys(sides, False) | dict.fromkeys(others, True)


@each_spec
def test_it_opens_with_what_a_reader_needs(path: Path) -> None:
    opening = _opening(path)
    assert opening, "a shipped spec opens with its source, the accuracy to expect, the cost and the command"
    text = "\n".join(opening)
    assert not re.search(r"@\w+@|TODO|TBD", text), "a figure that is still to be filled in"
    assert "%" in text, "what accuracy is to be expected?"
    assert re.search(r"\b(node-hours?|hours?|minutes?|min|h)\b", text), "what does it cost?"
    # The command names this very file.
    assert f"{path.relative_to(CONFIGS.parent)}" in text


def test_no_two_specs_write_into_one_run_directory() -> None:
    run_paths = [load_spec(path).run_path for path in SPECS]
    assert len(set(run_paths)) == len(SPECS)


@each_base
def test_a_base_says_what_it_is_and_is_extended(path: Path) -> None:
    assert _opening(path)
    extended = {
        (spec.parent / base).resolve()
        for spec in FILES
        for base in _bases(yaml.safe_load(spec.read_text(encoding="utf-8")).get("extends", []))
    }
    assert path.resolve() in extended


def _bases(extends: str | list[str]) -> list[str]:
    return [extends] if isinstance(extends, str) else extends
