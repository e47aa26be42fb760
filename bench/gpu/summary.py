"""What all parts of bench/gpu.sh found: one JSON object, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from figures import draw_kernels, draw_speed
from runner import Ended
from verdict import as_text, verdict

from summit_train.core.comm import World
from summit_train.core.text import text_table
from summit_train.training.environment import environment

Values = dict[str, Any]


def machine(rehearse: bool) -> Values:
    """Return what the figures were made on."""
    world, device = World(), torch.device("cpu" if rehearse else "cuda:0")
    found = environment(world, device, [world.host]) | {"rehearsal": rehearse, "cuda": torch.version.cuda}
    if rehearse:
        return found
    gpu = torch.cuda.get_device_properties(device)
    return found | {
        "capability": f"{gpu.major}.{gpu.minor}",
        "memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
        "built_for": torch.cuda.get_arch_list(),
    }


def values_of(ended: Sequence[Ended], where: Values) -> Values:
    """Return what all parts found as one JSON object."""
    return {
        "bench": "gpu",
        "environment": where,
        "passes": all(one.passes for one in ended),
        "parts": [
            {
                "name": one.part.name,
                "group": one.part.group,
                "about": one.part.about,
                "seconds": one.seconds,
                "passes": one.passes,
                "said": one.as_text(),
                **one.values,
            }
            for one in ended
        ],
    }


def write(values: Values, out: Path) -> None:
    """Write gpu.json, gpu.md and the figures into `out`."""
    for part in values["parts"]:
        draw = {"speed": draw_speed, "kernels": draw_kernels}.get(part["name"])
        if draw is not None and part.get("rows" if part["name"] == "speed" else "groups"):
            draw(out / f"{part['name']}.png", part)
    (out / "gpu.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(show(values) + "\n", encoding="utf-8")


def show(values: Values) -> str:
    """Return the table of all parts, then what failed, what was wanted and missed, and what was left out."""
    where, parts = values["environment"], values["parts"]
    title = f"{where['device']}, torch {where['torch']}, CUDA {where['cuda']}"
    if where["rehearsal"]:
        title = f"REHEARSAL on a CPU with tiny networks: it shows that the code runs, no figure means anything; {title}"
    rows = [
        {
            "part": part["name"],
            "what": part["about"],
            "checks": f"{sum(check['passes'] for check in part.get('checks', []))}/{len(part.get('checks', []))}",
            "seconds": f"{part['seconds']:.0f}",
            "": "ok" if part["passes"] else "FAILED",
        }
        for part in parts
    ]
    return "\n".join([title, "", text_table(rows), *_remarks(parts), *_advice(parts), _verdict(parts)])


def _remarks(parts: Sequence[Values]) -> list[str]:
    lines = []
    for part in parts:
        name, checks = part["name"], part.get("checks", [])
        if not part["passes"] and all(check["passes"] or check["wanted"] for check in checks):
            lines.append(f"{name}: {part['said']}")
        lines += [f"{name}: {_text(check)}" for check in checks if not check["passes"]]
        lines += [f"{name}: left out: {what}: {reason}" for what, reason in part.get("skipped", {}).items()]
    return ["", *lines] if lines else []


def _advice(parts: Sequence[Values]) -> list[str]:
    """Return what the measured speeds recommend for this GPU, as lines for a spec."""
    speeds = [part for part in parts if part["name"] == "speed" and part.get("rows")]
    return [line for speed in speeds for line in ("", as_text(verdict(speed), speed))]


def _text(check: Values) -> str:
    said = "wanted, missed" if check["wanted"] else "FAILED"
    sign, value = ">=" if check["at_least"] else "<=", check["value"]
    found = "not a number" if value is None else f"{value:.4g}"
    return f"{said}: {check['name']}: {found}, not {sign} {check['bound']:.4g}{check['note'] and '; ' + check['note']}"


def _verdict(parts: Sequence[Values]) -> str:
    failed = [part["name"] for part in parts if not part["passes"]]
    return f"\nFAILED: {', '.join(failed)}" if failed else f"\nall {len(parts)} parts pass"
