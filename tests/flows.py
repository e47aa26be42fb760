"""Sets of optical flow that tests make by hand: folders of pictures and packed sets, of videos with known fields."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from summit_train.core.files import file_sha256
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.reading import PACK_FILE, PACKED_MANIFEST, write_packed_manifest
from summit_train.data.packed.format import (
    CLIP_ROW,
    CLIPS,
    CONTENT_AT,
    INDEX_FOLDER,
    PICTURE_ROW,
    PICTURES,
    SHARD_END,
    Facts,
    Pack,
    Packing,
    StoredFile,
    around_content,
    picture_checksum,
    shard_name,
)
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


def write_packed(out: Path, videos: Sequence[Fields], labels: Sequence[int], modality: str = "flow") -> Path:
    """A packed set of one shard; of rgb, each field's two pictures are two frames."""
    packing = Packing("jpeg", quality=95)
    if modality == "flow":
        packing = Packing("jpeg", quality=95, modality="flow", bound=20.0, method="by hand")
    out.mkdir(parents=True)
    clips, pictures, shard = list[tuple[int, ...]](), list[tuple[int, int]](), b""
    counts = [len(fields) * (1 if modality == "flow" else 2) for fields in videos]
    for number, fields in enumerate(videos):
        facts = Facts(Clip(f"{number}.mp4"), labels[number], counts[number], fields.shape[3], fields.shape[2])
        contents = [_jpeg(picture) for picture in fields.reshape(-1, *fields.shape[2:])]
        row = (0, 0, len(shard) + CONTENT_AT, sum(map(len, contents)), len(pictures))
        clips.append((*row, fields.shape[3], fields.shape[2], facts.checksum()))
        ends = np.cumsum([len(content) for content in contents]).tolist()
        sums = [picture_checksum(facts.checksum(), i, content) for i, content in enumerate(contents)]
        pictures += zip(ends, sums, strict=True)
        content = b"".join(contents)
        shard += content.join(around_content(number, ".mjpeg", len(content), facts))
    shard += SHARD_END
    (out / shard_name(0)).write_bytes(shard)
    (out / INDEX_FOLDER).mkdir()
    np.save(out / INDEX_FOLDER / CLIPS, np.array(clips, CLIP_ROW))
    np.save(out / INDEX_FOLDER / PICTURES, np.array(pictures, PICTURE_ROW))
    manifest = replace(
        plain_manifest([f"{number}.mp4" for number in range(len(videos))]),
        labels=np.array(labels, np.int32),
        frame_counts=np.array(counts, np.int32),
        pixels=packing.pixels,
    )
    fingerprint = write_packed_manifest(out, manifest)
    files = [
        out / shard_name(0),
        *sorted(path for name in (PACKED_MANIFEST, INDEX_FOLDER) for path in (out / name).iterdir()),
    ]
    stored = [StoredFile(str(path.relative_to(out)), path.stat().st_size, file_sha256(path)) for path in files]
    pack = Pack(packing, len(videos), len(videos), fingerprint, tuple(stored[:1]), tuple(stored[1:]))
    (out / PACK_FILE).write_text(pack.text())
    return out


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "JPEG", quality=95)
    return content.getvalue()
