"""ONNX files of narrow networks in onnxruntime against torch, whole and with fewer digits."""

from __future__ import annotations

import onnx
import pytest
import torch

from summit_train.inference.export.export import difference
from summit_train.inference.export.onnx_file import ConcatenatedShift, Runtime, exported, facts, to_half, to_int8
from summit_train.models import VideoNetwork, build_model
from summit_train.models.shift import TemporalShift
from summit_train.spec.catalog import ShiftDirection

FRAMES = 6


@pytest.mark.parametrize(
    ("direction", "fraction"),
    [("both", 0.125), ("both", 0.25), ("both", 0.5), ("both", 0.0), ("past", 0.125), ("past", 1.0), ("past", 0.1)],
)
@pytest.mark.parametrize("num_frames", [1, 4])
def test_the_concatenation_is_the_shift(direction: ShiftDirection, fraction: float, num_frames: int) -> None:
    shift = TemporalShift(num_frames, fraction, direction)
    x = torch.randn(2 * num_frames, 8, 3, 2)
    assert torch.equal(ConcatenatedShift(shift)(x), shift(x))


def test_the_shift_of_two_frames_by_hand() -> None:
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, :, None, None]
    both, past = (ConcatenatedShift(TemporalShift(2, 0.25, direction))(x)[..., 0, 0] for direction in ("both", "past"))
    assert both.tolist() == [[5, 0, 3, 4], [0, 2, 7, 8]]
    assert past.tolist() == [[0, 2, 3, 4], [1, 6, 7, 8]]


@pytest.fixture(scope="module")
def mobile() -> VideoNetwork:
    """A narrow past-only MobileNetV2 with a shift of no channel in the first blocks and statistics that show."""
    generator = torch.Generator().manual_seed(0)  # with which the frames' logits differ well above rounding
    shift = {"shift_direction": "past", "shift_fraction": 0.1}
    network = build_model("tsm", "mobilenet_v2", FRAMES, 5, width=0.25, generator=generator, **shift)
    for name, value in network.state_dict().items():
        if value.dtype.is_floating_point and value.dim() == 1:
            low, high = (0.5, 1.5) if name.endswith(("weight", "var")) else (-0.2, 0.2)
            value.uniform_(low, high, generator=generator)
    torch.nn.init.normal_(network.get_parameter("classifier.1.weight"), generator=generator)
    return network.eval()


@pytest.fixture(scope="module")
def stream(mobile: VideoNetwork) -> bytes:
    return exported(mobile, 2, 64, 48, stream=True)


@pytest.fixture(scope="module")
def clips() -> torch.Tensor:
    return torch.randn(3, FRAMES, 3, 64, 48, generator=torch.Generator().manual_seed(2))


def types(runtime: Runtime) -> set[str]:
    return {one["dtype"] for one in (*runtime.inputs, *runtime.outputs)}


@torch.inference_mode()
def frame_logits(network: VideoNetwork, clips: torch.Tensor) -> torch.Tensor:
    return network.classify(network.extract(network.to_input(clips))).view(*clips.shape[:2], -1)


def test_a_stream_gives_each_frame_the_clip_networks_logits(
    mobile: VideoNetwork, stream: bytes, clips: torch.Tensor
) -> None:
    expected = frame_logits(mobile, clips).double().numpy()
    # Three clips through two streams: the last batch is filled up.
    largest, largest_logit = difference(expected, Runtime(stream).logits(clips))
    assert largest < 1e-5 * largest_logit
    assert expected.std(1).min() > 1e-4 * largest_logit, "the frames differ"


def test_what_a_streams_file_holds(stream: bytes) -> None:
    runtime = Runtime(stream)
    # Blocks of 8, 8, 8, 16, 16, 16, 24, 24, 40 and 40 channels: a tenth of 8 is none.
    shapes = [*3 * [(2, 1, 4, 3)], *2 * [(2, 2, 4, 3)], *2 * [(2, 4, 2, 2)]]
    shape_of = lambda tensors: {one["name"]: tuple(one["shape"]) for one in tensors}  # noqa: E731
    caches = {f"cache_in_{number}": shape for number, shape in enumerate(shapes)}
    assert shape_of(runtime.inputs) == {"frame": (2, 3, 64, 48), **caches}
    after = {name.replace("_in_", "_out_"): shape for name, shape in caches.items()}
    assert shape_of(runtime.outputs) == {"logits": (2, 5), **after}
    assert types(runtime) == {"float32"}
    told = facts(stream)
    # The normalisations are part of the convolutions; a concatenation for each shift that moves something.
    wanted = {"Conv": 52, "Clip": 35, "Slice": 14, "Add": 11, "Concat": 7, "ReduceMean": 1, "Gemm": 1}
    assert told["operators"] == wanted  # 11 shortcuts: so narrow, the first block has one too
    assert told["versions"]["torch"] == torch.__version__ and told["versions"]["opset"] >= 18
    assert b"/summit_train/" not in stream and b".py" not in stream, "paths of this machine"


def small(direction: ShiftDirection) -> VideoNetwork:
    network = build_model("tsm", "resnet18", FRAMES, 5, width=0.125, shift_direction=direction).eval()
    torch.nn.init.normal_(network.get_parameter("fc.weight"), generator=torch.Generator().manual_seed(0))
    return network


@pytest.mark.parametrize("batch", [2, None], ids=["two", "any"])
def test_a_clip_network_of_both_directions(clips: torch.Tensor, batch: int | None) -> None:
    network = small("both")
    before = repr(network)
    with torch.inference_mode():
        expected = network(clips)[:, None].double().numpy()
    content = exported(network, batch, 64, 48, stream=False)
    largest, largest_logit = difference(expected, Runtime(content).logits(clips))
    assert largest < 1e-5 * largest_logit and repr(network) == before


def test_a_stream_of_any_number_of_videos(clips: torch.Tensor) -> None:
    network = small("past")
    runtime = Runtime(exported(network, None, 64, 48, stream=True))
    assert [one["shape"][0] for one in (*runtime.inputs, *runtime.outputs)] == ["batch"] * 18
    largest, largest_logit = difference(frame_logits(network, clips).double().numpy(), runtime.logits(clips))
    assert largest < 1e-5 * largest_logit  # one alone, then two together


def test_half(mobile: VideoNetwork, stream: bytes, clips: torch.Tensor) -> None:
    half = to_half(stream)
    assert len(half) < 0.6 * len(stream)
    runtime = Runtime(half)
    assert types(runtime) == {"float16"}
    largest, largest_logit = difference(frame_logits(mobile, clips).double().numpy(), runtime.logits(clips))
    assert 1e-5 < largest / largest_logit < 1e-2


def test_eight_bits(mobile: VideoNetwork, stream: bytes, clips: torch.Tensor) -> None:
    converted = to_int8(stream)
    assert len(converted) < 0.5 * len(stream)
    # 17 of the 52 convolutions are depthwise.
    operators = facts(converted)["operators"]
    assert (operators["ConvInteger"], operators["Conv"], operators["MatMulInteger"]) == (35, 17, 1)
    weights = {value.name: value.data_type for value in onnx.load_from_string(converted).graph.initializer}
    assert list(weights.values()).count(onnx.TensorProto.UINT8) >= 36
    runtime = Runtime(converted)
    assert types(runtime) == {"float32"}
    largest, largest_logit = difference(frame_logits(mobile, clips).double().numpy(), runtime.logits(clips))
    assert 1e-3 < largest / largest_logit < 0.2


def test_the_speed_is_a_time(stream: bytes) -> None:
    assert Runtime(stream).seconds_a_call() > 0
