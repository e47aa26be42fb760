"""The mmaction2 side of bench/mmaction2.py, run in its environment: train, and print the seconds of each step.

    PYTHON bench/mmaction2_peer.py '{"files": "list.txt", "is_pictures": false, ...}'    one rank; more by torchrun

TSM as in mmaction2's own configs (ResNetTSM, TSMHead), through its pipeline, its data set and MMEngine's Runner.
"""

from __future__ import annotations

import json
import sys
import time
import types
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

# The wheel of mmaction2 1.2.0 lacks this package, which its import needs and TSM does not.
for name in ("drn", "drn.drn"):
    missing = types.ModuleType(f"mmaction.models.localizers.{name}")
    missing.__dict__.update(DRN=type("DRN", (), {}), __path__=[])
    sys.modules[missing.__name__] = missing

from mmaction.registry import HOOKS, MODELS  # noqa: E402
from mmaction.utils import register_all_modules  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.optim import OptimWrapper  # noqa: E402
from mmengine.registry import OPTIM_WRAPPERS  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

FRAMES = 8


@HOOKS.register_module()
class Clock(Hook):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_train_iter(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):  # type: ignore[misc]
    """The step under autocast: MMEngine's AmpOptimWrapper refuses CPUs."""

    @contextmanager
    def optim_context(self, model: Any) -> Any:
        with super().optim_context(model), torch.autocast("cpu", torch.bfloat16):
            yield


def config(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Runner. is_pictures: the list names folders of JPEG pictures, not videos."""
    crop, kind = job["crop"], "Rawframe" if job["is_pictures"] else "Video"
    pipeline: list[dict[str, Any]] = [
        {"type": "DenseSampleFrames", "clip_len": 1, "frame_interval": 1, "num_clips": FRAMES, "sample_range": 64},
        {"type": "RawFrameDecode" if job["is_pictures"] else "DecordDecode"},
        {"type": "Resize", "scale": (-1, crop * 288 // 224)},
        {"type": "RandomCrop", "size": crop},
        {"type": "Flip", "flip_ratio": 0.5},
        {"type": "FormatShape", "input_format": "NCHW"},
        {"type": "PackActionInputs"},
    ]
    pipeline[:0] = [] if job["is_pictures"] else [{"type": "DecordInit"}]
    head = {"type": "TSMHead", "num_classes": 400, "in_channels": 2048, "num_segments": FRAMES, "dropout_ratio": 0.0}
    colours = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "format_shape": "NCHW"}
    return {
        "model": {
            "type": "Recognizer2D",
            "backbone": {"type": "ResNetTSM", "depth": 50, "norm_eval": False, "shift_div": 8, "num_segments": FRAMES},
            "cls_head": head | {"consensus": {"type": "AvgConsensus", "dim": 1}, "is_shift": True},
            "data_preprocessor": {"type": "ActionDataPreprocessor", **colours},
        },
        "train_dataloader": {
            "batch_size": job["clips"],
            "num_workers": job["workers"],
            "persistent_workers": True,
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "dataset": {"type": f"{kind}Dataset", "ann_file": job["files"], "pipeline": pipeline},
        },
        "optim_wrapper": {
            "type": "OptimWrapper" if job["precision"] == "fp32" else "BFloat16OptimWrapper",
            "optimizer": {"type": "SGD", "lr": 0.001, "momentum": 0.9, "weight_decay": 1e-4},
        },
        "train_cfg": {"by_epoch": True, "max_epochs": 1},
        "custom_hooks": [{"type": "Clock"}],
        "default_hooks": {"checkpoint": None},
        "default_scope": "mmaction",
        "cfg": {"model_wrapper_cfg": {"device_ids": None, "broadcast_buffers": False}},  # else it asks for a GPU
        "launcher": "pytorch" if job["ranks"] > 1 else "none",
        "log_level": "WARNING",
        "work_dir": job["work_dir"],
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    register_all_modules()
    if job["ranks"] > 1:  # MMEngine would ask for a GPU first
        torch.distributed.init_process_group("gloo")
    keys = config(job)
    model = MODELS.build(keys.pop("model"))
    # NumPy, which computes the head's accuracy, has no bf16.
    model.cls_head.register_forward_hook(lambda module, inputs, scores: scores.float())
    if job["channels_last"]:
        model.to(memory_format=torch.channels_last)
    runner = Runner(model, **keys)
    # ResNetTSM would load ImageNet weights, and has no option not to.
    runner._init_model_weights = lambda: None
    runner.train()
    if runner.rank == 0:
        (ends,) = (hook.ends for hook in runner.hooks if isinstance(hook, Clock))
        seconds = [end - begin for begin, end in pairwise(ends)]
        print("\n" + json.dumps({"seconds": seconds}), flush=True)


main()
