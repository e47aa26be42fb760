"""The spec: any that can be drawn is dumped and loaded as the same spec."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.spec import Spec, dump_spec, load_spec, spec_from_values
from summit_train.spec.catalog import ARCHITECTURES

# No deadline and no limit on drawing: how fast the machine is, is not the question.
LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Text that may stand in a path: no NUL, no variables, no home.
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$~"), min_size=1, max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..") and name.isprintable()
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Specs of many kinds, each possible."""
    low = draw(st.integers(32, 300))
    epochs = draw(st.integers(1, 300))
    keep = draw(st.integers(1, 9))
    arch = draw(st.sampled_from(list(ARCHITECTURES)))
    return spec_from_values(
        {
            "name": draw(NAMES),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "model": {
                "arch": arch,
                "backbone": draw(st.sampled_from([None, *ARCHITECTURES[arch].backbones])),
                "width": draw(st.floats(0.01, 8)),
                "num_classes": draw(st.integers(1, 1000)),
                "pretrained": draw(st.none() | PATHS),
            },
            "data": {
                "train": draw(PATHS),
                "val": draw(PATHS),
                "root": draw(st.none() | PATHS),
                "num_frames": 8 * draw(st.integers(2, 8)),
                "short_side": [low, low + draw(st.integers(0, 99))],
                "crop": draw(st.integers(1, low)),
                "flip": draw(st.booleans()),
            },
            "scale": {"gpus": draw(st.none() | st.integers(1, 10**6))},
            "optimizer": {
                "base_lr": draw(st.floats(1e-300, 1e300)),
                "name": draw(st.sampled_from(["sgd", "rmsprop", "adagrad", "adam", "lamb"])),
                "momentum": draw(st.none() | st.floats(0, 0.99)),
                "trust_ratio": draw(st.none() | st.builds(dict, kind=st.just("bounded"), upper=st.floats(0.1, 1e3))),
                "clip_norm": draw(st.none() | st.floats(1e-9, 1e9)),
            },
            "schedule": {
                "epochs": epochs,
                "warmup_epochs": draw(st.floats(0, epochs)),
                "decay": draw(st.sampled_from(["cosine", "linear", "none"])),
                "milestones": draw(st.lists(st.floats(0, 300), max_size=3)),
            },
            "precision": draw(st.sampled_from(["fp32", "fp16", "bf16", "fp64"])),
            "evaluate": {
                "crops": draw(st.sampled_from([1, 3, "full"])),
                "last_checkpoints": draw(st.integers(1, keep)),
            },
            "checkpoint": {"keep": keep},
            "run_dir": draw(PATHS),
        },
        "drawn",
    )


@LAWS
@given(specs())
def test_a_dumped_spec_loads_as_the_same_spec(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec(path) == spec
    assert spec_from_values(spec.model_dump(mode="json"), "checkpoint") == spec
