"""The networks of DATE's small tasks, for bench/date.py: each as its paper says.

Source: You et al., *Large-Batch Training for LSTM and Beyond* (2019), section 4.1; Zaremba et al. 2014 for PTB.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

State = tuple[torch.Tensor, torch.Tensor]


class Network(nn.Module):
    """A network without dropout, as a training step drives it."""

    def reseed(self, seed: int) -> None:
        """Do nothing: there is no noise to draw."""

    def begin_epoch(self, virtual_gpus: int) -> None:
        """Hear that an epoch begins, in which this rank plays so many virtual GPUs in turn."""


class LeNet(Network):
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
        """Return the logits."""
        logits: torch.Tensor = self.layers(clips_NTCHW[:, 0])
        return logits


class RowsLSTM(Network):
    """Section 4.1.1: the 28 rows of an image as 28 steps, each through a layer to 128, then an LSTM of 128.

    Images (N, 1, 1, 28, 28) to logits (N, 10), from the last step; 137,098 parameters.
    """

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.transform = nn.Linear(28, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, clips_NTCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        steps, _ = self.lstm(self.transform(clips_NTCHW[:, 0, 0]))
        logits: torch.Tensor = self.head(steps[:, -1])
        return logits


class WordLSTM(Network):
    """Section 4.1.2, the small configuration of Zaremba et al. 2014: two LSTMs of 200, all weights from U(-0.1, 0.1).

    Words (N, T) to logits (N * T, words); 4,653,200 parameters. Back-propagation ends at the first of the T steps; the
    state is carried on from step to step, one for each virtual GPU of this rank.
    """

    def __init__(self, words: int = 10_000, hidden: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2)
        self.head = nn.Linear(hidden, words)
        self._states = deque[State | None]([None])
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.1, 0.1)

    def begin_epoch(self, virtual_gpus: int) -> None:
        """Forget the states: the text begins again."""
        self._states = deque([None] * virtual_gpus)

    def forward(self, words_NT: torch.Tensor) -> torch.Tensor:
        """Return the logits, and put the state where it is this virtual GPU's turn again."""
        logits, (hidden, cell) = self.unrolled(words_NT, self._states.popleft())
        self._states.append((hidden.detach(), cell.detach()))
        return logits

    def unrolled(self, words_NT: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the logits and the state after the words, from the state before them, zeros for None."""
        steps, after = self.lstm(self.embedding(words_NT.t()), state)
        return self.head(steps.transpose(0, 1).flatten(0, 1)), after
