"""DATE's small tasks for papers/date.py: networks, data that fit into memory, and baselines.

Source: You et al., *Large-Batch Training for LSTM and Beyond* (2019), Table 2 and sections 3.5, 3.6, 4.1 to 4.3; for
PTB, Zaremba et al. 2014. What the paper leaves open is marked as ours.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import Order, virtual_gpus_of
from summit_train.models.precision import Normalise
from summit_train.spec.catalog import Modality
from summit_train.spec.keys import OptimizerSpec, ScheduleSpec

# Mean and standard deviation over MNIST's training images.
GREY = Modality("grey", channels=1, mean=(0.1307 * 255,), std=(0.3081 * 255,))
SEQUENCE = 20  # words of PTB's small model, section 4.1.2
MOST_WORDS = 10_000  # different ones
SCORED_AT_ONCE, SCORED_ROWS = 1_000, 20  # images, rows of a text

State = tuple[torch.Tensor, torch.Tensor]


# --- networks


class TaskNetwork(nn.Module):
    """A network without dropout, as TrainStep drives it."""

    def reseed(self, seed: int) -> None:
        """Do nothing: no layer draws random numbers."""

    def begin_epoch(self, virtual_gpus: int) -> None:
        """Prepare for an epoch in which this rank runs that many virtual GPUs in turn."""


class LeNet(TaskNetwork):
    """LeNet-5 with ReLU and max pooling, images (N, 1, 1, 28, 28) to logits (N, 10), 61,706 parameters.

    The paper names LeNet without its layers; five of them are in its Figure 12, as in LeCun et al. 1998.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, clips_NTCHW: torch.Tensor) -> torch.Tensor:
        return self.layers(clips_NTCHW[:, 0])


class RowsLSTM(TaskNetwork):
    """Section 4.1.1: the 28 rows of an image as 28 steps, each through a layer to 128, then an LSTM of 128.

    Images (N, 1, 1, 28, 28) to logits (N, 10), from the last step; 137,098 parameters.
    """

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.transform = nn.Linear(28, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, clips_NTCHW: torch.Tensor) -> torch.Tensor:
        steps, _ = self.lstm(self.transform(clips_NTCHW[:, 0, 0]))
        return self.head(steps[:, -1])


class WordLSTM(TaskNetwork):
    """Section 4.1.2, the small configuration of Zaremba et al. 2014: two LSTMs of 200, all weights from U(-0.1, 0.1).

    Words (N, T) to logits (N * T, words); 4,653,200 parameters. Back-propagation ends at the first of the T steps; the
    state is carried from step to step, one for each virtual GPU of this rank.
    """

    def __init__(self, words: int = MOST_WORDS, hidden: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2)
        self.head = nn.Linear(hidden, words)
        self._states = deque[State | None]([None])  # the next virtual GPU's first
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.1, 0.1)

    def begin_epoch(self, virtual_gpus: int) -> None:
        self._states = deque([None] * virtual_gpus)

    def forward(self, words_NT: torch.Tensor) -> torch.Tensor:
        logits, (hidden, cell) = self.unrolled(words_NT, self._states.popleft())
        self._states.append((hidden.detach(), cell.detach()))
        return logits

    def unrolled(self, words_NT: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the logits and the state after the words, from the state before them; None: zeros."""
        steps, after = self.lstm(self.embedding(words_NT.t()), state)
        return self.head(steps.transpose(0, 1).flatten(0, 1)), after


# --- data


@dataclass(frozen=True)
class Share:
    """A rank's work: `virtual_gpus` of `samples` each make a step, `steps` of them an epoch."""

    rank: int
    ranks: int
    virtual_gpus: int
    samples: int
    steps: int

    @property
    def own(self) -> range:
        return virtual_gpus_of(self.rank, self.ranks, self.virtual_gpus)

    def steps_of(self, epoch: int) -> range:
        return range(epoch * self.steps, (epoch + 1) * self.steps)


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
        return len(self.labels)

    def epoch(self, seed: int, share: Share, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield a rank's micro-batches of each step, in an order that the seed and the epoch decide."""
        order = Order(self.num_samples, seed, share.virtual_gpus, share.samples, share.steps)
        taken = []
        for step, gpu, _, places in order.micro_batches(share.rank, share.ranks, share.steps_of(epoch)):
            ids = torch.from_numpy(places)
            taken.append(MicroBatch(step, gpu, self.images[ids], self.labels[ids], ids))
            if len(taken) == len(share.own):
                yield taken
                taken = []

    @torch.no_grad()
    def score(self, model: TaskNetwork, device: torch.device) -> dict[str, float]:
        """Return the accuracy on the test images in percent."""
        normalise, right = Normalise(next(model.parameters()).dtype, device, GREY), 0
        parts = zip(self.test_images.split(SCORED_AT_ONCE), self.test_labels.split(SCORED_AT_ONCE), strict=True)
        for images, labels in parts:
            right += int((model(normalise(images)).argmax(1).cpu() == labels).sum())
        return {"test": 100 * right / len(self.test_labels)}


@dataclass(frozen=True)
class Text:
    """Words as numbers, int64, as one long line each for training, validation and test.

    A sample is SEQUENCE words, each with the word after it.
    """

    words: torch.Tensor
    valid_words: torch.Tensor
    test_words: torch.Tensor
    modality: Modality | None = None

    @property
    def num_samples(self) -> int:
        return (len(self.words) - 1) // SEQUENCE

    def epoch(self, seed: int, share: Share, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield SEQUENCE words of each row in each step: the text is cut into as many rows as the batch has samples."""
        inputs, targets = rows_of(self.words, share.virtual_gpus * share.samples)
        for i, step in enumerate(share.steps_of(epoch)):
            now, taken = slice(i * SEQUENCE, (i + 1) * SEQUENCE), []
            for gpu in share.own:
                ids = torch.arange(gpu * share.samples, (gpu + 1) * share.samples)
                taken.append(MicroBatch(step, gpu, inputs[ids, now], targets[ids, now].reshape(-1), ids))
            yield taken

    @torch.no_grad()
    def score(self, model: TaskNetwork, device: torch.device) -> dict[str, float]:
        """Return the perplexities of test and validation text, infinity where they are beyond floats."""
        assert isinstance(model, WordLSTM)
        found = {}
        for part, words in (("test", self.test_words), ("valid", self.valid_words)):
            inputs, targets = rows_of(words, SCORED_ROWS)
            loss, state = 0.0, None
            for before, after in zip(inputs.split(SEQUENCE, 1), targets.split(SEQUENCE, 1), strict=True):
                logits, state = model.unrolled(before.to(device), state)
                loss += float(functional.cross_entropy(logits, after.reshape(-1).to(device), reduction="sum"))
            mean = loss / targets.numel()
            found[part] = math.exp(mean) if mean < 700 else math.inf
        return found


Data = Images | Text


def rows_of(words: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a text into rows; return words and the words after them, (rows, words of a row). A rest is left out."""
    length = (len(words) - 1) // rows
    inputs, targets = (words[start : start + rows * length].view(rows, length) for start in (0, 1))
    return inputs, targets


def read_mnist(folder: Path) -> Images:
    """Read MNIST's four IDX files, gzipped or not."""
    arrays = []
    for part in ("train", "t10k"):
        images = read_idx(folder, f"{part}-images-idx3-ubyte")
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte")
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            found = f"images {images.shape} and labels {labels.shape}"
            raise UserError(f"{folder}: {part} must have as many images of 28 x 28 as labels of 0 to 9, got {found}")
        arrays += [torch.from_numpy(images[:, None, :, :, None]), torch.from_numpy(labels.astype(np.int64))]
    return Images(*arrays)


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Read an IDX file of uint8: 0, 0, 8, the dimensions, each one's size as int32, big-endian; then the values."""
    path, content = read_bytes(folder, name)
    dims = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dims
    if content[:3] != b"\0\0\x08" or len(content) < header:
        raise UserError(f"{path}: not an IDX file of bytes (it begins with {content[:4].hex(' ') or 'nothing'})")
    shape = np.frombuffer(content, ">i4", dims, 4).tolist()
    size = header + math.prod(shape)
    if len(content) != size:
        raise UserError(f"{path}: must have {size:,} bytes for its sizes {shape}, got {len(content):,}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def read_ptb(folder: Path) -> Text:
    """Read ptb.train.txt, ptb.valid.txt and ptb.test.txt, gzipped or not; each end of a line is the word <eos>.

    Words are numbered by how often the training text has them.
    """
    number: dict[str, int] = {}
    texts = []
    for part in ("train", "valid", "test"):
        path, content = read_bytes(folder, f"ptb.{part}.txt")
        try:
            words = content.decode().replace("\n", " <eos> ").split()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not a text ({error.reason} at byte {error.start:,})") from error
        if len(words) <= SCORED_ROWS * SEQUENCE:
            raise UserError(f"{path}: must have more than {SCORED_ROWS * SEQUENCE} words, got {len(words):,}")
        if part == "train":
            counts = Counter(words)
            number = {word: i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
        if len(number) > MOST_WORDS:
            raise UserError(f"{path}: must have at most {MOST_WORDS:,} different words, got {len(number):,}")
        if unknown := next((word for word in words if word not in number), None):
            raise UserError(f"{path}: the word {unknown!r} is not in the training text")
        texts.append(torch.tensor([number[word] for word in words]))
    return Text(*texts)


def read_bytes(folder: Path, name: str) -> tuple[Path, bytes]:
    """Return the path and the content of a file, or of its gzipped copy."""
    path = folder / name
    if path.is_file():
        return path, path.read_bytes()
    path = folder / f"{name}.gz"
    try:
        return path, gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"--data: {folder / name} not found, nor {name}.gz") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from error


# --- tasks


@dataclass(frozen=True)
class DateTask:
    """A task with its baseline: `optimizer` and `schedule` at optimizer.base_batch samples a step.

    batches: the baseline's first. samples: of a virtual GPU, at most. warmup_epochs: of the baseline, for LEGW to
    scale. adam_lrs, grid_lrs: what the paper tunes over, thinned. published: (method, batch) -> its test figure.
    loss_factor: the paper's loss over this program's; its LRs are for that loss.
    """

    title: str
    metric: str  # accuracy or perplexity
    build: Callable[[], TaskNetwork]
    read: Callable[[Path], Data]
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    warmup_epochs: float
    batches: tuple[int, ...]
    samples: int
    adam_lrs: tuple[float, ...]
    grid_lrs: tuple[float, ...]
    published: dict[tuple[str, int], float]
    loss_factor: float = 1.0


# adam_lrs: section 4.2: 0.0001, 0.0002, ... 0.0010
MNIST = partial(DateTask, metric="accuracy", read=read_mnist, adam_lrs=(0.0002, 0.0005, 0.001))
PLAIN = partial(OptimizerSpec, weight_decay=0.0, lr_scaling="none")
CONSTANT = partial(ScheduleSpec, warmup_epochs=0, decay="none")

TASKS = {
    # Section 3.5. Ours: LR, epochs, and a warm-up that takes the part of the run that it takes in section 3.6.
    "lenet": MNIST(
        title="LeNet on MNIST, RMSprop",
        build=LeNet,
        optimizer=PLAIN(name="rmsprop", base_lr=1e-3, base_batch=256),
        schedule=CONSTANT(epochs=15),
        warmup_epochs=0.25,
        batches=(256, 1024, 8192),
        samples=1024,
        grid_lrs=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        published={("baseline", 256): 99.0, ("legw", 8192): 97.2, ("lars", 8192): 78.2, ("date", 8192): 99.0},
    ),
    # Section 3.6, the worked example.
    "lenet_momentum": MNIST(
        title="LeNet on MNIST, momentum: the worked example",
        build=LeNet,
        optimizer=PLAIN(name="sgd", base_lr=1.25e-3, base_batch=1024),
        schedule=ScheduleSpec(epochs=30, warmup_epochs=2, decay="steps", milestones=(10, 20, 27)),
        warmup_epochs=2,
        batches=(1024, 8192),
        samples=1024,
        grid_lrs=(0.01, 0.02, 0.04, 0.08, 0.16),
        published={},
    ),
    # Section 4.1.1. Ours: LR at 128 and warm-up.
    "lstm": MNIST(
        title="LSTM on the rows of MNIST",
        build=RowsLSTM,
        optimizer=PLAIN(name="sgd", base_lr=0.1, base_batch=128),
        schedule=CONSTANT(epochs=25),
        warmup_epochs=0.1,
        batches=(128, 512, 2048, 8192),
        samples=512,
        grid_lrs=(0.01, 0.02, 0.04, 0.08, 0.16),
        published={("baseline", 128): 98.7},
    ),
    # Section 4.1.2, the baseline as in the program that it names: SGD, LR 1, halved after each epoch from the fifth.
    # That program sums the loss over the steps of a sequence, where this one takes the mean. Ours: the warm-up.
    "ptb": DateTask(
        title="PTB, small",
        metric="perplexity",
        build=WordLSTM,
        read=read_ptb,
        optimizer=PLAIN(name="sgd", momentum=0.0, base_lr=1.0, base_batch=20, clip_norm=5.0),
        schedule=ScheduleSpec(epochs=13, warmup_epochs=0, decay="steps", milestones=tuple(range(4, 13)), factor=0.5),
        warmup_epochs=0.1,
        batches=(20, 80, 320, 640),
        samples=20,
        adam_lrs=(0.001, 0.002, 0.005),  # section 4.2: 0.0001 ... 0.0020 and 0.001 ... 0.020
        grid_lrs=(0.1, 0.2, 0.4, 0.8, 1.6),  # section 4.3: "only the range from 0.1 to 1.6 is effective"
        published={("baseline", 20): 116.0},
        loss_factor=float(SEQUENCE),
    ),
}
