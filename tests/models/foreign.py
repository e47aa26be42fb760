"""Networks nobody here wrote, from PyPI with random weights, each a line of a spec: do the promises hold for them?

    python -m tests.models.foreign [NAME ...]     (timm with torchvision, transformers, pytorchvideo; 10 minutes)

It prints a row for each: the largest relative difference of the weights in fp64 after 13 steps on 1 and on 2 ranks from
those on 3, whether a run that was resumed on 3 ranks has the same bits, and its accuracy on `data motion --kind order`,
where chance is 16.7 %. The callables below are what model.arch names: FILE.py:videomae.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Stacked(nn.Module):
    """A network of pictures that have the channels of all frames, as an average over frames knows no order of them."""

    def __init__(self, pictures: nn.Module) -> None:
        super().__init__()
        self.pictures = pictures

    def forward(self, clip_NTCHW: torch.Tensor) -> Any:
        return self.pictures(clip_NTCHW.flatten(1, 2))


class Logits(nn.Module):
    """A model of transformers, which returns an object with logits among other things."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, clip_NTCHW: torch.Tensor) -> Any:
        return self.model(pixel_values=clip_NTCHW).logits


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
_RATES: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def timm_vit(num_classes: int, num_frames: int, side: int) -> nn.Module:
    """timm's ViT, with its drop path and dropout."""
    import timm

    sizes: dict[str, Any] = {"img_size": side, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    sizes |= {"in_chans": 3 * num_frames}
    rates = {"drop_path_rate": 0.2, "drop_rate": 0.1}
    return Stacked(timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **sizes, **rates))


def videomae(num_classes: int, num_frames: int, side: int) -> nn.Module:
    """transformers' VideoMAE."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    sizes: dict[str, Any] = {"image_size": side, "patch_size": 8, "num_frames": num_frames, "tubelet_size": 2}
    return Logits(VideoMAEForVideoClassification(VideoMAEConfig(num_labels=num_classes, **sizes, **_RATES, **_SMALL)))


def timesformer(num_classes: int, num_frames: int, side: int) -> nn.Module:
    """transformers' TimeSformer, divided space-time attention."""
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    sizes: dict[str, Any] = {"image_size": side, "patch_size": 8, "num_frames": num_frames}
    config = TimesformerConfig(num_labels=num_classes, **sizes, **_RATES, **_SMALL)
    return Logits(TimesformerForVideoClassification(config))


def slow_r18(num_classes: int, num_frames: int, side: int) -> nn.Module:
    """pytorchvideo's 3D ResNet with 3x1x1 kernels in every stage, BN and dropout."""
    from pytorchvideo.models.resnet import create_resnet

    kernels = ((3, 1, 1),) * 4
    network: nn.Module = create_resnet(
        model_num_class=num_classes, stem_dim_out=8, stem_conv_kernel_size=(3, 3, 3), dropout_rate=0.3,
        stage_conv_a_kernel_size=kernels, head_pool_kernel_size=(num_frames, 1, 1),
    )  # fmt: skip
    network.layout = "NCTHW"  # type: ignore[assignment]
    return network


# Let torchvision, which these libraries import, load beside a torch that its compiled operators are not for: nothing
# here calls them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# The recipe of each training on `data motion`.
NETWORKS: dict[str, dict[str, Any]] = {
    "timm_vit": {"name": "adam", "base_lr": 2e-3},
    "videomae": {"name": "adam", "base_lr": 2e-3},
    "timesformer": {"name": "adam", "base_lr": 5e-4},
    "slow_r18": {"base_lr": 0.05},
}


def _row(folder: Path, name: str, solver: dict[str, Any]) -> list[str]:
    """Train the network five times; return its row."""
    from tests.conftest import spec_writer
    from tests.runs import assert_bit_equal, difference, final_state, rewound
    from tests.worlds import train

    began, runs = time.monotonic(), folder / "runs"
    sizes = {"num_frames": 6, "sampling": "uniform", "short_side": [32, 32], "crop": 32, "workers": 1}
    # The tests' own spec, without what only the networks of the package read.
    model = {"arch": f"{Path(__file__).resolve()}:{name}", "options": {"side": 32}, "num_classes": 6}
    model |= {"backbone": None, "width": 1.0, "dropout": 0.0}
    write = spec_writer(folder / "motion", folder)
    solver = {"lr_scaling": "none", "weight_decay": 1e-4, **solver}
    equal = {"scale": {"gpus": 6, "clips_per_gpu": 4}, "schedule": {"epochs": 1}, "precision": "fp64"}
    equal |= {"checkpoint": {"every_minutes": 1e-3, "keep": 20}}
    for ranks in (1, 2, 3):
        train(ranks, write(f"{name}_{ranks}", model=model, data=sizes, optimizer=solver, **equal))
    states = [final_state(runs / f"{name}_{ranks}") for ranks in (1, 2, 3)]
    middle = states[-1]["step"] // 2
    killed = rewound(runs / f"{name}_3", f"{name}_resumed", states[-1]["step"])
    for path in (killed / "checkpoints").glob("step_*"):
        if int(path.name[5:13]) > middle:
            path.unlink()
    train(3, write(f"{name}_resumed", model=model, data=sizes, optimizer=solver, **equal))
    assert_bit_equal(states[-1], final_state(killed))

    learn = {"scale": {"gpus": 2, "clips_per_gpu": 8}, "schedule": {"epochs": 30, "warmup_epochs": 2}}
    output = train(2, write(f"{name}_learns", model=model, data=sizes, optimizer=solver, **learn))
    accuracy = next(line.split()[1] for line in output.splitlines() if line.startswith("top-1"))
    parameters = sum(value.numel() for value in states[0]["model"].values())
    apart = [f"{difference(state, states[-1]):.1e}" for state in states[:2]]
    seconds = f"{time.monotonic() - began:.0f} s"
    return [name, f"{parameters:,}", *apart, f"equal from step {middle}", f"{accuracy} %", seconds]


def main(names: list[str]) -> None:
    from summit_train.data.motion import MotionSet, write_motion_set

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        videos = MotionSet(size=32, num_frames=16, num_classes=6, kind="order")
        for _ in write_motion_set(Path(folder, "motion"), 320, 120, videos):
            pass
        print("| network | parameters | 1 and 3 ranks | 2 and 3 ranks | resumed | top-1, chance 16.7 % | time |")
        print("|---|---|---|---|---|---|---|")
        for name in names or NETWORKS:
            print("|", " | ".join(_row(Path(folder), name, NETWORKS[name])), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
