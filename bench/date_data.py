"""MNIST and the Penn Treebank for bench/date.py: files read into memory, cut into micro-batches, and scored on."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from date_networks import Network, State, WordLSTM
from numpy.typing import NDArray
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import Order, virtual_gpus_of
from summit_train.models.precision import Normalise
from summit_train.spec.modality import Modality

# Mean and standard deviation over MNIST's training images.
GREY = Modality("grey", channels=1, mean=(0.1307 * 255,), std=(0.3081 * 255,))
SEQUENCE = 20  # words of PTB's small model, section 4.1.2
MOST_WORDS = 10_000  # different ones
_SCORED_AT_ONCE = 1_000  # images
_SCORED_ROWS = 20  # of a text


class DataError(UserError):
    """A file of the data is missing or is not what its name says."""


@dataclass(frozen=True)
class Share:
    """What a rank trains on: `virtual_gpus` of `samples` each make a step, `steps` of them an epoch."""

    rank: int
    ranks: int
    virtual_gpus: int
    samples: int
    steps: int

    @property
    def mine(self) -> range:
        """Return the virtual GPUs of this rank."""
        return virtual_gpus_of(self.rank, self.ranks, self.virtual_gpus)


class Data(Protocol):
    """The training and test data of a task, in memory. num_samples: for training."""

    num_samples: int
    modality: Modality | None

    def epoch(self, seed: int, share: Share, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield a rank's micro-batches of each step of an epoch, one for each of its virtual GPUs."""

    def score(self, model: Network, device: torch.device) -> dict[str, float]:
        """Return the figures of the test set, `test` among them."""


@dataclass(frozen=True)
class Images:
    """Digits: images uint8 (n, 1, 28, 28, 1), clips of one frame, and labels int64 (n,)."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    modality: Modality | None = GREY

    @property
    def num_samples(self) -> int:
        """The training images."""
        return len(self.labels)

    def epoch(self, seed: int, share: Share, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches in an order that the seed and the epoch decide."""
        order = Order(self.num_samples, seed, share.virtual_gpus, share.samples, share.steps)
        taken = []
        for step, gpu, _, places in order.micro_batches(share.rank, share.ranks, _steps(share, epoch)):
            ids = torch.from_numpy(places)
            taken.append(MicroBatch(step, gpu, self.images[ids], self.labels[ids], ids))
            if len(taken) == len(share.mine):
                yield taken
                taken = []

    @torch.no_grad()
    def score(self, model: Network, device: torch.device) -> dict[str, float]:
        """Return the accuracy on the test images in percent."""
        normalise, right = Normalise(next(model.parameters()).dtype, device, GREY), 0
        for images, labels in zip(
            self.test_images.split(_SCORED_AT_ONCE), self.test_labels.split(_SCORED_AT_ONCE), strict=True
        ):
            right += int((model(normalise(images)).argmax(1).cpu() == labels).sum())
        return {"test": 100 * right / len(self.test_labels)}


@dataclass(frozen=True)
class Text:
    """Words as numbers, int64, as one long line each for training, validation and test."""

    words: torch.Tensor
    valid_words: torch.Tensor
    test_words: torch.Tensor
    modality: Modality | None = None

    @property
    def num_samples(self) -> int:
        """The training sequences of SEQUENCE words, each with the word after it."""
        return (len(self.words) - 1) // SEQUENCE

    def epoch(self, seed: int, share: Share, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield SEQUENCE words of each row in each step: the text is cut into as many rows as the batch has samples."""
        rows = share.virtual_gpus * share.samples
        inputs, targets = rows_of(self.words, rows)
        for step, number in enumerate(_steps(share, epoch)):
            now, taken = slice(step * SEQUENCE, (step + 1) * SEQUENCE), []
            for gpu in share.mine:
                ids = torch.arange(gpu * share.samples, (gpu + 1) * share.samples)
                taken.append(MicroBatch(number, gpu, inputs[ids, now], targets[ids, now].reshape(-1), ids))
            yield taken

    def score(self, model: Network, device: torch.device) -> dict[str, float]:
        """Return the perplexities of test and validation text, infinity where they are beyond floats."""
        assert isinstance(model, WordLSTM)
        return {
            "test": perplexity(model, self.test_words, device),
            "valid": perplexity(model, self.valid_words, device),
        }


def _steps(share: Share, epoch: int) -> range:
    return range(epoch * share.steps, (epoch + 1) * share.steps)


def rows_of(words: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a text into rows; return words and the words after them, (rows, words of a row). A rest is left out."""
    length = (len(words) - 1) // rows
    inputs, targets = (words[start : start + rows * length].view(rows, length) for start in (0, 1))
    return inputs, targets


@torch.no_grad()
def perplexity(model: WordLSTM, words: torch.Tensor, device: torch.device, rows: int = _SCORED_ROWS) -> float:
    """Return exp of the mean loss of a word, the text read in `rows` rows with the state carried along."""
    inputs, targets = rows_of(words, rows)
    state: State | None = None
    loss, parts = 0.0, list(zip(inputs.split(SEQUENCE, 1), targets.split(SEQUENCE, 1), strict=True))
    for before, after in parts:
        logits, state = model.unrolled(before.to(device), state)
        loss += float(functional.cross_entropy(logits, after.reshape(-1).to(device), reduction="sum"))
    mean = loss / targets.numel()
    return math.exp(mean) if mean < 700 else math.inf


# --- files


def read_mnist(folder: Path) -> Images:
    """Read MNIST's four IDX files, gzipped or not. Raises DataError."""
    arrays = []
    for part in ("train", "t10k"):
        images = read_idx(folder, f"{part}-images-idx3-ubyte")
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte")
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise DataError(
                f"{folder}: {part} has images {images.shape} and labels {labels.shape}; as many of 28 x 28 pixels and "
                "labels of 0 to 9 are wanted"
            )
        arrays += [torch.from_numpy(images[:, None, :, :, None]), torch.from_numpy(labels.astype(np.int64))]
    return Images(*arrays)


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Read an IDX file of uint8: 0, 0, 8, the dimensions, each one's size as int32, big-endian; then the values."""
    path, content = _content(folder, name)
    dims = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dims
    if content[:3] != b"\0\0\x08" or len(content) < header:
        raise DataError(f"{path}: is no IDX file of bytes (it begins with {content[:4].hex(' ') or 'nothing'})")
    shape = np.frombuffer(content, ">i4", dims, 4)
    if len(content) != header + math.prod(shape.tolist()):
        raise DataError(f"{path}: has {len(content):,} bytes, which is not what its sizes {shape.tolist()} make")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape.tolist()).copy()


def read_ptb(folder: Path) -> Text:
    """Read ptb.train.txt, ptb.valid.txt and ptb.test.txt, gzipped or not; each end of a line is the word <eos>.

    Words are numbered by how often the training text has them. Raises DataError, also for a word that it has not.
    """
    texts = {part: _words(folder, f"ptb.{part}.txt") for part in ("train", "valid", "test")}
    counts = Counter(texts["train"])
    number = {word: i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    if len(number) > MOST_WORDS:
        raise DataError(f"{folder}: the training text has {len(number):,} different words; PTB has {MOST_WORDS:,}")
    for part, words in texts.items():
        unknown = next((word for word in words if word not in number), None)
        if unknown is not None:
            raise DataError(f"{folder}: the word {unknown!r} of ptb.{part}.txt is not in the training text")
    return Text(*(torch.tensor([number[word] for word in words]) for words in texts.values()))


def _words(folder: Path, name: str) -> list[str]:
    path, content = _content(folder, name)
    try:
        words = content.decode().replace("\n", " <eos> ").split()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no text ({error.reason} at byte {error.start:,})") from error
    least = _SCORED_ROWS * SEQUENCE
    if len(words) <= least:
        raise DataError(f"{path}: has {len(words):,} words; more than {least} are wanted")
    return words


def _content(folder: Path, name: str) -> tuple[Path, bytes]:
    """Return the path and the content of a file, or of its gzipped copy."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            content = path.read_bytes()
            try:
                return path, gzip.decompress(content) if path.suffix == ".gz" else content
            except (OSError, EOFError) as error:
                raise DataError(f"{path}: is no whole gzip file ({error})") from error
    raise DataError(f"--data: there is no {folder / name}, nor {name}.gz")
