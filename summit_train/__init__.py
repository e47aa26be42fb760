"""Large-scale training of video networks: one spec, any number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from summit_train.inference.loaded import Loaded

__version__ = "0.3.0"
__all__ = ["load"]


def load(
    run: str | Path, *overrides: str, checkpoint: str = "last", device: str | torch.device | None = None
) -> Loaded:
    """Open a trained network, from a run folder or a checkpoint file, to use it in Python.

    `overrides`: keys of the spec, as on the command line: `"evaluate.clips=1"`. `checkpoint`, for a run
    folder: `"last"`, `"best"` or the path of one of its checkpoints. `device`: by default a GPU if there is one. Raises
    UserError, with one line, for what cannot be opened, and for networks that do not classify videos.
    """
    # Imported here: `import summit_train` takes no time, and needs no torch.
    from summit_train.inference.loaded import Loaded

    return Loaded(run, overrides, checkpoint, device)
