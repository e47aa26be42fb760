"""The pixels that training and tests read of every kind of set, for fixed keys: a rewrite of a reader moves none.

Each row of the golden file is one batch: its SHA-256, and means of blocks of its pixels. The digests hold for the PyAV
and Pillow that the file names, which decode and scale, on processors with AVX2; elsewhere the means must agree to a few
grey levels. Write the file anew only where a change is meant to move pixels or keyed draws, and give the reason in the
commit:
    python -m tests.data.test_golden_pixels
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL
import pytest
from numpy.typing import NDArray
from PIL import Image

from summit_train.__main__ import main
from summit_train.data.batches.loader import test_batches as read_test_batches
from summit_train.data.batches.loader import whole_videos
from summit_train.data.batches.order import Order
from summit_train.data.dataset import Dataset
from summit_train.spec import Spec, spec_from_values
from tests.conftest import made_once
from tests.data.clips import write_as
from tests.flows import write_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "pixels.json"
BY = {"av": av.__version__, "pillow": PIL.__version__}
GREY_LEVELS = 3  # between means of other decoders; without any vector instructions they differ by 0.9
NUM_FRAMES, HEIGHT, WIDTH = 26, 48, 64
FORMS = {
    "whole": "{name},{label},{frames}",
    "span": "{name},{label},{start},{end}",
    "region": "{name},{label},{left},3,41,37",
    "reversed": "{name},{label},{reversed}",
}
HEADERS = {
    "whole": "path,label,num_frames",
    "span": "path,label,start_frame,end_frame",
    "region": "path,label,left,top,width,height",
    "reversed": "path,label,reversed",
}
# The keys of `data` that vary how a clip is read, on plain files.
VARIED: dict[str, dict[str, Any]] = {
    "uniform": {"sampling": "uniform"},
    "multi_scale_crop": {"augment": "multi_scale_crop", "short_side": [40, 40]},
    "rand_augment": {"augment": "rand_augment"},
    "repeats": {"repeats": 2},
    "balance": {"balance": "classes"},
    "no flip": {"flip": False},
    "one short side": {"short_side": [32, 32]},
}


def _moving(number: int) -> NDArray[np.uint8]:
    """A coloured texture that moves by (2, 1) pixels a frame, brighter with time: uint8 (F, H, W, 3)."""
    generator = np.random.default_rng(number)
    coarse = generator.integers(20, 180, (12, 14, 3), np.uint8)
    texture = np.asarray(Image.fromarray(coarse).resize((WIDTH + 2 * NUM_FRAMES, HEIGHT + NUM_FRAMES), 2))
    views = [texture[t : t + HEIGHT, 2 * t : 2 * t + WIDTH] + 2 * t for t in range(NUM_FRAMES)]
    return np.stack(views).astype(np.uint8)


def write_sets(folder: Path) -> None:
    """Write four videos, as files and as folders of pictures, four of flow, their lists, and the sets packed of them.

    The files are an MP4 with B-frames, an AVI of MPEG-4, an MP4 on its side and a Matroska file.
    """
    names = {"files": ["0.mp4", "1.avi", "2.mp4", "3.mkv"]}
    encodings: list[dict[str, Any]] = [{}, {"codec": "mpeg4", "b_frames": 0}, {"rotation": 180}, {"key_every": 5}]
    names["pictures"], names["flow"] = ([f"{kind}{number}" for number in range(4)] for kind in ("p", "f"))
    for number, (name, encoding) in enumerate(zip(names["files"], encodings, strict=True)):
        frames = _moving(number)
        write_as(folder / name, frames, **encoding)
        (folder / f"p{number}").mkdir()
        for place, frame in enumerate(frames, 1):
            Image.fromarray(frame).save(folder / f"p{number}" / f"img_{place:05}.png")
        write_folder(folder / f"f{number}", np.stack([frames[:-1, ..., 0], frames[:-1, ..., 1]], 1))
    for kind, paths in names.items():
        for form, row in FORMS.items():
            lines = [
                row.format(
                    name=name,
                    label=number % 3,
                    frames=(NUM_FRAMES - (kind == "flow")) if number % 2 else "",
                    start=2 + 3 * number,
                    end=13 + 3 * number,
                    left=5 + 4 * number,
                    reversed=int(number != 1),
                )
                for number, name in enumerate(paths)
            ]
            (folder / f"{kind}_{form}.csv").write_text("\n".join([HEADERS[form], *lines]) + "\n")
    for form in FORMS:
        cut = ["--region", "columns"] if form == "region" else []
        for kind in ("jpeg", "video") if cut else ("bytes", "jpeg", "video"):  # bytes are packed unchanged
            _command("data", "pack", folder / f"files_{form}.csv", folder / f"{kind}_{form}", "--kind", kind, *cut)
        if form != "reversed":  # flow has no direction to be played in
            made = ["--method", "dis", *cut]
            _command("data", "flow", folder / f"files_{form}.csv", folder / f"packed_flow_{form}", *made)
    boxes = ["video,frame,track,label,left,top,width,height"]
    for number, name in enumerate(names["files"]):
        places = [(frame, 4 + frame, 6 + number, 20, 24) for frame in range(0, NUM_FRAMES, 2)]
        boxes += [f"{name},{frame},0,{number % 3},{x},{y},{w},{h}" for frame, x, y, w, h in places]
    (folder / "boxes.csv").write_text("\n".join(boxes) + "\n")


def _command(*words: object) -> None:
    assert main([*map(str, words), "--workers", "0"]) == 0, words


def _spec(folder: Path, source: str, **data: Any) -> Spec:
    values: dict[str, Any] = {
        "name": "pixels",
        "model": {"arch": "tsn", "backbone": "resnet18", "width": 0.125, "num_classes": 3},
        "data": {
            "train": str(folder / source), "val": str(folder / source), "num_frames": 4, "frame_stride": 3,
            "short_side": [32, 40], "crop": 32, "workers": 0, **data,
        },
        "scale": {"gpus": 1, "clips_per_gpu": 4},
        "evaluate": {"clips": 2, "crops": 3, "short_side": 36},
    }  # fmt: skip
    if source == "boxes.csv":
        values |= {"task": "detection", "loss": {"kind": "detection"}}
        values["model"] |= {"arch": "tsm", "detector": {}, "shift_direction": "past"}
        values["evaluate"] |= {"clips": 1, "crops": "full", "mode": "stream"}
    return spec_from_values(values, "pixels")


def specs(folder: Path) -> dict[str, Spec]:
    """Return a spec for each batch of the golden file, by its row's name."""
    rows = dict[str, Spec]()
    for kind in ("files", "pictures", "bytes", "jpeg", "video"):
        for form in FORMS:
            if (kind, form) == ("bytes", "region"):
                continue
            cut = {"region": "columns"} if form == "region" else {}
            source = f"{kind}_{form}" + (".csv" if kind in ("files", "pictures") else "")
            rows[f"{kind}, {form}"] = _spec(folder, source, **cut)
    for kind, end in (("flow", ".csv"), ("packed_flow", "")):
        for form in ("whole", "region") if kind == "flow" else ("whole", "span", "region"):
            flow: dict[str, Any] = {"modality": "flow", "flow_length": 3, "sampling": "uniform"}
            flow |= {"region": "columns"} if form == "region" else {}
            rows[f"{kind}, {form}"] = _spec(folder, f"{kind}_{form}{end}", **flow)
    rows["flow, one short side"] = _spec(folder, "flow_region.csv", **flow, short_side=[32, 32])
    rows["boxes"] = _spec(folder, "boxes.csv", span_frames=7, augment="whole", crop=32)
    for name, data in VARIED.items():
        rows[f"files, {name}"] = _spec(folder, "files_whole.csv", **data)
    return rows


def batches_of(spec: Spec) -> Iterator[tuple[str, list[NDArray[Any]]]]:
    """Yield the arrays of the first training batch, of the test views and of all frames, with the name of each."""
    train = Dataset.open(spec, "train")
    clips = 4 // spec.data.repeats
    order = Order(len(train), 7, 1, clips, len(train) // clips)
    with train.training_batches(order, 0, 1, range(1)) as batches:
        batch = next(batches)
        yield "training", [batch.clips.numpy(), batch.labels.numpy(), batch.ids.numpy()]
    val = Dataset.open(spec, "val")
    with read_test_batches(spec.data, spec.evaluate, val.store, range(len(val))) as tests:
        yield "test", [array for test in tests for array in (test.views.numpy(), test.frames)]
    videos = whole_videos(spec.data, spec.evaluate, val.store, range(len(val)), np.arange)
    blocks = [block for video in videos for block in video.blocks()]
    yield "whole videos", [array for block in blocks for array in (block.views.numpy(), block.numbers)]


def row_of(arrays: list[NDArray[Any]]) -> dict[str, Any]:
    """Return a digest of all arrays, and of the first one the means of thirds of its pixels' rows."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    first = arrays[0].astype(np.float64)
    thirds = [float(rows.mean()) for view in first for rows in np.array_split(view, 3, axis=1)]
    return {"sha256": digest.hexdigest(), "shape": list(first.shape), "means": [round(mean, 1) for mean in thirds]}


def pixels(folder: Path) -> dict[str, Any]:
    """Return the rows of the golden file, of sets that `write_sets` wrote into a folder."""
    return {
        f"{name}, {use}": row_of(arrays) for name, spec in specs(folder).items() for use, arrays in batches_of(spec)
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "golden pixels", write_sets)


def test_every_reader_gives_the_pixels_of_the_golden_file(sets: Path) -> None:
    golden, found = json.loads(GOLDEN.read_text()), pixels(sets)
    assert list(found) == list(golden["batches"])
    for name, row in golden["batches"].items():
        assert found[name]["shape"] == row["shape"], name
        assert found[name]["means"] == pytest.approx(row["means"], abs=GREY_LEVELS), name
    if golden["by"] == BY and "avx2" in Path("/proc/cpuinfo").read_text():
        moved = [name for name, row in golden["batches"].items() if found[name]["sha256"] != row["sha256"]]
        assert not moved


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_sets(Path(name))
        rows = pixels(Path(name))
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        GOLDEN.write_text(f'{{"by": {json.dumps(BY)}, "batches": {{\n{lines}\n}}}}\n')
        print(f"{os.path.relpath(GOLDEN)}: {len(rows)} batches")
