"""Everything that touches ONNX: export, conversion to smaller numbers, and the runtime."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from summit_train.inference.export.graph import Graph

Arrays = dict[str, NDArray[Any]]

BATCH = "batch"  # the name of a first length that is not fixed
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
# A runtime's speed: the median of so many calls, or of as many as fit into the seconds, but three.
_TIMED_CALLS = 20
_TIMED_SECONDS = 3.0


@dataclass(frozen=True)
class TensorInfo:
    """An input or an output of a graph; its first length is "batch" where a call may have any."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    def zeros(self, batch: int) -> NDArray[Any]:
        """Return zeros of its shape and type; a first length that is not fixed becomes `batch`."""
        return np.zeros([length if isinstance(length, int) else batch for length in self.shape], self.dtype)


class Runtime:
    """A graph in onnxruntime, on the CPU, with as many threads as torch has."""

    def __init__(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = [_info(value) for value in self._session.get_inputs()]
        self.outputs = [_info(value) for value in self._session.get_outputs()]

    def __call__(self, values: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the outputs by name; each input is converted to the type that the graph wants."""
        feed = {info.name: np.ascontiguousarray(values[info.name], info.dtype) for info in self.inputs}
        names = [info.name for info in self.outputs]
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def seconds_a_call(self) -> float:
        """Return the median time of a call on zeros; the first call is not counted."""
        feed: Arrays = {info.name: info.zeros(1) for info in self.inputs}
        self(feed)
        times = list[float]()
        while len(times) < 3 or (len(times) < _TIMED_CALLS and sum(times) < _TIMED_SECONDS):
            began = time.perf_counter()
            self(feed)
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def exported(graph: Graph) -> bytes:
    """Return the graph as an ONNX file, in fp32 and in the opset that torch's exporter chooses."""
    with _quiet(), torch.inference_mode():
        program = torch.onnx.export(
            graph.module,
            tuple(graph.inputs.values()),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=_any_batch(graph) if graph.any_batch else None,
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


def _any_batch(graph: Graph) -> tuple[Any, ...]:
    """Return the free lengths of the inputs, in the structure of the module's arguments: a frame and *caches."""
    first, *caches = [{0: BATCH} for _ in graph.inputs]
    return (first, tuple(caches)) if caches else (first,)


def with_metadata(model: bytes, values: Mapping[str, Any]) -> bytes:
    """Return the ONNX file with `values` as custom metadata, each as JSON."""
    loaded = onnx.load_from_string(model)
    onnx.helper.set_model_props(loaded, {name: json.dumps(value) for name, value in values.items()})
    return _checked(loaded)


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
    depthwise = _depthwise(source.graph)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder, "int8.onnx")
        quantize_dynamic(source, path, weight_type=QuantType.QUInt8, nodes_to_exclude=depthwise)
        return _checked(onnx.load(path))


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


def _depthwise(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the convolutions in which each filter sees one channel."""
    inner = {weight.name: weight.dims[1] for weight in graph.initializer if len(weight.dims) > 2}
    return [node.name for node in graph.node if node.op_type == "Conv" and inner.get(node.input[1]) == 1]


def _checked(model: onnx.ModelProto) -> bytes:
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _info(value: Any) -> TensorInfo:
    shape = tuple(value.shape)
    fixed = shape[1:] if shape[0] == BATCH else shape
    assert all(isinstance(length, int) for length in fixed), f"{value.name} has no fixed shape: {shape}"
    return TensorInfo(value.name, shape, _TYPES[value.type])


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
