"""A foreign network: wraps the module that the user's callable returns as a VideoNetwork (docs/own_parts.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart, digest_of
from summit_train.models.video import VideoNetwork
from summit_train.spec import NetworkSpec
from summit_train.spec.catalog import is_foreign

LAYOUTS = ("NTCHW", "NCTHW")


class ForeignNetwork(VideoNetwork):
    """Adapts the module `network`, whose attributes `layout`, `head`, `stem` and `feature_maps` describe it.

    Names of tensors and of modules are those of `network`. All its draws from torch's default generators, those of
    nn.Dropout and of any drop path, are functions of the seed that `reseed` gets.
    """

    replaceable = False

    def __init__(
        self, network: nn.Module, part: OwnPart, num_frames: int, num_classes: int, in_channels: int, note: str = ""
    ) -> None:
        super().__init__(num_frames, {}, in_channels)
        self.network = network
        self.part = part
        self.num_classes = num_classes
        self.note = note
        self.sources = {f"{part.key} (SHA-256)": part.digest}
        self.layout = getattr(network, "layout", LAYOUTS[0])
        if self.layout not in LAYOUTS:
            right = " or ".join(LAYOUTS)
            raise UserError(f"{part.key}: the layout of {part.name} must be {right}, got {self.layout!r}")
        self.head = _named(network, "head")
        self.stem = tuple(filter(None, [_named(network, "stem")]))

    def to_input(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        """Return a view of the clip in the network's own layout."""
        return clip_NTCHW.transpose(1, 2) if self.layout == "NCTHW" else clip_NTCHW

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits. Raises UserError where they are not a tensor (N, num_classes)."""
        logits = self.network(x)
        expected = (len(x), self.num_classes)
        if not isinstance(logits, torch.Tensor) or logits.shape != expected:
            found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            clip = f"{tuple(x.shape)} ({self.layout})"
            raise self.part.wrong(f"logits {expected} for a clip {clip}", found)
        return logits

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits, which `extract` has made."""
        return features

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's own feature maps. Raises UserError where it has none."""
        feature_maps = getattr(self.network, "feature_maps", None)
        if feature_maps is None or not self.head:
            needs = "they need a method feature_maps, and its last linear layer as `head`; see docs/own_parts.md"
            raise UserError(f"{self.part.name} has no class activation maps: {needs}")
        maps: torch.Tensor = feature_maps(x)
        return maps

    def reseed(self, seed: int) -> None:
        """Make the draws that follow a function of `seed`, those of torch's default generators too."""
        super().reseed(seed)
        torch.manual_seed(seed)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.network.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.network.load_state_dict(state_dict, strict, assign)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.network.named_parameters(*args, **options)

    def get_submodule(self, target: str) -> nn.Module:
        return self.network.get_submodule(target)


def _named(network: nn.Module, attribute: str) -> str:
    """Return the name of the module that an attribute names or is; "" where there is none."""
    found = getattr(network, attribute, "")
    return attribute if isinstance(found, nn.Module) else found if isinstance(found, str) else ""


def build_foreign(
    spec: NetworkSpec, num_frames: int, in_channels: int, generator: torch.Generator | None = None
) -> ForeignNetwork:
    """Import the callable that `spec.arch` names and build its network, with the initial weights that it draws itself.

    They are a function of the seed of `generator`, or drawn from torch's global one. Raises UserError for a callable
    that cannot be imported, does not take the options, or returns no module; its own errors keep their traceback.
    """
    part = OwnPart.open("model.arch", spec.arch, spec.options)
    with torch.device("cpu"):  # what a module makes when it is imported serves all its networks
        part.load()
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.manual_seed(generator.initial_seed())
        network, note = _built(partial(part.call, num_classes=spec.num_classes, num_frames=num_frames))
    if not isinstance(network, nn.Module):
        raise part.wrong("a torch.nn.Module", type(network).__name__)
    return ForeignNetwork(network, part, num_frames, spec.num_classes, in_channels, note)


def sources_of(arch: str) -> dict[str, str]:
    """Return the SHA-256 of the file that `arch` names, as a key of an experiment; {} for a built-in network.

    Nothing in the file runs. Of a dotted name, the packages that contain the module are imported.
    """
    return {"model.arch (SHA-256)": digest_of("model.arch", arch)} if is_foreign(arch) else {}


def check_sources(path: Path, state: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise UserError where `sources` are not those that the checkpoint `path` was trained with."""
    for key, digest in sources.items():
        if (before := state.get("experiment", {}).get(key)) != digest:
            changed = f"its network's code has changed: {key} was {before}, is {digest}"
            raise UserError(f"{path}: {changed}; restore the file, or set model.arch to a copy of the old one")


def check_norms(network: nn.Module) -> None:
    """Raise UserError for a module whose running statistics would depend on the number of ranks."""
    for name, module in network.named_modules():
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            kind = f"{name.removeprefix('network.')} is torch's {type(module).__name__}"
            right = "use BatchNorm, track_running_stats=False, or scale.gpus=1"
            raise UserError(f"model.arch: {kind}, whose running statistics would depend on the ranks; {right}")


def _built(build: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `build`, and a note where it cannot run on the meta device that is set."""
    try:
        return build(), ""
    except (RuntimeError, TypeError, ValueError) as error:
        if torch.get_default_device().type != "meta":
            raise
        # Tensors on the meta device have no numbers, which some networks read while they are built.
        with torch.device("cpu"):
            return build().to("meta"), f"on the CPU to be counted, as it cannot be on torch's meta device: {error}"
