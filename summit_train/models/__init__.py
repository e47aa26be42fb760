"""The video networks, on torch alone."""

from summit_train.models.build import build_model
from summit_train.models.resnet import VideoResNet

__all__ = ["VideoResNet", "build_model"]
