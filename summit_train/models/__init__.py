"""The video networks."""

from summit_train.models.build import build_model
from summit_train.models.video import VideoNetwork

__all__ = ["VideoNetwork", "build_model"]
