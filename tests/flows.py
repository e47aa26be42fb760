"""Sets of optical flow that tests make by hand: folders of pictures and packed sets, of videos with known fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing
from summit_train.data.packed.pack import pack_set
from summit_train.data.video.flow import BOUND
from summit_train.spec.catalog import FLOW_ZERO

Fields = NDArray[np.uint8]  # of one video, as pictures hold them: (F, 2, H, W)


def decode(code: NDArray[np.uint8], bound: float = BOUND) -> NDArray[np.float32]:
    """Return the flow in pixels, (v - 128) * step with step = 2 * bound / 255, within the bound.

    Zero stays exactly zero, and 256 - v is exactly the negative of v. The code rounds about 127.5, so other values come
    out up to one step too small (0.157 pixels with a bound of 20), half a step on average.
    """
    flow: NDArray[np.float32] = (code.astype(np.float32) - FLOW_ZERO) * np.float32(2 * bound / 255)
    return flow.clip(-bound, bound)


def numbered_fields(num_fields: int, height: int = 32, width: int = 40) -> Fields:
    """Fields that can be told apart: x of field t is 10 + t everywhere, y is 110 + t."""
    values = np.array([10, 110])[None] + np.arange(num_fields)[:, None]
    return np.broadcast_to(values[..., None, None], (num_fields, 2, height, width)).astype(np.uint8)


def moving_fields(label: int, num_fields: int, generator: np.random.Generator, side: int = 32) -> Fields:
    """A uniform motion of 4 pixels with noise: label 0 to 3 is right, down, left, up."""
    x, y = [(4, 0), (0, 4), (-4, 0), (0, -4)][label]
    flow = np.array([x, y])[None, :, None, None] + generator.normal(0, 2, (num_fields, 2, side, side))
    return encoded(flow)


def encoded(flow: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Flow in pixels as pictures hold it, for a bound of 20 pixels."""
    return np.round(255 * (flow.clip(-20, 20) + 20) / 40).astype(np.uint8)


def write_folder(folder: Path, fields: Fields) -> None:
    """One video's flow_x_00001.png, flow_y_00001.png, and so on: without a loss."""
    folder.mkdir(parents=True)
    for number, field in enumerate(fields, 1):
        for axis, picture in zip("xy", field, strict=True):
            Image.fromarray(picture).save(folder / f"flow_{axis}_{number:05}.png")


def write_folders(root: Path, videos: Sequence[Fields], labels: Sequence[int], name: str) -> Path:
    """Folders of flow below `root` and their manifest, root/NAME.csv."""
    rows = []
    for number, (fields, label) in enumerate(zip(videos, labels, strict=True)):
        write_folder(root / name / f"{number:03}", fields)
        rows.append(ManifestRow(f"{name}/{number:03}", label, len(fields)))
    write_manifest(root / f"{name}.csv", rows)
    return root / f"{name}.csv"


def write_moving_set(root: Path, num_train: int, num_val: int, num_fields: int = 6) -> Path:
    """root/train.csv and root/val.csv, four classes of motion, folders of flow."""
    generator = np.random.default_rng(0)
    for name, number in (("train", num_train), ("val", num_val)):
        labels = [video % 4 for video in range(number)]
        write_folders(root, [moving_fields(label, num_fields, generator) for label in labels], labels, name)
    return root


def write_packed(out: Path, videos: Sequence[Fields], labels: Sequence[int]) -> Path:
    """Pack folders of flow without a loss."""
    listed = write_folders(out.with_name(f"{out.name} raw"), videos, labels, "all")
    store = FileStore(read_manifest(listed), str(listed.parent))
    pack_set(store, out, Packing("bytes", modality="flow", bound=BOUND), 1 << 20)
    return out
