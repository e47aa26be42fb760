"""`summit-train model SPEC`: what the network of a spec costs (the paper's Tables 1 and 2)."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from summit_train.spec import Spec, load_spec

if TYPE_CHECKING:
    from summit_train.models.profile import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments: SPEC [--json] [key=value ...]."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model.backbone=resnet18")


def run(args: argparse.Namespace) -> int:
    """Print the profile of the spec's network on one training clip; ValueError for a wrong spec."""
    spec = load_spec(args.spec, args.overrides)
    profile = _profile(spec)
    print(json.dumps(profile.as_dict()) if args.json else _table(spec, profile))
    return 0


def _profile(spec: Spec) -> Profile:
    # Here and not above: the other commands' help must not wait for torch.
    import torch

    from summit_train.models.profile import profile_model
    from summit_train.training.network import build_network

    with torch.device("meta"):
        model = build_network(spec)
    return profile_model(model, spec.data.crop)


def _table(spec: Spec, profile: Profile) -> str:
    frames, height, width = profile.clip
    rows = {
        "network": f"{spec.model.arch}, {spec.model.backbone}, {spec.model.num_classes} classes",
        "input": f"{frames} x 3 x {height} x {width} ({profile.input_bytes:,} bytes as uint8)",
        "parameters": f"{profile.parameters:,}",
        "gradients": f"{profile.gradient_bytes:,} bytes a step in fp32",
        "multiply-adds": f"{profile.multiply_adds:,} ({profile.multiply_adds / 1e9:.2f} G) a clip, forward",
        "compute/IO": f"{profile.compute_io:,.0f} multiply-adds an input element",
        "T per stage": ", ".join(f"{stage} {length}" for stage, length in profile.stages.items()),
    }
    return "\n".join(f"{name:<15}{text}" for name, text in rows.items())
