"""ONNX files of narrow networks in onnxruntime against torch, whole and with fewer digits."""

from __future__ import annotations

import onnx
import pytest
import torch

from summit_train.inference.export.graph import clip_graph, stream_graph
from summit_train.inference.export.onnx_file import Runtime, exported, facts, to_half, to_int8
from summit_train.inference.export.verify import Exported, difference
from summit_train.models import VideoNetwork, build_model

FRAMES = 6


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
    return exported(stream_graph(mobile, 2, 64, 48))


@pytest.fixture(scope="module")
def clips() -> torch.Tensor:
    return torch.randn(3, FRAMES, 3, 64, 48, generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def frame_logits(network: VideoNetwork, clips: torch.Tensor) -> torch.Tensor:
    return network.classify(network.extract(network.to_input(clips))).view(*clips.shape[:2], -1)


def test_a_stream_gives_each_frame_the_clip_networks_logits(
    mobile: VideoNetwork, stream: bytes, clips: torch.Tensor
) -> None:
    wanted = frame_logits(mobile, clips).double().numpy()
    # Three clips through two streams: the last batch is filled up.
    found = difference(wanted, Exported(Runtime(stream), stream=True)(clips))
    assert found.largest < 1e-5 * found.largest_logit
    assert wanted.std(1).min() > 1e-4 * found.largest_logit, "the frames differ"


def test_what_a_streams_file_holds(stream: bytes) -> None:
    runtime = Runtime(stream)
    # Blocks of 8, 8, 8, 16, 16, 16, 24, 24, 40 and 40 channels: a tenth of 8 is none.
    shapes = [*3 * [(2, 1, 4, 3)], *2 * [(2, 2, 4, 3)], *2 * [(2, 4, 2, 2)]]
    assert [info.name for info in runtime.inputs] == ["frame", *(f"cache_in_{number}" for number in range(7))]
    assert [info.name for info in runtime.outputs] == ["logits", *(f"cache_out_{number}" for number in range(7))]
    assert [info.shape for info in runtime.inputs] == [(2, 3, 64, 48), *shapes]
    assert [info.shape for info in runtime.outputs] == [(2, 5), *shapes]
    assert {info.dtype for info in (*runtime.inputs, *runtime.outputs)} == {"float32"}
    told = facts(stream)
    # The normalisations are part of the convolutions; a concatenation for each shift that moves something.
    wanted = {"Conv": 52, "Clip": 35, "Slice": 14, "Add": 11, "Concat": 7, "ReduceMean": 1, "Gemm": 1}
    assert told["operators"] == wanted  # 11 shortcuts: so narrow, the first block has one too
    assert told["versions"]["torch"] == torch.__version__ and told["versions"]["opset"] >= 18
    assert b"/summit_train/" not in stream and b".py" not in stream, "paths of this machine"


@pytest.mark.parametrize("batch", [2, None], ids=["two", "any"])
def test_a_clip_network_of_both_directions(clips: torch.Tensor, batch: int | None) -> None:
    network = build_model("tsm", "resnet18", FRAMES, 5, width=0.125).eval()
    torch.nn.init.normal_(network.get_parameter("fc.weight"), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = network(clips)[:, None].double().numpy()
    found = difference(wanted, Exported(Runtime(exported(clip_graph(network, batch, 64, 48))), stream=False)(clips))
    assert found.largest < 1e-5 * found.largest_logit


def test_a_stream_of_any_number_of_videos(clips: torch.Tensor) -> None:
    network = build_model("tsm", "resnet18", FRAMES, 5, width=0.125, shift_direction="past").eval()
    torch.nn.init.normal_(network.get_parameter("fc.weight"), generator=torch.Generator().manual_seed(0))
    runtime = Runtime(exported(stream_graph(network, None, 64, 48)))
    assert [info.shape[0] for info in (*runtime.inputs, *runtime.outputs)] == ["batch"] * 18
    found = difference(frame_logits(network, clips).double().numpy(), Exported(runtime, stream=True)(clips))
    assert found.largest < 1e-5 * found.largest_logit  # one alone, then two together


def test_half(mobile: VideoNetwork, stream: bytes, clips: torch.Tensor) -> None:
    half = to_half(stream)
    assert len(half) < 0.6 * len(stream)
    runtime = Runtime(half)
    assert {info.dtype for info in (*runtime.inputs, *runtime.outputs)} == {"float16"}
    found = difference(frame_logits(mobile, clips).double().numpy(), Exported(runtime, stream=True)(clips))
    assert 1e-5 < found.largest / found.largest_logit < 1e-2


def test_eight_bits(mobile: VideoNetwork, stream: bytes, clips: torch.Tensor) -> None:
    small = to_int8(stream)
    assert len(small) < 0.5 * len(stream)
    # 17 of the 52 convolutions are depthwise.
    operators = facts(small)["operators"]
    assert (operators["ConvInteger"], operators["Conv"], operators["MatMulInteger"]) == (35, 17, 1)
    weights = {value.name: value.data_type for value in onnx.load_from_string(small).graph.initializer}
    assert list(weights.values()).count(onnx.TensorProto.UINT8) >= 36
    runtime = Runtime(small)
    assert {info.dtype for info in (*runtime.inputs, *runtime.outputs)} == {"float32"}
    found = difference(frame_logits(mobile, clips).double().numpy(), Exported(runtime, stream=True)(clips))
    assert 1e-3 < found.largest / found.largest_logit < 0.2


def test_the_speed_is_a_time(stream: bytes) -> None:
    assert Runtime(stream).seconds_a_call() > 0
