"""Everything that touches ONNX: a network as a file, its conversion to smaller numbers, and the runtime."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork, cache_shapes
from summit_train.models.shift import TemporalShift, num_shifted_channels

Arrays = dict[str, NDArray[Any]]

BATCH = "batch"  # the name of a first length that is not fixed
_EXAMPLE = 2  # the example's batch where any is allowed: exporters take 0 and 1 for constants
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
# A runtime's speed: the median of this many calls, or of as many as fit into the seconds, but three.
_TIMED_CALLS = 20
_TIMED_SECONDS = 3.0


class ConcatenatedShift(nn.Module):
    """A `TemporalShift` written as slices and concatenations; the same result.

    An exporter may take an assignment to a slice of zeros for a constant, and the file is wrong without an error
    (mit-han-lab/temporal-shift-module, issues 77, 181 and 189).
    """

    def __init__(self, shift: TemporalShift) -> None:
        super().__init__()
        self.num_frames, self.fraction, self.direction = shift.num_frames, shift.fraction, shift.direction

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

    A shift of no channel hands nothing on. Its cache is neither an input nor an output.
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


def exported(network: VideoNetwork, batch: int | None, height: int, width: int, *, stream: bool) -> bytes:
    """Return a plain network as an ONNX file, in fp32 and in the opset that torch's exporter chooses.

    `clip` (N, T, C, H, W) becomes `logits` (N, num_classes). With `stream`, `frame` (N, C, H, W) and `cache_in_i`
    (N, fold, H', W') become `logits` and `cache_out_i`, each the next frame's `cache_in_i`; caches are zero where a
    stream starts. batch: N, None for any.
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
    with _quiet(), torch.inference_mode():
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
    assert program is not None
    model = program.model_proto
    # The exporter notes where in the source each node comes from, with this machine's paths.
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info):
        part.ClearField("metadata_props")
    return _checked(model)


def state_of(inputs: Iterable[str]) -> dict[str, str]:
    """Return, for each cache among a graph's inputs, the output that is its value for the next frame."""
    return {name: name.replace("_in_", "_out_") for name in inputs if name.startswith("cache_in_")}


def to_half(model: bytes) -> bytes:
    """Return an fp32 graph in fp16: weights, activations, inputs and outputs (onnxruntime's own converter).

    Normalisations are part of the convolutions by then, so that their small variances do not become zeros.
    """
    with _quiet():
        return _checked(convert_float_to_float16(onnx.load_from_string(model)))


def to_int8(model: bytes) -> bytes:
    """Return an fp32 graph with weights of 8 bits, unsigned, one scale a tensor (onnxruntime's dynamic quantisation).

    Activations are quantised while the graph runs, each by its own range. Inputs and outputs stay fp32, and so do
    depthwise convolutions: they have few weights, and one scale for filters of very different sizes costs accuracy.
    """
    source = onnx.load_from_string(model)
    # The quantiser transposes a weight, and would meet the shape that is noted for it.
    source.graph.ClearField("value_info")
    channels = {weight.name: weight.dims[1] for weight in source.graph.initializer if len(weight.dims) > 2}
    depthwise = [n.name for n in source.graph.node if n.op_type == "Conv" and channels.get(n.input[1]) == 1]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder, "int8.onnx")
        quantize_dynamic(source, path, weight_type=QuantType.QUInt8, nodes_to_exclude=depthwise)
        return _checked(onnx.load(path))


def with_metadata(model: bytes, values: Mapping[str, Any]) -> bytes:
    """Return the ONNX file with `values` as custom metadata, each as JSON."""
    loaded = onnx.load_from_string(model)
    onnx.helper.set_model_props(loaded, {name: json.dumps(value) for name, value in values.items()})
    return _checked(loaded)


def facts(model: bytes) -> dict[str, Any]:
    """Return the versions that made a file, and the number of its nodes by operator."""
    loaded = onnx.load_from_string(model)
    versions: dict[str, Any] = {
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxscript": onnxscript.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": next(entry.version for entry in loaded.opset_import if entry.domain == ""),
        "ir": loaded.ir_version,
    }
    return {"versions": versions, "operators": dict(Counter(node.op_type for node in loaded.graph.node).most_common())}


class Runtime:
    """A graph in onnxruntime, on the CPU, with as many threads as torch has.

    inputs, outputs: name, shape and dtype of each; the first length is "batch" where a call may have any.
    """

    def __init__(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = (
            [{"name": value.name, "shape": value.shape, "dtype": _TYPES[value.type]} for value in values]
            for values in (self._session.get_inputs(), self._session.get_outputs())
        )
        for tensor in (*self.inputs, *self.outputs):
            assert all(isinstance(length, int) or length == BATCH for length in tensor["shape"]), tensor

    def logits(self, clips_MTCHW: torch.Tensor) -> NDArray[np.float64]:
        """Return the logits (M, F, classes) of normalised clips.

        F is 1 for a clip network. A stream begins with each clip, with caches of zeros, and gives the logits of each
        frame.
        """
        batch, clips = self.inputs[0]["shape"][0], clips_MTCHW.numpy()
        if batch == BATCH:
            # Any batch is allowed: check one clip alone, and all others together.
            groups = [group for group in (clips[:1], clips[1:]) if len(group)]
        else:
            # The last batch is padded with copies of its last clip; the copies' logits are dropped.
            padded = np.pad(clips, [(0, -len(clips) % batch), *[(0, 0)] * 4], mode="edge")
            groups = [*padded.reshape(-1, batch, *clips.shape[1:])]
        run = self._streamed if self.inputs[0]["name"] == "frame" else self._at_once
        return np.concatenate([run(group) for group in groups])[: len(clips)].astype(np.float64)

    def _at_once(self, clips: NDArray[Any]) -> NDArray[Any]:
        return self._run({"clip": clips})["logits"][:, None]

    def _streamed(self, clips: NDArray[Any]) -> NDArray[Any]:
        caches, logits = self._zeros(self.inputs[1:], len(clips)), list[NDArray[Any]]()
        state = state_of(caches)
        for frame in clips.swapaxes(0, 1):
            out = self._run({"frame": frame, **caches})
            caches = {name: out[after] for name, after in state.items()}
            logits.append(out["logits"])
        return np.stack(logits, axis=1)

    def _run(self, values: Mapping[str, NDArray[Any]]) -> Arrays:
        feed = {one["name"]: np.ascontiguousarray(values[one["name"]], one["dtype"]) for one in self.inputs}
        names = [one["name"] for one in self.outputs]
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def _zeros(self, tensors: Sequence[Mapping[str, Any]], batch: int) -> Arrays:
        shapes = {one["name"]: [batch if length == BATCH else length for length in one["shape"]] for one in tensors}
        return {one["name"]: np.zeros(shapes[one["name"]], one["dtype"]) for one in tensors}

    def seconds_a_call(self) -> float:
        """Return the median time of a call on zeros; the first call is not counted."""
        feed = self._zeros(self.inputs, 1)
        self._run(feed)
        times = list[float]()
        while len(times) < 3 or (len(times) < _TIMED_CALLS and sum(times) < _TIMED_SECONDS):
            began = time.perf_counter()
            self._run(feed)
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def _checked(model: onnx.ModelProto) -> bytes:
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the libraries tell their developers: of torchvision, of their own deprecations, of set-ups."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
