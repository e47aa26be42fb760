"""Measure one GPU by this project's commands, and write one table; see bench/gpu.sh.

    python bench/gpu.py OUT [--seconds 230] [--only NAME ...] [--small]

OUT gets gpu.json (what each command printed), gpu.md and kernels.png. The commands that matter most come first; those
for which no time is left are named. Goals that are missed are reported and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from summit_train.core.result import TextTable
from summit_train.report.tables import machine_text

ROOT = Path(__file__).resolve().parents[1]
KINETICS = ROOT / "configs" / "kinetics"
LIMITS_S = {"training, compiled, bf16": 110.0}  # after which a command is stopped; 60 elsewhere
Values = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=230, help="for all commands [230]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="commands by name, such as 'training, bf16'")
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU: tiny networks, one turn")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ends, results = time.monotonic() + args.seconds, dict[str, Values]()
    with tempfile.TemporaryDirectory() as work:
        for name, line in commands(out, Path(work), small=args.small).items():
            if args.only is None or name in args.only:
                left = ends - time.monotonic()
                print(f"{name} ({left:.0f} s left): {line}", file=sys.stderr, flush=True)
                results[name] = result_of(line, left if args.small else min(LIMITS_S.get(name, 60), left))
    text = as_text(results, rehearsal=args.small)
    values = {"bench": "gpu", "rehearsal": args.small, "commands": results}
    (out / "gpu.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def commands(out: Path, work: Path, *, small: bool) -> dict[str, str]:
    """Return command lines of `summit-train` and scripts by name, the first matter most. work: for videos and specs."""
    names = ("tsm_r50_8f", "tsn_r50_8f", "i3d_3x3x3_r50_16f", "i3d_3x1x1_r50_32f")
    tsm, tsn, i3d, i3d_factorised = (shlex.quote(str(KINETICS / f"{name}.yaml")) for name in names)
    own = {"compiled": (names[0], "execution: {compile: true}"), "images": (names[1], "data: {num_frames: 1}")}
    for name, (base, keys) in own.items():
        (work / f"{name}.yaml").write_text(f"name: {name}\nextends: {KINETICS}/{base}.yaml\n{keys}\n", encoding="utf-8")
    to, made = shlex.quote(str(out)), shlex.quote(str(work))
    clips, net, peak = 16, "", ""
    turns, passes, workers = "--repeats 5 --steps 5", "--seconds 1", max(1, len(os.sched_getaffinity(0)) - 1)
    shift, loader, videos = "", "--repeats 2", "--train 64 --size 256"
    if small:
        clips, net, peak = 2, "model.width=0.125 data.crop=32 data.short_side=[32,40]", " --peak 0"
        turns, passes, workers = "--repeats 1 --steps 1 --warm-up 1", "--repeats 1 --warm-up 1 --batch 2", 1
        shift, loader = "--size 32 --width 0.125 --repeats 1", "--clips 2 --repeats 1 --workers 1"
        videos = "--train 8 --size 48"
    fed = f"{net} scale.gpus=1 scale.clips_per_gpu={clips}"
    step = f"{fed} {turns} --synthetic --json{peak}"
    images = step.replace(f"clips_per_gpu={clips}", f"clips_per_gpu={8 * clips}")
    data = f"precision=bf16 model.num_classes=4 data.root=null data.val={made}/videos/val.csv {fed}"
    read = f"data.workers={workers} {turns} --peak 0 --json"
    h264, jpeg = f"{made}/videos/train.csv", f"{made}/jpeg"
    found = {
        "training, bf16": f"bench step {tsm} precision=bf16 {step} --compare {tsn}",
        "training, compiled, bf16": f"bench step {made}/compiled.yaml precision=bf16 {step}",
        "training, images, bf16": f"bench step {made}/images.yaml precision=bf16 {images}",
        "training, fp32": f"bench step {tsm} precision=fp32 {step} --compare {tsn}",
        "the shift, bf16": f"bench/shift.py --precision bf16 --batch {clips} --json {shift}",
        "kernels, bf16": f"bench/operators.py {tsm} precision=bf16 {fed} --out {to}/kernels.png --json",
        "inference, bf16": f"papers/latency.py {tsm} {tsn} {i3d} {i3d_factorised} {net} precision=bf16 {passes} --json",
        "videos": f"data motion {made}/videos --val 4 --frames 64 {videos}",
        "packed videos": f"data pack {h264} {jpeg} --root {made}/videos --kind jpeg",
        "cores for the loader": f"bench loader {tsm} {data} data.train={h264} --measure --json {loader}",
        "training from H.264, bf16": f"bench step {tsm} {data} data.train={h264} {read}",
        "training from JPEG, bf16": f"bench step {tsm} {data} data.train={jpeg} {read}",
        "training, fp16": f"bench step {tsm} precision=fp16 {step} --compare {tsn}",
        "training, fp32 without TF32": f"NVIDIA_TF32_OVERRIDE=0 bench step {tsm} precision=fp32 {step}",
        "training I3D, bf16": f"bench step {i3d} precision=bf16 {step} --compare {i3d_factorised}",
        "table 1": f"papers/figure3.py table1 {net} {turns} --out {to}/table_1.png --json",
        "figure 3a": f"papers/figure3.py a {net} precision=bf16 {turns} --out {to}/figure_3a.png --json",
        "figure 3b": f"papers/figure3.py b {net} {turns} --frames-per-second 2000 --out {to}/figure_3b.png --json",
        "TSM table 6": f"papers/latency.py {net} --table 6 {passes} --out {to}/tsm_table_6.png --json",
        "TSM table 5": f"papers/latency.py {net} --table 5 {passes} --out {to}/tsm_table_5.png --json",
    }
    slow_on_cpus = ("training, compiled, bf16", "training, fp16", "training, fp32 without TF32", "training I3D, bf16")
    return {name: line for name, line in found.items() if not small or name not in slow_on_cpus}


def result_of(line: str, limit_s: float) -> Values:
    """Run a command line; return it, its seconds, and what it printed or why it failed."""
    result: Values = {"command": line, "seconds": 0.0, "values": None, "error": None}
    if limit_s < 1:
        return result | {"error": "no time was left"}
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words[:1] if "=" in word)
    words = words[len(settings) :]
    program = [] if words[0].endswith(".py") else ["-m", "summit_train"]
    # The time to compile is that of a first run.
    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} | settings
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *program, *words],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return result | {"seconds": limit_s, "error": f"stopped after {limit_s:.0f} s, its limit"}
    result["seconds"] = time.monotonic() - began
    if done.returncode != 0:
        return result | {"error": f"exit status {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-3:])}"}
    printed = [text for text in done.stdout.splitlines() if text.startswith("{")]
    return result | {"values": json.loads(printed[-1]) if printed else {}}


# --- what the commands found


def rows_of(results: Mapping[str, Values]) -> list[dict[str, str]]:
    """Return a row for each network that was measured: clips/s of training or inference, utilisation."""
    found: list[tuple[str, str, Values, float | None]] = []  # command, network, clips/s, utilisation
    for name, result in results.items():
        values = result["values"] or {}
        for spec in values.get("specs", ()):
            found.append((name, spec["name"], spec["clips_per_second"], spec["mfu"] and spec["mfu"]["median"]))
        for row in values.get("rows", ()) if name.startswith("inference") else ():
            found.append((name, f"{row['arch']}, {row['frames']} frames", row["clips_per_second_spread"], None))
    return [
        {
            "": name,
            "network": network,
            "clips/s": f"{rate['median']:.4g}",
            "least .. most": f"{rate['min']:.4g} .. {rate['max']:.4g}",
            "utilisation": "" if mfu is None else f"{mfu:.1%}",
        }
        for name, network, rate, mfu in found
    ]


def goals_of(results: Mapping[str, Values]) -> Iterator[tuple[str, float, str, float]]:
    """Yield what is aimed at: name, value, "<=" or ">=", bound. The paper's claims, and a GPU that never waits."""
    found = {name: result["values"] for name, result in results.items() if result["values"]}
    for name in ("training, bf16", "training, fp16"):
        if name in found:
            yield f"{name}: step of TSM / step of TSN", found[name]["ratios"]["step"]["median"], "<=", 1.03
    if "training, bf16" in found and "training, images, bf16" in found:
        clips, images = (found[f"training, {what}bf16"]["specs"][0]["clips_per_second"] for what in ("", "images, "))
        ratio = 8 * clips["median"] / images["median"]
        yield "training, bf16: TSM's frames/s / images/s of a plain ResNet-50", ratio, ">=", 0.97
    if "the shift, bf16" in found:
        ratio = found["the shift, bf16"]["results"]["bf16"]["step"]["ratios"]["official / tsm"]["median"]
        yield "the published shift's step / ours", ratio, ">=", 1.0
    for name in ("training from H.264, bf16", "training from JPEG, bf16"):
        if name in found:
            yield f"{name}: share that waits for data", found[name]["specs"][0]["shares"]["data_wait"], "<=", 0.02
    kernels = found.get("kernels, bf16", {})
    if kernels.get("busy_s") is not None:  # not in a rehearsal
        yield "share of a step in which the GPU is busy", kernels["busy_s"] / kernels["step_s"], ">=", 0.95


def as_text(results: Mapping[str, Values], *, rehearsal: bool) -> str:
    machines = [r["values"]["environment"] for r in results.values() if r["values"] and "environment" in r["values"]]
    lines = ["REHEARSAL on a CPU with tiny networks: no figure means anything"] if rehearsal else []
    lines.append(machine_text(machines[0]) if machines else "no command measured anything")
    if rows := rows_of(results):
        lines += ["", str(TextTable.of_records(rows)), ""]
    for name, value, sign, bound in goals_of(results):
        met = value <= bound if sign == "<=" else value >= bound
        lines.append(f"{'met' if met else 'MISSED'}: {name}: {value:.3f}, goal {sign} {bound}")
    return "\n".join([*lines, *(f"{name}: {result['error']}" for name, result in results.items() if result["error"])])


if __name__ == "__main__":
    sys.exit(main())
