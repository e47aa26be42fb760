"""Hundreds of damaged videos, from a seed: none crashes or holds its reader, none passes for what was indexed.

With the manifest that `data index` writes, which holds the SHA-256 of each file, none gives other frames without an
error. The decoder alone must neither crash, hang nor take memory without end, and finds what the format allows: VP9
decodes almost any bits to some picture. How much it misses is counted, not promised.
"""

from __future__ import annotations

import hashlib
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import av
import numpy as np
import pytest

from summit_train.data.check import spread
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError, Limits
from summit_train.data.video.stream import Progress, file_frames, pipe_frames
from tests.data.clips import all_of, probe, read_clip, stored_clip, write_sound

SEED = 20191
NUM_FRAMES = 16
SECONDS = 20.0  # that one file may hold its reader before an alarm ends it
MEGABYTES = 2500  # that a reader may come to
FORMATS = {
    "a.mp4": {"key_every": 6},
    "b.mkv": {"key_every": 5, "b_frames": 0},
    "c.webm": {"codec": "libvpx-vp9", "b_frames": 0},
    "d.avi": {"codec": "mpeg4", "b_frames": 0},
    "e.mov": {"b_frames": 3},
}
Mutate = Callable[[bytearray, np.random.Generator], bytes]


def _poked(content: bytearray, places: Iterable[int], change: Callable[[int], int]) -> bytes:
    for place in places:
        content[int(place)] = change(content[int(place)])
    return bytes(content)


def _cut(content: bytearray, generator: np.random.Generator, length: int, filler: bool) -> bytes:
    """Without `length` bytes at a random place, or with zeros for them."""
    start = int(generator.integers(len(content)))
    rest = content[start + length :]
    return bytes(content[:start] + bytes(len(content) - start - len(rest) if filler else 0) + rest)


KINDS: dict[str, tuple[Mutate, int]] = {
    "byte": (lambda c, r: _poked(c, [r.integers(len(c))], lambda old: old ^ int(r.integers(1, 256))), 14),
    "bits": (lambda c, r: _poked(c, r.integers(len(c), size=20), lambda old: old ^ 1 << int(r.integers(8))), 12),
    "zeros": (lambda c, r: _cut(c, r, int(2 ** r.integers(3, 13)), True), 12),
    "zero tail": (lambda c, r: _cut(c, r, len(c), True), 8),
    "cut": (lambda c, r: _cut(c, r, len(c), False), 16),
    "hole": (lambda c, r: _cut(c, r, int(r.integers(1, 600)), False), 8),
    "header": (
        lambda c, r: _poked(c, r.integers(min(400, len(c)), size=4), lambda old: int(r.choice([0, 0xFF, 0x7F, 0x80]))),
        10,
    ),
}


# Headers that ask for too much.


def _patched(content: bytes, mark: bytes, offset: int, new: bytes) -> bytes:
    """`new` in the place that lies `offset` bytes behind the first `mark`."""
    place = content.index(mark) + offset
    return content[:place] + new + content[place + len(new) :]


def _absurd(originals: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    mp4, mkv, avi = originals["a.mp4"], originals["b.mkv"], originals["d.avi"]
    yield "size.mp4", _patched(mp4, b"avc1", 28, b"\xff\xff\xff\xff")
    for mark, element in ((b"\xb0\x81", b"\xb0\x81\xff"), (b"\xba\x81", b"\xba\x81\xff")):
        yield f"size{element[0]}.mkv", _patched(mkv, mark, 0, element)
    header = avi.index(b"strf") + 12
    for number, size in enumerate((0x7FFFFFFF, 0x40000000, 0xFFFFFFFF, 0)):
        yield f"size{number}.avi", avi[:header] + 2 * size.to_bytes(4, "little") + avi[header + 8 :]
    # Samples: 2^28 of one byte each, and one of 2 GB.
    many = _patched(mp4, b"stsz", 8, (1).to_bytes(4, "big") + (1 << 28).to_bytes(4, "big"))
    yield "count.mp4", many
    yield "chunk.mp4", _patched(many, b"stsc", 16, (1 << 28).to_bytes(4, "big"))
    yield "sample.mp4", _patched(mp4, b"stsz", 16, (0x7FFFFFFF).to_bytes(4, "big"))
    for box in (b"stts", b"ctts", b"stsc", b"stco", b"stss"):
        if box in mp4:
            yield f"{box.decode()}.mp4", _patched(mp4, box, 8, (0x7FFFFFF0).to_bytes(4, "big"))


# The files.


def _frames() -> np.ndarray:
    generator = np.random.default_rng(SEED)
    y, x = np.mgrid[:48, :64]
    frames = np.stack([np.stack([3 * x + 9 * t, 5 * y + 4 * t, x + y + t], -1) % 256 for t in range(NUM_FRAMES)])
    frames[:, 10:30, 20:44] = generator.integers(0, 255, (NUM_FRAMES, 20, 24, 3))
    return frames.astype(np.uint8)


@dataclass(frozen=True)
class Mutants:
    """Files by name, the original that each stands for, and what was done to it; the originals' frames as digests."""

    folder: Path
    kinds: dict[str, str]
    originals: dict[str, str]
    frames: dict[str, str]


def _write_others(folder: Path, originals: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Files that are no videos at all, by name and kind."""
    text = "not a video\n" * 500
    contents = {"text.mp4": text.encode(), "text.mkv": b"\0", "empty.avi": b"", "zeros.webm": bytes(20_000)}
    contents["noise.mp4"] = np.random.default_rng(SEED).bytes(20_000)
    contents["playlist.mp4"] = b"#EXTM3U\n#EXTINF:9,\na.mp4\n#EXT-X-ENDLIST\n"
    contents["page.webm"] = b"<!DOCTYPE html><html><body>404</body></html>"
    contents["start.mp4"] = originals["a.mp4"][:8]
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield name, "no video"
    (folder / "directory.mp4").mkdir()
    os.mkfifo(folder / "pipe.mp4")
    (folder / "loop.mp4").symlink_to("loop.mp4")
    write_sound(folder / "sound.mp4")
    for name in ("directory.mp4", "pipe.mp4", "loop.mp4", "sound.mp4"):
        yield name, "no video"


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = tmp_path_factory.mktemp("mutants")
    originals, kinds, sources = dict[str, bytes](), dict[str, str](), dict[str, str]()
    for name, options in FORMATS.items():
        if options.get("codec", "libx264") not in av.codecs_available:
            pytest.skip(f"this PyAV has no {options.get('codec', 'libx264')}")
        write_video(folder / name, _frames(), **options)
        originals[name] = (folder / name).read_bytes()
    generator = np.random.default_rng(SEED)
    for name, content in originals.items():
        for kind, (mutate, count) in KINDS.items():
            for number in range(count):
                mutant = f"{kind.replace(' ', '_')}{number}_{name}"
                (folder / mutant).write_bytes(mutate(bytearray(content), generator))
                kinds[mutant], sources[mutant] = kind, name
        wrong = f"wrong_ending_{name}.{'mkv' if name != 'b.mkv' else 'avi'}"
        (folder / wrong).write_bytes(content)
        kinds[wrong], sources[wrong] = "wrong ending", name
    for name, content in _absurd(originals):
        (folder / name).write_bytes(content)
        same_ending = [source for source in FORMATS if Path(source).suffix == Path(name).suffix]
        kinds[name], sources[name] = "absurd header", next(iter(same_ending), "a.mp4")
    for name, kind in _write_others(folder, originals):
        kinds[name], sources[name] = kind, "a.mp4"
    return Mutants(folder, kinds, sources, {name: _digest(folder / name) for name in originals})


def _digest(path: Path) -> str:
    return hashlib.sha256(read_clip(path, np.arange, all_of, NUM_FRAMES).tobytes()).hexdigest()


def test_none_passes_for_the_video_that_was_indexed(mutants: Mutants) -> None:
    """The manifest has each original's frame count and SHA-256; the file is damaged afterwards."""
    contents = {name: (mutants.folder / name).read_bytes() for name in FORMATS}
    rows = [
        ManifestRow(name, 0, NUM_FRAMES, sha256=hashlib.sha256(contents[original]).hexdigest())
        for name, original in mutants.originals.items()
    ]
    write_manifest(mutants.folder / "list.csv", rows)
    store = FileStore(read_manifest(mutants.folder / "list.csv"), str(mutants.folder))
    assert len(rows) >= 300 and {*KINDS, "wrong ending", "absurd header", "no video"} == set(mutants.kinds.values())
    num_equal = 0
    for clip, (name, original) in enumerate(mutants.originals.items()):
        try:
            frames = stored_clip(store, clip, np.arange, all_of)
        except DecodeError as error:
            assert error.reason and "\n" not in str(error)
        else:
            assert hashlib.sha256(frames.tobytes()).hexdigest() == mutants.frames[original], name
            # Its name alone is wrong, or zeros were written over zeros.
            assert (mutants.folder / name).read_bytes() == contents[original], name
            num_equal += 1
    assert num_equal >= len(FORMATS)


def _look(root: str, path: str) -> tuple[bool, str | None, int]:
    """Read a file: whether it has facts, a digest of its frames or None for an error, and the reader's memory in MB."""
    full = os.path.join(root, path)
    limits = Limits(seconds=SECONDS / 4)
    has_facts = False
    digest = None
    with suppress(DecodeError):
        probe(full, limits)
        has_facts = True
    with suppress(DecodeError):
        digest = hashlib.sha256(read_clip(full, np.arange, all_of, NUM_FRAMES, limits=limits).tobytes()).hexdigest()
    return has_facts, digest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_the_decoder_alone_survives_all_of_them(mutants: Mutants) -> None:
    """Run in a reader of its own, which an alarm would end: a crash and a hang would both come back as errors."""
    names = list(mutants.kinds)
    missed = Counter[str]()
    found = spread(partial(_look, str(mutants.folder)), names, workers=1, seconds=SECONDS)
    for name, seen in zip(names, found, strict=True):
        assert not isinstance(seen, DecodeError), str(seen)
        has_facts, digest, megabytes = seen
        assert megabytes < MEGABYTES, name
        if has_facts and digest not in (None, mutants.frames[mutants.originals[name]]):
            missed[f"{mutants.kinds[name]}, {Path(name).suffix}"] += 1
    print(f"{len(names)} files; other frames without an error, by the decoder alone: {dict(missed)}")
    # What is cut short, empty, or no video is found by an index without knowing any hash.
    assert not [what for what in missed if what.startswith(("cut", "no video", "wrong"))]


@pytest.mark.parametrize("is_piped", [False, True])
def test_a_stream_of_each_of_them_ends_and_says_what_it_lacks(mutants: Mutants, is_piped: bool) -> None:
    for name in sorted(mutants.kinds):
        path, progress = mutants.folder / name, Progress()
        if is_piped and not path.is_file():
            continue
        try:
            with FileIO(path) if is_piped else nullcontext() as pipe:
                frames = file_frames(str(path), progress) if pipe is None else pipe_frames(pipe, progress)
                num_whole = sum(1 for _ in frames)
        except DecodeError as error:
            assert "\n" not in str(error), name
        else:
            assert num_whole == progress.num_frames - progress.num_damaged, name
            assert num_whole == NUM_FRAMES or progress.damage, name
