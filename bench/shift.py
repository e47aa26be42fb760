"""What the temporal shift costs, and what each part of the fast path brings: networks measured in turn.

    OMP_NUM_THREADS=1 python bench/shift.py                     ResNet-50, 8 x 224^2, fp32 and bf16
    python bench/shift.py --batch 2 --repeats 9 --json          one JSON object

All networks have the same weights. 2d has no shift, tsm has it, each accelerated with all parts, with one part (+shift,
+norms) or none (plain). official is the accelerated 2d with the shift as Lin et al. published it: a view of five
dimensions, zeros_like, three slice copies. A step is forward, loss and backward; the optimizer is the same for all and
left out. Every round measures all of them, so each ratio is of two measurements side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.core.comm import World
from summit_train.core.device import choose_device, environment
from summit_train.core.result import TextTable
from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import PARTS, accelerate
from summit_train.models.network import cpu_kernels
from summit_train.models.resnet import ResidualBlock
from summit_train.report.tables import machine_text
from summit_train.training.timer import Mark

# name -> architecture, parts of the fast path
NETWORKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "2d": ("tsn", PARTS),
    "tsm": ("tsm", PARTS),
    "tsm +norms": ("tsm", ("norms",)),
    "tsm +shift": ("tsm", ("shift",)),
    "tsm plain": ("tsm", ()),
    "2d plain": ("tsn", ()),
    "official": ("tsm", ("norms",)),
}
PAIRS = (
    ("tsm", "2d"),
    ("official", "tsm"),
    ("tsm plain", "2d plain"),
    ("tsm", "tsm +norms"),  # what the shift in place brings
    ("tsm", "tsm +shift"),  # what the fused normalisations bring
    ("tsm", "tsm plain"),
    ("2d", "2d plain"),
)
Batch = tuple[torch.Tensor, torch.Tensor]


class OfficialShift(nn.Module):
    """The formulation of the authors' code: frames (N*T, C, H, W), an eighth of the channels each way."""

    def __init__(self, num_frames: int) -> None:
        super().__init__()
        self.num_frames = num_frames

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames, channels, height, width = x.size()
        x = x.view(frames // self.num_frames, self.num_frames, channels, height, width)
        fold = channels // 8
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.view(frames, channels, height, width)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="clips [4]")
    parser.add_argument("--frames", type=int, default=8, help="of a clip [8]")
    parser.add_argument("--size", type=int, default=224, help="side of a frame [224]")
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the channels [1]")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds [5]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    world = World()
    device = choose_device(world)
    generator = torch.Generator().manual_seed(0)  # channels last in memory, as from the loader
    pixels = torch.randn(args.batch, args.frames, args.size, args.size, 3, generator=generator)
    batch = pixels.to(device).permute(0, 1, 4, 2, 3), torch.arange(args.batch, device=device)
    results = {}
    for precision in args.precision:
        networks = {name: network(name, args, device) for name in NETWORKS}
        with torch.no_grad():
            logits = {name: model(batch[0]) for name, model in networks.items() if not name.startswith("2d")}
        scale = logits["tsm"].abs().max()
        differ = max(float((other - logits["tsm"]).abs().max() / scale) for other in logits.values())
        print(f"{precision}: the logits of the TSMs differ by {differ:.1e} at most", file=sys.stderr)
        results[precision] = {"logits_differ": differ, **measure(networks, batch, precision, args.repeats)}
    about = environment(world, device, [world.host], cpu_kernels(device))
    values = {"environment": about, "settings": vars(args), "results": results}
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def network(name: str, args: argparse.Namespace, device: torch.device) -> VideoNetwork:
    """Build one of NETWORKS, weights from one seed."""
    arch, parts = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    model = build_model(arch, args.backbone, args.frames, 400, width=args.width, generator=generator)
    if name == "official":
        for block in model.modules():
            if isinstance(block, ResidualBlock):
                block.shift = OfficialShift(args.frames)
    model = model.to(device, memory_format=model.memory_format).train()
    accelerate(model, parts)
    return model


def time_step(model: nn.Module, batch: Batch, precision: str) -> dict[str, float]:
    """Return the seconds of the forward pass and of the whole step."""
    clips, labels = batch
    start = Mark(clips.device)
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(clips)
    middle = Mark(clips.device)
    torch.autograd.backward(functional.cross_entropy(logits.float(), labels))
    end = Mark(clips.device)
    model.zero_grad()
    return {"forward": start.seconds_to(middle), "step": start.seconds_to(end)}


def measure(networks: dict[str, VideoNetwork], batch: Batch, precision: str, repeats: int) -> dict[str, Any]:
    """Measure seconds of each network and ratios of PAIRS, forward and step: min, median, max over the rounds."""
    turns = {name: partial(time_step, model, batch, precision) for name, model in networks.items()}
    for turn in (*turns.values(), *turns.values()):  # twice: until the memory that they take is there
        turn()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in networks}
    for name, timed in in_turn(turns, repeats):
        found[name].append(timed)
        print(f"{precision} {name}: {timed['step']:.3f} s", file=sys.stderr)
    result: dict[str, Any] = {}
    for part in ("forward", "step"):
        seconds = {name: [timed[part] for timed in rounds] for name, rounds in found.items()}
        result[part] = {
            "seconds": {name: spread(times) for name, times in seconds.items()},
            "ratios": {f"{a} / {b}": spread(pair_ratios(seconds[a], seconds[b])) for a, b in PAIRS},
        }
    return result


def as_text(values: dict[str, Any]) -> str:
    settings = values["settings"]
    clip = f"{settings['batch']} clips of {settings['frames']} x {settings['size']}^2"
    lines = [
        f"machine: {machine_text(values['environment'])}",
        f"{settings['backbone']}, {clip}; median (min .. max) of {settings['repeats']} pairs",
    ]
    for precision, result in values["results"].items():
        for part in ("forward", "step"):
            seconds = [(name, spread_text(times) + " s") for name, times in result[part]["seconds"].items()]
            ratios = [(name, spread_text(ratio) + " x") for name, ratio in result[part]["ratios"].items()]
            lines.append(f"\n{precision}, {part}:\n{TextTable(seconds + ratios, indent='  ')}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
