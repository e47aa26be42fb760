"""Everything that touches ONNX: a network as a file, and the runtime."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork, cache_shapes
from summit_train.models.shift import TemporalShift, num_shifted_channels

BATCH = "batch"  # the name of a first length that is not fixed
_EXAMPLE = 2  # the example's batch where any is allowed: exporters take 0 and 1 for constants


class ConcatenatedShift(nn.Module):
    """A `TemporalShift` written as slices and concatenations; the same result.

    An exporter may take an assignment to a slice of zeros for a constant, and the file is wrong without an error
    (mit-han-lab/temporal-shift-module, issues 77, 181 and 189).
    """

    def __init__(self, shift: TemporalShift) -> None:
        super().__init__()
        self.num_frames = shift.num_frames
        self.fraction = shift.fraction
        self.direction = shift.direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift frames (N*T, C, H, W)."""
        fold = num_shifted_channels(x.shape[1], self.fraction)
        if fold == 0:
            return x
        clips = x.view(-1, self.num_frames, *x.shape[1:])
        from_next = fold if self.direction == "both" else 0
        zeros = torch.zeros_like(clips[:, :1, :fold])
        later = [torch.cat([clips[:, 1:, :fold], zeros], 1)] if from_next else []
        earlier = torch.cat([zeros, clips[:, :-1, from_next : from_next + fold]], 1)
        return torch.cat([*later, earlier, clips[:, :, from_next + fold :]], 2).flatten(0, 1)


class _StreamGraph(nn.Module):
    """A stream as a function of tensors alone: a frame and the caches in, logits and the caches out.

    The empty cache of a shift of no channel is neither an input nor an output.
    """

    def __init__(self, network: VideoNetwork, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.stream = StreamNetwork(network)
        self.shapes = shapes

    def forward(self, frame: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(caches)
        before = [next(given) if shape[0] else frame.new_zeros(len(frame), *shape) for shape in self.shapes]
        logits, after = self.stream(frame, before)
        return (logits, *(cache for cache, shape in zip(after, self.shapes, strict=True) if shape[0]))


def exported(
    network: VideoNetwork, batch: int | None, height: int, width: int, metadata: Mapping[str, Any], *, stream: bool
) -> bytes:
    """Return a plain network as an ONNX file, in fp32 and in the opset that torch's exporter chooses.

    `clip` (N, T, C, H, W) becomes `logits` (N, num_classes). With `stream`, `frame` (N, C, H, W) and `cache_in_i`
    (N, fold, H', W') become `logits` and `cache_out_i`, each the next frame's `cache_in_i`; caches are zero where a
    stream starts. batch: N, None for any. metadata: custom properties of the file, each as JSON.
    """
    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    if stream:
        caches = cache_shapes(network, height, width)
        module = _StreamGraph(network, caches)
        shapes = {"frame": (network.in_channels, height, width)}
        shapes |= {f"cache_in_{number}": shape for number, shape in enumerate(one for one in caches if one[0])}
    else:
        module = copy.deepcopy(network)
        for name, shift in list(module.named_modules()):
            if isinstance(shift, TemporalShift):
                module.set_submodule(name, ConcatenatedShift(shift))
        shapes = {"clip": (network.num_frames, network.in_channels, height, width)}
    example = tuple(torch.zeros(batch or _EXAMPLE, *shape) for shape in shapes.values())
    # In the structure of the module's arguments: a clip, or a frame and *caches.
    first, *others = [{0: BATCH} for _ in shapes]
    # Silence what the libraries tell their developers: about torchvision, their own deprecations, set-ups.
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.eval(),
                example,
                input_names=list(shapes),
                output_names=["logits", *state_of(shapes).values()],
                dynamic_shapes=None if batch else (first, tuple(others)) if others else (first,),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        logging.disable(disabled)
    assert program is not None
    model = program.model_proto
    # The exporter notes where in the source each node comes from, with this machine's paths.
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info):
        part.ClearField("metadata_props")
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in metadata.items()})
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def state_of(inputs: Iterable[str]) -> dict[str, str]:
    """Return, for each cache among a graph's inputs, the output that is its value for the next frame."""
    return {name: name.replace("_in_", "_out_") for name in inputs if name.startswith("cache_in_")}


def facts(model: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the versions that made a file, and the number of its nodes by operator."""
    loaded = onnx.load_from_string(model)
    libraries = (torch, onnx, onnxscript, onnxruntime)
    versions: dict[str, Any] = {library.__name__: library.__version__ for library in libraries}
    versions["opset"] = next(entry.version for entry in loaded.opset_import if entry.domain == "")
    versions["ir"] = loaded.ir_version
    return versions, dict(Counter(node.op_type for node in loaded.graph.node).most_common())


class Runtime:
    """A graph in onnxruntime, on the CPU, with as many threads as torch has.

    inputs, outputs: name, shape and dtype of each; the first length is "batch" where a call may have any.
    """

    def __init__(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = (
            [{"name": value.name, "shape": value.shape, "dtype": "float32"} for value in values]
            for values in (self._session.get_inputs(), self._session.get_outputs())
        )
        for tensor in (*self.inputs, *self.outputs):
            assert all(isinstance(length, int) or length == BATCH for length in tensor["shape"]), tensor

    def logits(self, clips_MTCHW: torch.Tensor) -> NDArray[np.float64]:
        """Return the logits (M, F, classes) of normalised clips.

        F is 1 for a clip network. A stream begins with each clip, with caches of zeros, and gives each frame's logits.
        """
        batch = self.inputs[0]["shape"][0]
        clips = clips_MTCHW.numpy()
        if batch == BATCH:
            # Any batch is allowed: check one clip alone, and all others together.
            groups = [group for group in (clips[:1], clips[1:]) if len(group)]
        else:
            # The last batch is padded with copies of its last clip; the copies' logits are dropped.
            padded = np.pad(clips, [(0, -len(clips) % batch), *[(0, 0)] * 4], mode="edge")
            groups = [*padded.reshape(-1, batch, *clips.shape[1:])]
        names = [one["name"] for one in self.outputs]
        found = list[NDArray[Any]]()
        for group in groups:
            values = {one["name"]: np.zeros([len(group), *one["shape"][1:]], np.float32) for one in self.inputs}
            first, *caches = values
            logits = list[NDArray[Any]]()
            for frame in group.swapaxes(0, 1) if first == "frame" else [group]:
                answer = self._session.run(names, {**values, first: np.ascontiguousarray(frame)})
                out = dict(zip(names, answer, strict=True))
                values = {name: out[after] for name, after in state_of(caches).items()}
                logits.append(out["logits"])
            found.append(np.stack(logits, axis=1))
        return np.concatenate(found)[: len(clips)].astype(np.float64)
