"""The video networks. The catalog of their names needs no torch; `build_model` and VideoNetwork bring it in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from summit_train.models.build import build_model
    from summit_train.models.video import VideoNetwork

__all__ = ["VideoNetwork", "build_model"]


def __getattr__(name: str) -> Any:
    if name == "build_model":
        from summit_train.models.build import build_model

        return build_model
    if name == "VideoNetwork":
        from summit_train.models.video import VideoNetwork

        return VideoNetwork
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
