"""SlowFast's two pathways: which frames each sees, what the lateral connections bring, and how they end."""

from __future__ import annotations

import pytest
import torch

from summit_train.models import VideoNetwork, build_model
from tests.closeness import assert_near


def network() -> VideoNetwork:
    """A narrow network in double, in evaluation mode: frames meet in convolutions alone."""
    generator = torch.Generator().manual_seed(0)
    model = build_model("slowfast", None, 16, 5, width=0.125, generator=generator)
    with torch.no_grad():
        model.fc.weight.normal_(generator=generator)
    return model.double().eval()


def frames_that_reach(model: VideoNetwork, name: str, channels: slice = slice(None)) -> list[set[int]]:
    """For each frame of the module's input (N, C, T, H, W), the frames of the clip that change it."""
    seen: list[torch.Tensor] = []
    # A copy, since the relu behind a stem's norm works in place.
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    clip = torch.randn(1, model.num_frames, 3, 16, 16, dtype=torch.double)
    clips = [clip.clone() for _ in range(model.num_frames)]
    with torch.no_grad():
        model(clip)
        for t, other in enumerate(clips):
            other[:, t] += 1.0
            model(other)
    hook.remove()
    plain, *changed = (value[0, channels].movedim(1, 0) for value in seen)
    differs = [[not torch.equal(a, b) for a, b in zip(plain, other, strict=True)] for other in changed]
    return [{t for t, frames in enumerate(differs) if frames[place]} for place in range(len(plain))]


def test_which_frames_each_pathway_sees() -> None:
    """The slow one every 8th; the fast one's conv1 spans 5 frames, pool1 one."""
    model = network()
    assert frames_that_reach(model, "slow.conv1") == [{0}, {8}]
    # conv1 and res2 of the slow pathway have no kernel in time: its own channels come from these frames alone.
    assert frames_that_reach(model, "slow.layer1", slice(8)) == [{0}, {8}]
    expected = [set(range(max(0, t - 2), min(16, t + 3))) for t in range(16)]
    assert frames_that_reach(model, "fast.layer1") == expected


def test_laterals_bring_the_frames_around_each_slow_one() -> None:
    """The lateral spans frames 8 s - 2 .. 8 s + 2 of pool1, each of which spans 5 frames of the clip."""
    model = network()
    joined = frames_that_reach(model, "slow.layer1", slice(8, None))
    assert joined == [set(range(5)), set(range(4, 13))]


def test_a_lateral_by_hand() -> None:
    """norm(conv) at evaluation divides by sqrt(1 + 1e-5): out[s] = relu(sum over k of w[k] fast[8 s + k - 2])."""
    lateral = network().lateral1
    slow = torch.randn(2, 8, 3, 4, 4, dtype=torch.double)
    fast = torch.randn(2, 8, 24, 4, 4, dtype=torch.double)
    weight = lateral.conv.weight[..., 0, 0]
    assert weight.shape == (16, 8, 5)
    joined = lateral(slow, fast)
    assert joined.shape == (2, 24, 3, 4, 4)
    assert torch.equal(joined[:, :8], slow)
    for s in range(3):
        taps = [(k, 8 * s + k - 2) for k in range(5) if 8 * s + k - 2 >= 0]
        total = sum(torch.einsum("oc,nchw->nohw", weight[..., k], fast[:, :, t]) for k, t in taps)
        assert_near(joined[:, 8:, s], torch.relu(total) / (1 + 1e-5) ** 0.5, 1e-12)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_lateral_feeds_the_slow_pathway(number: int) -> None:
    """Without the others and without the fast half of the classifier, frame 9 still reaches the logits through it."""
    model = network()
    with torch.no_grad():
        model.fc.weight[:, 256:] = 0.0
        for other in {1, 2, 3, 4} - {number}:
            model.get_submodule(f"lateral{other}").bn.weight.zero_()
    clip = torch.randn(1, 16, 3, 32, 32, dtype=torch.double)
    changed = clip.clone()
    changed[:, 9] += 1.0
    assert not torch.allclose(model(clip), model(changed))
    model.get_submodule(f"lateral{number}").bn.weight.data.zero_()
    assert torch.equal(model(clip), model(changed))


def test_the_classifier_takes_both_averages() -> None:
    model = network()
    ends: dict[str, torch.Tensor] = {}
    for pathway in ("slow", "fast"):
        last = model.get_submodule(f"{pathway}.layer4")
        last.register_forward_hook(lambda _m, _i, out, pathway=pathway: ends.update({pathway: out}))
    clip = torch.randn(2, 16, 3, 32, 32, dtype=torch.double)
    features = model.extract(model.to_input(clip))
    assert features.shape == (2, 256 + 32)
    assert (ends["slow"].shape[2], ends["fast"].shape[2]) == (2, 16)
    expected = torch.cat([ends[pathway].mean((2, 3, 4)) for pathway in ("slow", "fast")], 1)
    assert_near(features, expected, 1e-12)
    assert_near(model(clip), model.fc(features), 1e-12)
