"""What the temporal shift costs: three ways to write it against the 2D network without it, measured in turn.

    OMP_NUM_THREADS=1 python bench/shift.py                     ResNet-50, 8 x 224^2, fp32 and bf16
    python bench/shift.py --batch 2 --repeats 9 --json          one JSON object

Networks with the same weights: tsn (no shift), tsm (this project's), copy (a copy in the tensor's own memory format,
then the convolution), official (view to five dimensions, zeros_like, three slice copies, as Lin et al. published it).
A step is forward, loss and backward; the optimizer is the same for all and left out. Every round measures all four, so
each ratio is of two measurements side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from summit_train.models.pointwise import Conv2d
from summit_train.models.shifted_conv import ShiftedConv2d
from torch import nn
from torch.nn import functional

from summit_train.comm import SerialWorld
from summit_train.commands.start import choose_device
from summit_train.models import build_model
from summit_train.models.resnet import Block
from summit_train.models.shift import temporal_shift
from summit_train.report.text import machine_text, table
from summit_train.scaling.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.training.environment import environment
from summit_train.training.stopwatch import Mark

NETWORKS = ("tsn", "tsm", "copy", "official")
PAIRS = (("tsm", "tsn"), ("copy", "tsn"), ("official", "tsn"), ("official", "tsm"))
Shift = Callable[[torch.Tensor, int], torch.Tensor]
Timed = dict[str, float]


def main() -> int:
    """Measure and print."""
    args = _arguments()
    world = SerialWorld()
    device = choose_device(world)
    results = {}
    for precision in args.precision:
        networks = {name: network(name, args).to(device) for name in NETWORKS}
        batch = random_batch(args, device)
        difference = largest_difference(networks, batch)
        print(f"{precision}: the three shifts' logits differ by {difference:.1e} at most", file=sys.stderr)
        results[precision] = {"logits_differ": difference, **measure(networks, batch, precision, args)}
    values = {"environment": environment(world, device, [world.host]), "settings": vars(args), "results": results}
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="clips [4]")
    parser.add_argument("--frames", type=int, default=8, help="of a clip [8]")
    parser.add_argument("--size", type=int, default=224, help="side of a frame [224]")
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the channels [1]")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds [5]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def official_shift(x: torch.Tensor, num_frames: int) -> torch.Tensor:
    """The formulation of the authors' code: frames (N*T, C, H, W), an eighth of the channels each way."""
    frames, channels, height, width = x.size()
    x = x.view(frames // num_frames, num_frames, channels, height, width)
    fold = channels // 8
    out = torch.zeros_like(x)
    out[:, :-1, :fold] = x[:, 1:, :fold]
    out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
    out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
    return out.view(frames, channels, height, width)


class ShiftThenConvolve(Conv2d):
    """A shifted convolution in two parts, with the parameters of the one that it replaces."""

    def __init__(self, convolution: ShiftedConv2d, shift: Shift) -> None:
        super().__init__(
            convolution.in_channels,
            convolution.out_channels,
            convolution.kernel_size,  # type: ignore[arg-type]
            convolution.stride,  # type: ignore[arg-type]
            convolution.padding,  # type: ignore[arg-type]
            bias=False,
        )
        self.weight, self._num_frames, self._shift = convolution.weight, convolution.num_frames, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self._shift(x, self._num_frames))


def network(name: str, args: argparse.Namespace) -> nn.Module:
    """One of NETWORKS, weights from one seed."""
    generator = torch.Generator().manual_seed(0)
    arch = "tsn" if name == "tsn" else "tsm"
    model = build_model(arch, args.backbone, args.frames, 400, width=args.width, generator=generator)
    shift = {"copy": temporal_shift, "official": official_shift}.get(name)
    if shift is not None:
        for parent in list(model.modules()):
            if isinstance(parent, Block):
                parent.after = None  # every frame in its place
            for child_name, child in list(parent.named_children()):
                if isinstance(child, ShiftedConv2d):
                    setattr(parent, child_name, ShiftThenConvolve(child, shift))
    return model.to(memory_format=model.memory_format).train()  # as training has it


def random_batch(args: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips (N, T, 3, H, W), channels-last in memory as from the loader, and labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(args.batch, args.frames, args.size, args.size, 3, generator=generator)
    return pixels.to(device).permute(0, 1, 4, 2, 3), torch.arange(args.batch, device=device)


def largest_difference(networks: dict[str, nn.Module], batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Between the logits of the three shifts in fp32, relative to the largest logit."""
    with torch.no_grad():
        logits = {name: model(batch[0]) for name, model in networks.items() if name != "tsn"}
    scale = logits["tsm"].abs().max()
    return max(float((other - logits["tsm"]).abs().max() / scale) for other in logits.values())


def time_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], precision: str) -> Timed:
    """Seconds of the forward pass and of the whole step."""
    clips, labels = batch
    start = Mark(clips.device)
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(clips)
    middle = Mark(clips.device)
    torch.autograd.backward(functional.cross_entropy(logits.float(), labels))
    end = Mark(clips.device)
    model.zero_grad()
    return {"forward": start.seconds_to(middle), "step": start.seconds_to(end)}


def measure(
    networks: dict[str, nn.Module], batch: tuple[torch.Tensor, torch.Tensor], precision: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of each network and ratios of PAIRS, forward and step: min, median, max over the rounds."""
    turns = {name: partial(time_step, model, batch, precision) for name, model in networks.items()}
    for turn in (*turns.values(), *turns.values()):  # Twice: until the memory that they take is there.
        turn()
    found: dict[str, list[Timed]] = {name: [] for name in networks}
    for name, timed in in_turn(turns, args.repeats):
        found[name].append(timed)
        print(f"{precision} {name}: {timed['step']:.3f} s", file=sys.stderr)
    result: dict[str, Any] = {}
    for part in ("forward", "step"):
        seconds = {name: [timed[part] for timed in rounds] for name, rounds in found.items()}
        result[part] = {
            "seconds": {name: spread(times) for name, times in seconds.items()},
            "ratios": {f"{a}/{b}": spread(pair_ratios(seconds[a], seconds[b])) for a, b in PAIRS},
        }
    return result


def as_text(values: dict[str, Any]) -> str:
    """The ratios for people."""
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
            lines.append(f"\n{precision}, {part}:\n{table(seconds + ratios)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
