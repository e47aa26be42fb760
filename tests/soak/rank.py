"""A rank of the soak: `summit-train ...`, whose losses are NaN from SIGUSR1 on."""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

from summit_train.__main__ import main
from summit_train.models import VideoNetwork


def poison_on_request() -> None:
    """Let SIGUSR1 make every later output of a network NaN, as a broken processor would."""
    honest, poisoned = VideoNetwork.forward, list[int]()
    signal.signal(signal.SIGUSR1, lambda number, frame: poisoned.append(number))

    def forward(self: VideoNetwork, clips: torch.Tensor) -> Any:
        logits = honest(self, clips)
        return logits * float("nan") if poisoned and not clips.is_meta else logits

    VideoNetwork.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    poison_on_request()
    sys.exit(main(sys.argv[1:]))
