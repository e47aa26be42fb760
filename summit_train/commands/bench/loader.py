"""`summit-train bench loader SPEC`: clips a second of the loader, where the time goes, the cores that a GPU needs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from summit_train.cluster.estimate import estimate
from summit_train.cluster.site import Site, load_site
from summit_train.commands.bench import arguments
from summit_train.commands.bench.arguments import Values
from summit_train.commands.data.ranks import num_cpus
from summit_train.commands.start import manifest_of
from summit_train.data.manifest import read_manifest
from summit_train.plan import make_plan
from summit_train.scaling.loader import Subject, measure, sampled, subject_of, verdict
from summit_train.scaling.measure import MeasureError, spread_text
from summit_train.spec import Spec, load_spec
from summit_train.text import counted, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_spec(parser)
    parser.add_argument(
        "--packed", action="append", default=[], metavar="FOLDER", help="a packed set to measure [a sample is packed]"
    )
    parser.add_argument("--clips", type=int, default=16, metavar="N", help="clips of a turn [16]")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measured turns [5]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of `in all` [one a CPU]")
    demand = parser.add_mutually_exclusive_group()
    demand.add_argument("--step-ms", type=float, metavar="X", help="a GPU's step of clips_per_gpu clips takes X ms")
    demand.add_argument("--speed", type=float, metavar="X", help="a GPU trains on X clips/s [the site's figure]")
    parser.add_argument("--site", metavar="NAME", help="site (name or YAML file): its cores, its GPUs' speed")
    arguments.add_output(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises UserError for a wrong spec or option, and for a clip that cannot be read."""
    return arguments.show(args, _measure, as_text)


def _measure(args: argparse.Namespace) -> Values:
    clips, repeats, workers = args.clips, args.repeats, args.workers or num_cpus()
    spec = load_spec(args.spec, args.overrides)
    site = None if args.site is None else load_site(args.site)
    speed, source = gpu_speed(spec, site, args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kinds = measure(_subjects(spec, args, Path(folder)), clips, workers, repeats)
    for kind in kinds:
        core = kind["clips_per_second_core"]["median"]
        cores = None if site is None else site.cores_per_rank
        kind["verdict"] = None if speed is None else verdict(core, speed, cores)
    return {
        "bench": "loader",
        "settings": {"clips": clips, "repeats": repeats, "workers": workers, "cores": num_cpus()},
        "gpu": {"clips_per_second": speed, "source": source, "site": None if site is None else site.name},
        "kinds": kinds,
    }


def gpu_speed(spec: Spec, site: Site | None, args: argparse.Namespace) -> tuple[float | None, str | None]:
    """Return the clips/s that a GPU trains on and where the figure is from, or None twice."""
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
    """Return what is measured: the spec's clips as they are, and packed."""
    own = subject_of(spec.data, manifest_of(spec, "train"), spec.seed)
    given = [subject_of(spec.data, read_manifest(path), spec.seed) for path in args.packed]
    subjects = [own, *given] if given or own.name != "raw" else list(sampled(own, args.clips, folder))
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise MeasureError(f"{', '.join(names)}: of each kind one set is wanted")
    return subjects


def as_text(values: Values) -> str:
    """Return what was measured, for people."""
    settings, kinds = values["settings"], values["kinds"]
    turns = f"{settings['clips']} clips a turn, {settings['repeats']} turns, median (min .. max)"
    rows = [("clips/s", "one core", f"{settings['workers']} workers")]
    rows += [(k["kind"], *(spread_text(k[f"clips_per_second_{of}"], ".1f") for of in ("core", "all"))) for k in kinds]
    stages = [("ms of a clip", *kinds[0]["stages_ms"], "sum")]
    stages += [(k["kind"], *(f"{ms:.2f}" for ms in (*k["stages_ms"].values(), k["profiled_ms"]))) for k in kinds]
    tables = f"{table(rows)}\n\n{table(stages)}\n"
    return "\n".join([f"{turns}; cores here: {settings['cores']}", tables, *_verdicts(values)])


def _verdicts(values: Values) -> list[str]:
    gpu = values["gpu"]
    if gpu["clips_per_second"] is None:
        return ["how many cores a GPU needs: say by --step-ms or --speed what a GPU takes, or by --site where it is"]
    lines = [f"a GPU takes {gpu['clips_per_second']:.4g} clips/s ({gpu['source']})"]
    for kind in values["kinds"]:
        found = kind["verdict"]
        line = f"{kind['kind']}: {counted(found['cores_per_gpu'], 'core')} a GPU for the loader"
        if found["cores_there"] is not None:
            word = "keeps up" if found["keeps_up"] else "THE GPU WAITS"
            line += f"; {gpu['site']} has {found['cores_there']} beside the training process: {word}"
        lines.append(line)
    return lines
