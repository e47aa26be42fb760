"""`summit-train bench loader SPEC`: clips a second of the loader, where the time goes, the cores that a GPU needs."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from summit_train.cluster.estimate import estimate
from summit_train.cluster.site import Site, load_site
from summit_train.commands.bench.arguments import as_spread, table
from summit_train.commands.data.progress import num_cpus
from summit_train.commands.start import manifest_of
from summit_train.data.manifest import read_manifest
from summit_train.plan import make_plan
from summit_train.scaling.loader import Subject, measure, sampled, subject_of, verdict
from summit_train.scaling.measure import MeasureError, positive
from summit_train.spec import Spec, load_spec

_CLIPS, _REPEATS = 16, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")
    parser.add_argument(
        "--packed", action="append", default=[], metavar="FOLDER", help="a packed set to measure [a sample is packed]"
    )
    parser.add_argument("--clips", type=int, default=_CLIPS, metavar="N", help=f"clips of a turn [{_CLIPS}]")
    parser.add_argument("--repeats", type=int, default=_REPEATS, metavar="N", help=f"measured turns [{_REPEATS}]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of `in all` [one a CPU]")
    demand = parser.add_mutually_exclusive_group()
    demand.add_argument("--step-ms", type=float, metavar="X", help="a GPU's step of clips_per_gpu clips takes X ms")
    demand.add_argument("--speed", type=float, metavar="X", help="a GPU trains on X clips/s [the site's figure]")
    parser.add_argument("--site", metavar="NAME", help="site (name or YAML file): its cores, its GPUs' speed")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a wrong spec or option, and for a clip that cannot be read."""
    for option in ("clips", "repeats"):
        positive(getattr(args, option), f"--{option}")
    workers = num_cpus() if args.workers is None else positive(args.workers, "--workers")
    spec = load_spec(args.spec, args.overrides)
    site = None if args.site is None else load_site(args.site)
    speed, source = gpu_speed(spec, site, args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kinds = measure(_subjects(spec, args, Path(folder)), args.clips, workers, args.repeats)
    for kind in kinds:
        core = kind["clips_per_second_core"]["median"]
        cores = None if site is None else site.cores_per_rank
        kind["verdict"] = None if speed is None else verdict(core, speed, cores).values()
    values = {
        "bench": "loader",
        "settings": {"clips": args.clips, "repeats": args.repeats, "workers": workers, "cores": num_cpus()},
        "gpu": {"clips_per_second": speed, "source": source, "site": None if site is None else site.name},
        "kinds": kinds,
    }
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def gpu_speed(spec: Spec, site: Site | None, args: argparse.Namespace) -> tuple[float | None, str | None]:
    """Clips a second that a GPU trains on, and who says so; None where nobody does. Raises MeasureError."""
    for option, value in (("--step-ms", args.step_ms), ("--speed", args.speed)):
        if value is not None and not 0 < value < float("inf"):
            raise MeasureError(f"{option} {value:g}: a number above 0 is wanted")
    if args.step_ms is not None:
        return 1000 * spec.scale.clips_per_gpu / args.step_ms, "--step-ms"
    if args.speed is not None:
        return args.speed, "--speed"
    if site is None:
        return None, None
    batch = (spec.scale.gpus or site.ranks) * spec.scale.clips_per_gpu
    found = estimate(site, spec, make_plan(spec, site.ranks, batch), 1)
    return found.clips_per_second, found.source


def _subjects(spec: Spec, args: argparse.Namespace, folder: Path) -> list[Subject]:
    """What is measured: the spec's clips as they lie, and packed."""
    own = subject_of(spec.data, manifest_of(spec, "train"), spec.seed)
    given = [subject_of(spec.data, read_manifest(path), spec.seed) for path in args.packed]
    subjects = [own, *given] if given or own.name != "raw" else list(sampled(own, args.clips, folder))
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise MeasureError(f"{', '.join(names)}: of each kind one set is wanted")
    return subjects


def as_text(values: dict[str, Any]) -> str:
    """What was measured, for people."""
    settings, kinds = values["settings"], values["kinds"]
    turns = f"{settings['clips']} clips a turn, {settings['repeats']} turns, median (min .. max)"
    rows = [("clips/s", "one core", f"{settings['workers']} workers")]
    rows += [(k["kind"], *(as_spread(k[f"clips_per_second_{of}"], ".1f") for of in ("core", "all"))) for k in kinds]
    stages = [("ms of a clip", *kinds[0]["stages_ms"], "sum")]
    stages += [(k["kind"], *(f"{ms:.2f}" for ms in (*k["stages_ms"].values(), k["profiled_ms"]))) for k in kinds]
    lines = [
        f"{turns}; cores here: {settings['cores']}",
        table(rows),
        "",
        table(stages),
        "",
        *_verdicts(values),
    ]
    return "\n".join(lines)


def _verdicts(values: dict[str, Any]) -> list[str]:
    gpu = values["gpu"]
    if gpu["clips_per_second"] is None:
        return ["how many cores a GPU needs: say by --step-ms or --speed what a GPU takes, or by --site where it is"]
    lines = [f"a GPU takes {gpu['clips_per_second']:.4g} clips/s ({gpu['source']})"]
    for kind in values["kinds"]:
        found = kind["verdict"]
        needed = found["cores_per_gpu"]
        line = f"{kind['kind']}: {needed} core{'s' if needed != 1 else ''} a GPU for the loader"
        if found["cores_there"] is not None:
            word = "keeps up" if found["keeps_up"] else "THE GPU WAITS"
            line += f"; {gpu['site']} has {found['cores_there']} beside the training process: {word}"
        lines.append(line)
    return lines
