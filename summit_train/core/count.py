"""The cost of a network on one clip, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer, with the parameters of what follows it, such as normalisations.

    `product` is the layer as a matrix product: (rows, inner, columns).
    """

    name: str
    parameters: int
    product: tuple[int, int, int]

    @property
    def multiply_adds(self) -> int:
        return math.prod(self.product)


@dataclass(frozen=True)
class Count:
    """One network on one clip of (T, H, W) pixels, forward.

    `layers` are in the order in which they run. `stages` maps the paper's names to T there (Table 2). `kept_elements`
    are the floats that a forward pass keeps for the backward pass, each tensor once, without statistics per channel and
    dropout; `index_elements` are 64-bit positions, which max pools keep. With recomputed blocks only the blocks' inputs
    and what lies outside the blocks stay, until the backward pass reaches it: `recomputed_elements` is the largest sum
    of these and one block's. `wide_elements` or `recomputed_wide_elements` are added in 16 bits: autocast runs softmax
    and layer norms in fp32. has_bn: whether a layer normalises batches. note: on the count, for people.
    """

    clip: tuple[int, int, int]
    parameters: int
    trained_parameters: int
    multiply_adds: int
    input_bytes: int
    layers: tuple[Layer, ...]
    stages: dict[str, int]
    kept_elements: int
    index_elements: int
    recomputed_elements: int
    wide_elements: int
    recomputed_wide_elements: int
    largest_block_elements: int
    has_bn: bool
    note: str = ""

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes that one rank sends into the allreduce of a step, in fp32."""
        return 4 * self.trained_parameters

    @property
    def compute_io(self) -> float:
        """Multiply-adds for each input element (the paper's Table 1)."""
        return self.multiply_adds / self.input_bytes

    def activation_bytes(self, bytes_per_element: int = 4, recompute: bool = False) -> int:
        """Return the most memory that one clip's activations hold between forward and backward pass."""
        elements = self.recomputed_elements if recompute else self.kept_elements
        elements += (self.recomputed_wide_elements if recompute else self.wide_elements) * (bytes_per_element == 2)
        return bytes_per_element * elements + 8 * self.index_elements

    def values(self) -> dict[str, Any]:
        """Return the object that `summit-train model --json` prints."""
        sizes = ("parameters", "trained_parameters", "multiply_adds", "input_bytes", "compute_io", "gradient_bytes")
        return {"frames": self.clip[0], "stages": self.stages, **{name: getattr(self, name) for name in sizes}}
