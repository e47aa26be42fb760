"""`summit-train bench loader SPEC`: clips a second of the loader, where the time goes, the cores that a rank needs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from summit_train.bench.benches import network_rate
from summit_train.bench.commands import arguments
from summit_train.bench.commands.arguments import Values
from summit_train.bench.loader import Subject, core_rate, measure, sampled, subject_of, verdict
from summit_train.bench.measure import MeasureError, Turns, spread_text
from summit_train.cluster.estimate import estimate
from summit_train.cluster.site import Site, load_site
from summit_train.core.processes import num_cpus
from summit_train.core.text import counted, table
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import read_manifest
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec


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
    demand.add_argument("--measure", action="store_true", help="measure the spec's network here, on one rank")
    demand.add_argument(
        "--rate", "--speed", type=float, metavar="X", help="a rank trains on X clips/s [the site's figure]"
    )
    demand.add_argument("--step-ms", type=float, metavar="X", help="a rank's step of clips_per_gpu clips takes X ms")
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
        core, together = (kind[f"clips_per_second_{of}"]["median"] for of in ("core", "all"))
        per_core = core_rate(core, together, min(workers, num_cpus()))
        cores = None if site is None else site.cores_per_rank
        kind["clips_per_second_per_core"] = per_core
        kind["verdict"] = None if speed is None else verdict(per_core, speed, cores)
    return {
        "bench": "loader",
        "network": spec.model.title,
        "settings": {"clips": clips, "repeats": repeats, "workers": workers, "cores": num_cpus()},
        "gpu": {"clips_per_second": speed, "source": source, "site": None if site is None else site.name},
        "kinds": kinds,
    }


def gpu_speed(spec: Spec, site: Site | None, args: argparse.Namespace) -> tuple[float | None, str | None]:
    """Return the clips/s that a rank trains on and where the figure is from, or None twice."""
    if args.measure:
        arguments.alone("--measure times one network, start it")
        with arguments.open_place() as place:
            turns = Turns(args.repeats, steps=2, warm_up=2)
            return network_rate(spec, turns, place), f"measured here, {place.device.type}"
    if args.step_ms is not None:
        return 1000 * spec.scale.clips_per_gpu / args.step_ms, "--step-ms"
    if args.rate is not None:
        return args.rate, "--rate"
    if site is None:
        return None, None
    batch = (spec.scale.gpus or site.ranks) * spec.scale.clips_per_gpu
    found = estimate(site, spec, make_plan(spec, site.ranks, batch), 1)
    return found.clips_per_second, found.source


def _subjects(spec: Spec, args: argparse.Namespace, folder: Path) -> list[Subject]:
    """Return what is measured: the spec's clips as they are, and packed; of flow, only as they are."""
    own = subject_of(spec.data, Dataset.open(spec, "train").manifest, spec.seed)
    given = [subject_of(spec.data, read_manifest(path), spec.seed) for path in args.packed]
    is_whole = given or own.name != "raw" or spec.data.modality == "flow"
    subjects = [own, *given] if is_whole else list(sampled(own, args.clips, folder))
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
        lines = [
            f"{kind['kind']}: a core for each {kind['clips_per_second_per_core']:.4g} clips/s of a rank"
            for kind in values["kinds"]
        ]
        return [*lines, "--measure, --rate, --step-ms or --site says how many clips/s a rank trains on"]
    lines = [f"a rank trains {values['network']} on {gpu['clips_per_second']:.4g} clips/s ({gpu['source']})"]
    return lines + [_verdict(kind["kind"], kind["verdict"], gpu["site"]) for kind in values["kinds"]]


def _verdict(kind: str, found: Values, site: str | None) -> str:
    needed = found["cores_per_gpu"]
    line = f"{kind}: {counted(found['cores_per_rank'], 'core')} a rank, {needed} for the loader (data.workers={needed})"
    if found["cores_there"] is None:
        return line
    word = "keeps up" if found["keeps_up"] else "THE GPU WAITS"
    return f"{line}; {site} has {found['cores_there']} for it: {word}"
