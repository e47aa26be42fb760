"""R-FCN (Dai et al., 2016) on a ResNet or MobileNetV2, as in FGFA's code (msracver/Flow-Guided-Feature-Aggregation).

All its parameters are in front of its maps. What follows, from anchors to boxes and losses, has none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from summit_train.models.resnet import scaled_channels
from summit_train.models.video import VideoNetwork
from summit_train.spec import ModelSpec
from summit_train.spec.model_data import DetectorSpec

STRIDE = 16  # pixels of the frame for a place of the maps
_CLASSIFIERS = ("avgpool", "dropout", "fc", "classifier")


class Maps(NamedTuple):
    """The output of F frames, with A anchors for each place, K classes and g x g cells, h x w places each.

    rpn_scores: (F, A * 2, h, w), for each anchor background and object. rpn_boxes: (F, A * 4, h, w). class_maps:
    (F, g * g * (K + 1), h, w), for each cell, row by row, the background and the classes. box_maps:
    (F, g * g * 8, h, w), for each cell four of the background, which nothing reads or trains, and four of an object.
    """

    rpn_scores: torch.Tensor
    rpn_boxes: torch.Tensor
    class_maps: torch.Tensor
    box_maps: torch.Tensor


def map_channels(detector: DetectorSpec, num_classes: int) -> tuple[int, int, int, int]:
    """Return the channels of each of the Maps."""
    anchors, cells = len(detector.anchor_sides) * len(detector.anchor_ratios), detector.grid**2
    return 2 * anchors, 4 * anchors, cells * (num_classes + 1), cells * 8


def split_maps(output_FCHW: torch.Tensor, detector: DetectorSpec, num_classes: int) -> Maps:
    """Return the Maps of the network's output for F frames: it has their channels one after the other."""
    return Maps(*torch.split(output_FCHW, list(map_channels(detector, num_classes)), 1))


class DetectorHead(nn.Module):
    """A dilated 3x3 convolution, one half of its channels for the proposals and one for the position-sensitive maps."""

    def __init__(self, in_channels: int, channels: int, detector: DetectorSpec, num_classes: int) -> None:
        super().__init__()
        scores, deltas, classes, boxes = map_channels(detector, num_classes)
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=6, dilation=6)
        self.rpn_scores = nn.Conv2d(channels // 2, scores, 1)
        self.rpn_boxes = nn.Conv2d(channels // 2, deltas, 1)
        self.boxes = nn.Conv2d(channels // 2, boxes, 1)
        self.classes = nn.Conv2d(channels // 2, classes, 1)  # the last: weights of other classes leave it as it is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rpn, rfcn = functional.relu(self.conv(x)).chunk(2, 1)
        return torch.cat([self.rpn_scores(rpn), self.rpn_boxes(rpn), self.classes(rfcn), self.boxes(rfcn)], 1)


class RFCN(VideoNetwork):
    """The trunk of a network on frames, at a stride of 16, and the detector's head.

    Float (N, T, C, H, W) to maps (N, T, channels, h, w), see split_maps; h and w are a 16th of H and W, rounded up. It
    takes over the modules of `trunk` under their names, so that weights of a classification network fit.
    """

    head = "detector"

    def __init__(self, trunk: VideoNetwork, detector: DetectorSpec, num_classes: int, width: float) -> None:
        super().__init__(trunk.num_frames, dict(trunk.stages), trunk.in_channels)
        self.sequences, self.stem = trunk.sequences, trunk.stem
        (classifier,) = (module for module in trunk.modules() if isinstance(module, nn.Linear))
        self._trunk = [name for name, _ in trunk.named_children() if name not in _CLASSIFIERS]
        for name in self._trunk:
            self.add_module(name, trunk.get_submodule(name))
        _dilate_last_stage(self)
        channels = scaled_channels(detector.channels, width)
        self.detector = DetectorHead(classifier.in_features, channels, detector, num_classes)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._trunk:
            x = self.get_submodule(name)(x)
        return x

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.detector(self.feature_maps(x))
        return maps

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def per_clip(self, outputs: torch.Tensor, num_clips: int) -> torch.Tensor:
        """Return the maps of each frame: frames are not averaged."""
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return outputs.view(num_clips, -1, *outputs.shape[1:]).to(wide)

    def initialise_head(self, generator: torch.Generator | None) -> None:
        for module in self.detector.children():
            assert isinstance(module, nn.Conv2d) and module.bias is not None
            nn.init.normal_(module.weight, 0.0, 0.01, generator)
            nn.init.zeros_(module.bias)

    def freeze_stem(self) -> None:
        """Freeze what comes before a stride of 8: conv1 and res2, in MobileNetV2 the first three bottlenecks."""
        is_resnet = "layer1" in self._trunk
        for name in ("conv1", "bn1", "layer1") if is_resnet else [f"features.{number}" for number in range(4)]:
            self.get_submodule(name).requires_grad_(False)
        self.train(self.training)  # frozen normalisations are in evaluation mode


def build_rfcn(
    trunk: VideoNetwork, model: ModelSpec, detector: DetectorSpec, generator: torch.Generator | None
) -> RFCN:
    """Return the detector of a spec on a plain network, with its frozen parts, its head drawn from `generator`."""
    network = RFCN(trunk, detector, model.num_classes, model.width)
    network.initialise_head(generator)
    if detector.freeze_stem:
        network.freeze_stem()
    return network


def _dilate_last_stage(trunk: nn.Module) -> None:
    """Take the last stride out of a trunk and dilate the 3x3 convolutions from there on, so that they see as far."""
    convs = [module for module in trunk.modules() if isinstance(module, nn.Conv2d)]
    last = max(i for i, conv in enumerate(convs) if (conv.kernel_size, conv.stride) == ((3, 3), (2, 2)))
    for conv in convs[last:]:
        conv.stride = (1, 1)
        if conv.kernel_size == (3, 3):
            conv.dilation = conv.padding = (2, 2)
