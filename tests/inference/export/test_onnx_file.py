"""ONNX files of narrow networks in onnxruntime against torch."""

from __future__ import annotations

import pytest
import torch

from summit_train.inference.export.export import difference
from summit_train.inference.export.onnx_file import ConcatenatedShift, Runtime, exported, facts
from summit_train.models import VideoNetwork, build_model
from summit_train.models.resnet import VARIANTS, BasicBlock
from summit_train.models.shift import TemporalShift
from summit_train.spec.catalog import Adapter, ShiftDirection

FRAMES = 3


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
def clips() -> torch.Tensor:
    return torch.randn(3, FRAMES, 3, 64, 48, generator=torch.Generator().manual_seed(2))


def test_a_stream_gives_each_frame_the_clip_networks_logits(clips: torch.Tensor) -> None:
    """A narrow MobileNetV2 with a shift of no channel in the first blocks and statistics that show."""
    generator = torch.Generator().manual_seed(0)  # with which the frames' logits differ well above rounding
    shift = {"shift_direction": "past", "shift_fraction": 0.1}
    mobile = build_model("tsm", "mobilenet_v2", FRAMES, 5, width=0.25, generator=generator, **shift)
    for name, value in mobile.state_dict().items():
        if value.dtype.is_floating_point and value.dim() == 1:
            low, high = (0.5, 1.5) if name.endswith(("weight", "var")) else (-0.2, 0.2)
            value.uniform_(low, high, generator=generator)
    torch.nn.init.normal_(mobile.get_parameter("classifier.1.weight"), generator=generator)
    content = exported(mobile.eval(), 2, 64, 48, {}, stream=True)
    with torch.inference_mode():
        expected = mobile.classify(mobile.extract(mobile.to_input(clips))).view(*clips.shape[:2], -1).double().numpy()
    runtime = Runtime(content)
    largest, largest_logit = difference(expected, runtime.logits(clips))  # the last batch is filled up
    assert largest < 1e-5 * largest_logit
    assert expected.std(1).min() > 1e-4 * largest_logit, "the frames differ"
    # Blocks of 8, 8, 8, 16, 16, 16, 24, 24, 40 and 40 channels: a tenth of 8 is none.
    shapes = [*3 * [(2, 1, 4, 3)], *2 * [(2, 2, 4, 3)], *2 * [(2, 4, 2, 2)]]
    shape_of = lambda tensors: {one["name"]: tuple(one["shape"]) for one in tensors}  # noqa: E731
    caches = {f"cache_in_{number}": shape for number, shape in enumerate(shapes)}
    assert shape_of(runtime.inputs) == {"frame": (2, 3, 64, 48), **caches}
    after = {name.replace("_in_", "_out_"): shape for name, shape in caches.items()}
    assert shape_of(runtime.outputs) == {"logits": (2, 5), **after}
    versions, operators = facts(content)
    # The normalisations are part of the convolutions; a concatenation for each shift that moves something.
    counts = {"Conv": 52, "Clip": 35, "Add": 11, "ReduceMean": 1, "Gemm": 1}
    assert {name: operators[name] for name in counts} == counts and "BatchNormalization" not in operators
    assert versions["torch"] == torch.__version__ and versions["opset"] >= 18
    assert b"/summit_train/" not in content and b".py" not in content, "paths of this machine"


@pytest.mark.parametrize(
    ("arch", "backbone", "adapter"),
    [("tsm", "resnet18", "none"), pytest.param("vit", "vit_s", "shift", marks=pytest.mark.nightly)],
)
def test_a_clip_network_of_both_directions(
    clips: torch.Tensor, monkeypatch: pytest.MonkeyPatch, arch: str, backbone: str, adapter: Adapter
) -> None:
    """Of few blocks: the others are like these, and each takes a while to export."""
    monkeypatch.setitem(VARIANTS, "resnet18", (BasicBlock, (1, 1, 0, 0)))
    network: VideoNetwork = build_model(arch, backbone, FRAMES, 5, width=0.125, adapter=adapter).eval()
    if arch == "vit":
        del network.get_submodule("blocks")[2:]
    torch.nn.init.normal_(network.get_parameter("fc.weight"), generator=torch.Generator().manual_seed(0))
    before = repr(network)
    with torch.inference_mode():
        expected = network(clips)[:, None].double().numpy()
    largest, largest_logit = difference(
        expected, Runtime(exported(network, None, 64, 48, {}, stream=False)).logits(clips)
    )
    assert largest < 1e-5 * largest_logit and repr(network) == before
