"""ViT by hand, against transformers' VideoMAE and ViT, published names, adapters, streams and a frozen trunk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from summit_train.core.errors import UserError
from summit_train.models import VideoNetwork, build_model
from summit_train.models.count import count
from summit_train.models.network import recompute_blocks
from summit_train.models.video import freeze_trunk
from summit_train.models.vit import SIDE, Attention, STAdapter, fixed_positions, resized
from summit_train.training.exchange import split_buckets
from tests.closeness import assert_near
from tests.models.test_build import NETWORKS
from tests.models.test_online import frame_logits, streamed
from tests.models.test_shift import shifted_by_hand
from tests.networks import clips, load

Tensors = dict[str, torch.Tensor]
FRAMES = 4
CLIPS = (2, FRAMES, 32, 48)
CPU = torch.device("cpu")


def random_vit(adapter: str = "none", seed: int = 0, frames: int = FRAMES, **options: Any) -> VideoNetwork:
    """A ViT-S of 48 channels in double precision, all of whose tensors are random and of a size that shows."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model("vit", "vit_s", frames, 5, width=0.125, adapter=adapter, generator=generator, **options)  # type: ignore[arg-type]
    for name, value in model.state_dict().items():
        low, high = (0.5, 1.5) if "norm" in name and name.endswith("weight") else (-0.3, 0.3)
        value.uniform_(low, high, generator=generator)
    return model.double().eval()


def test_attention_by_hand() -> None:
    """Two tokens, 3 and 1, two channels: queries are the tokens plus (1, 0), keys the tokens, values (0, 10) more."""
    attention = Attention(2, 1)
    with torch.no_grad():
        attention.qkv.weight.copy_(torch.eye(2).repeat(3, 1))
        attention.proj.weight.copy_(torch.eye(2))
        attention.q_bias.copy_(torch.tensor([1.0, 0.0]))
        attention.v_bias.copy_(torch.tensor([0.0, 10.0]))
        attention.proj.bias.zero_()
        out = attention(torch.tensor([[[3.0, 0.0], [1.0, 0.0]]]))
    # Scores / sqrt(2): of the query 4 12 and 4, of the query 2 6 and 2. The values are (3, 10) and (1, 10).
    for token, (first, second) in zip(out[0], ((12, 4), (6, 2)), strict=True):
        share = 1 / (1 + math.exp((second - first) / math.sqrt(2)))
        assert_near(token, torch.tensor([3 * share + (1 - share), 10.0]), 1e-5)


def test_positions_by_hand() -> None:
    index = fixed_positions("index", (1, 1, 3), 4, CPU)
    assert_near(index[2], torch.tensor([math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]).double(), 1e-6)
    grid = fixed_positions("grid", (2, 2, 3), 16, CPU)
    # Time 1, row 0, column 2: eight channels of time, four of the row, four of the column; patch 1 * 6 + 0 * 3 + 2.
    waves = [[wave(place / 10000 ** (i / pairs)) for wave in (math.sin, math.cos) for i in range(pairs)]
             for place, pairs in ((1, 4), (0, 2), (2, 2))]  # fmt: skip
    assert_near(grid[8], torch.tensor(list(itertools.chain(*waves))).double(), 1e-6)
    assert len({tuple(place.tolist()) for place in grid}) == len(grid) == 12
    # Sixteen channels in thirds are six for each; the last two cosines of the column are cut off.
    uniform = fixed_positions("grid_uniform", (2, 2, 3), 16, CPU)
    waves = [[wave(place / 10000 ** (i / 3)) for wave in (math.sin, math.cos) for i in range(3)] for place in (1, 0, 2)]
    assert_near(uniform[8], torch.tensor(list(itertools.chain(*waves))[:16]).double(), 1e-6)


def test_learned_positions_are_interpolated_as_torch_does() -> None:
    table = torch.randn(1, SIDE * SIDE, 3, dtype=torch.double)
    assert resized(table, SIDE, SIDE) is table
    for size in ((16, 16), (7, 4), (1, 20)):
        picture = table.view(1, SIDE, SIDE, 3).permute(0, 3, 1, 2)
        expected = nn.functional.interpolate(picture, size, mode="bicubic").flatten(2).transpose(1, 2)
        assert_near(resized(table, *size), expected, 1e-12)


def transformers_or_skip() -> Any:
    return pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for value in model.parameters():
        value.data.uniform_(-0.3, 0.3, generator=generator)
    return model.double().eval()


@torch.no_grad()
def test_logits_are_those_of_transformers_videomae(tmp_path: Path) -> None:
    theirs = transformers_or_skip()
    config = theirs.VideoMAEConfig(
        image_size=32, num_frames=FRAMES, hidden_size=48, num_hidden_layers=12, num_attention_heads=6,
        intermediate_size=192, layer_norm_eps=1e-6, num_labels=5,
    )  # fmt: skip
    expected = filled(theirs.VideoMAEForVideoClassification(config))
    ours = build_model("vit", "vit_s", FRAMES, 5, width=0.125).double().eval()
    report = load(ours, expected.state_dict(), tmp_path)
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    clip = clips(2, FRAMES)
    # Their positions have the digits of float32.
    assert_near(ours(clip), expected(pixel_values=clip).logits, 1e-6)


@torch.no_grad()
def test_a_frames_logits_are_those_of_transformers_vit(tmp_path: Path) -> None:
    theirs = transformers_or_skip()
    config = theirs.ViTConfig(
        image_size=224, hidden_size=48, num_hidden_layers=12, num_attention_heads=6, intermediate_size=192,
        layer_norm_eps=1e-6, num_labels=5,
    )  # fmt: skip
    expected = filled(theirs.ViTForImageClassification(config))
    ours = build_model("vit", "vit_s", 2, 5, width=0.125, adapter="st").double().eval()
    report = load(ours, timms(expected.state_dict()), tmp_path)
    assert all(".adapter." in name for name in report.names("missing")) and report.names("unexpected") == ()
    clip = clips(1, 2, 224, 224)
    assert_near(frame_logits(ours, clip)[:, 0], expected(pixel_values=clip[0]).logits, 1e-9)


def timms(state: Tensors) -> Tensors:
    """transformers' ViT under timm's names, biases and weights of queries, keys and values in one tensor each."""
    plain = {
        "vit.embeddings.cls_token": "cls_token", "vit.embeddings.position_embeddings": "pos_embed",
        "vit.embeddings.patch_embeddings.projection.": "patch_embed.proj.", "vit.encoder.layer.": "blocks.",
        "vit.layers.": "blocks.", "vit.layernorm.": "norm.", "layernorm_before": "norm1", "layernorm_after": "norm2",
        "attention.output.dense": "attn.proj", "attention.o_proj": "attn.proj", "intermediate.dense": "mlp.fc1",
        "mlp.fc1": "mlp.fc1", "output.dense": "mlp.fc2", "classifier.": "head.", "attention.attention.": "attention.",
        "q_proj": "query", "k_proj": "key", "v_proj": "value",
    }  # fmt: skip
    renamed = {}
    for name, value in state.items():
        for old, new in plain.items():
            name = name.replace(old, new)
        renamed[name] = value
    for name in [name for name in renamed if ".attention.query." in name]:
        parts = [renamed.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        renamed[name.replace("attention.query", "attn.qkv")] = torch.cat(parts)
    return renamed


def videomaes(state: Tensors) -> Tensors:
    """modeling_finetune.py."""
    return {name.replace("fc.", "head.", 1) if name.startswith("fc.") else name: v for name, v in state.items()}


def pretraining(state: Tensors) -> Any:
    """modeling_pretrain.py: an encoder with a norm of its own, and what is left behind."""
    body = {f"encoder.{name}": value for name, value in state.items() if name.startswith(("patch_embed", "blocks"))}
    return {"model": body | {"encoder.norm.weight": torch.ones(48), "decoder.head.weight": torch.ones(9, 9)}}


def fused(state: Tensors) -> Tensors:
    """One bias of queries, keys and values in each block; that of the keys is 7."""
    found = {name: value for name, value in state.items() if not name.endswith(("q_bias", "v_bias"))}
    for name in [name for name in state if name.endswith("q_bias")]:
        keys = torch.full_like(state[name], 7.0)
        found[name.replace("q_bias", "qkv.bias")] = torch.cat([state[name], keys, state[name.replace("q_b", "v_b")]])
    return found


def vjepas_positions(channels: int, side: int, *, uniform_power: bool) -> torch.Tensor:
    """pos_embs.py of V-JEPA's code, place by place: 8 times, side x side patches."""
    third = math.ceil(channels / 6) * 2
    shares = (third, third, third) if uniform_power else (channels // 2, channels // 4, channels // 4)
    rows = []
    for places in itertools.product(range(8), range(side), range(side)):
        row: list[float] = []
        for place, share in zip(places, shares, strict=True):
            angles = [place / 10000 ** (i / (share / 2)) for i in range(share // 2)]
            row += [*map(math.sin, angles), *map(math.cos, angles)]
        rows.append(row[:channels])
    return torch.tensor(rows)[None]


def vjepas(state: Tensors, side: int = SIDE, *, uniform_power: bool = True) -> Any:
    """V-JEPA's checkpoints: an encoder, its average, a predictor, each in two wrappers; fixed positions."""
    body = {name: value for name, value in fused(state).items() if name.startswith(("patch_embed", "blocks"))}
    body["pos_embed"] = vjepas_positions(48, side, uniform_power=uniform_power)
    body["norm.weight"] = torch.ones(48)
    body = {f"module.backbone.{name}": value for name, value in body.items()}
    others = {name: torch.zeros_like(value) for name, value in body.items()}
    return {"encoder": others, "predictor": {"module.x": torch.ones(1)}, "target_encoder": body, "epoch": 300}


@pytest.mark.parametrize(
    ("layout", "adapter", "positions", "missing", "unexpected"),
    [
        (videomaes, "none", "index", set(), set()),
        (lambda state: {"module": videomaes(state)}, "none", "index", set(), set()),
        (pretraining, "none", "index", {"fc", "fc_norm"}, {"encoder.norm.weight", "decoder.head.weight"}),
        (vjepas, "none", "grid_uniform", {"fc", "fc_norm"}, {"module.backbone.norm.weight"}),
        (partial(vjepas, uniform_power=False), "none", "grid", {"fc", "fc_norm"}, {"module.backbone.norm.weight"}),
        (lambda state: fused(videomaes(state)), "shift", "index", set(), set()),
    ],
    ids=["fine-tuned", "DeepSpeed", "pre-trained", "V-JEPA", "V-JEPA, not uniform", "timm"],
)
def test_published_names_load(
    tmp_path: Path, layout: Callable[[Tensors], Any], adapter: str, positions: str, missing: set[str],
    unexpected: set[str],
) -> None:  # fmt: skip
    source, model = (random_vit(adapter, seed, positions=positions) for seed in (1, 2))
    report = load(model, layout(source.state_dict()), tmp_path)
    assert {name.rpartition(".")[0] for name in report.names("missing")} == missing
    assert set(report.names("unexpected")) == unexpected and not any(row.note for row in report.rows)
    for (name, found), expected in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(found, expected) == (name.rpartition(".")[0] not in missing), name


def test_published_vit_l_positions_of_v_jepa() -> None:
    """1,024 channels are no multiple of six: 342 an axis, cut to 1,024 (`uniform_power: true` in all its configs)."""
    theirs = vjepas_positions(1024, 4, uniform_power=True)[0]
    assert_near(fixed_positions("grid_uniform", (8, 4, 4), 1024, CPU), theirs.double(), 1e-6)


def test_a_bias_of_the_keys_changes_nothing() -> None:
    attention = filled(Attention(8, 2))
    x = torch.randn(2, 5, 8, dtype=torch.double)
    expected = attention(x)
    attention.qkv.bias = nn.Parameter(torch.zeros(24, dtype=torch.double))
    attention.qkv.bias.data[8:16].uniform_(-3, 3)
    assert_near(attention(x), expected, 1e-12)


def qkv_parts(*missing: str, **replaced: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """The weights of one block's queries, keys and values apart, but for the missing ones, as transformers has them."""

    def parts(state: Tensors) -> Tensors:
        found = dict(state)
        matrix = found.pop(f"{ATTENTION}.qkv.weight")[:48]
        kinds = {kind: replaced.get(kind, matrix) for kind in ("query", "key", "value") if kind not in missing}
        return found | {f"{ATTENTION}.{kind}.weight": value for kind, value in kinds.items()}

    return parts


ATTENTION = "blocks.3.attn"
QUERY, KEY, VALUE = (f"{ATTENTION}.{kind}.weight" for kind in ("query", "key", "value"))
SHAPES = f"matrices of one shape: {QUERY} (48, 48), {KEY}"
BIAS = f"{ATTENTION}.qkv.bias"
BIASES = f"{BIAS} must be of queries, keys and values"


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({}, vjepas, "needs model.positions=grid_uniform, got index"),
        ({"positions": "grid"}, vjepas, "needs model.positions=grid_uniform, got grid"),
        ({}, partial(vjepas, uniform_power=False), "needs model.positions=grid, got index"),
        ({"positions": "grid"}, partial(vjepas, side=16), "rotary"),
        ({}, lambda state: random_vit("st").state_dict(), "pos_embed"),
        ({}, lambda state: state | {"pos_embed": torch.ones(0, 1568, 48)}, "pos_embed"),
        ({"adapter": "st"}, lambda state: state | {"norm_pre.weight": torch.ones(48)}, "CLIP"),
        ({"adapter": "st"}, lambda state: state | {"blocks.0.ls1.gamma": torch.ones(48)}, "blocks.0.ls1.gamma"),
        ({}, qkv_parts("key"), f"it has {QUERY}, {VALUE} and no {KEY}"),
        ({}, qkv_parts("value"), f"and no {VALUE}"),
        ({}, qkv_parts(key=torch.ones(48, 47)), f"{SHAPES} (48, 47)"),
        ({}, qkv_parts(key=torch.tensor(1.0)), f"{SHAPES} ()"),
        ({}, lambda state: state | {BIAS: torch.ones(2)}, f"{BIASES}, got shape (2,)"),
        ({}, lambda state: state | {BIAS: torch.tensor(1.0)}, f"{BIASES}, got shape ()"),
    ],
)
def test_files_of_other_vits_are_refused(
    tmp_path: Path, options: dict[str, Any], layout: Callable[[Tensors], Any], message: str
) -> None:
    model = random_vit(**options)
    with pytest.raises(UserError, match="weights of another network") as error:
        load(model, layout(model.state_dict()), tmp_path)
    assert message in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("direction", ["both", "past"])
def test_the_shift_is_in_front_of_the_attention_alone(direction: str) -> None:
    """Six of 48 channels from each side, in every token; the shortcut and the second branch see their own frame."""
    model = random_vit("shift", shift_direction=direction)
    block = model.blocks[3]
    x = torch.randn(2 * FRAMES, 7, 48, dtype=torch.double)
    shifted = shifted_by_hand(x.transpose(1, 2), FRAMES, 6, direction).transpose(1, 2)
    middle = x + block.attn(block.norm1(shifted))
    assert_near(block(x), middle + block.mlp(block.norm2(middle)), 1e-12)


@torch.no_grad()
def test_an_st_adapter_by_its_formula() -> None:
    adapter = filled(STAdapter(8, 3))
    x = torch.randn(2 * 3, 1 + 4, 8, dtype=torch.double)
    down = adapter.fc1(x).unflatten(0, (2, 3))
    expected = x.clone().unflatten(0, (2, 3))
    for t in range(3):
        taps = [(tap, t + tap - 1) for tap in range(3) if 0 <= t + tap - 1 < 3]
        inside = adapter.conv.bias + sum(adapter.conv.weight[:, 0, tap, 0, 0] * down[:, other] for tap, other in taps)
        expected[:, t, 1:] += adapter.fc2(inside)[:, 1:]
    assert_near(adapter(x), expected.flatten(0, 1), 1e-12)


@torch.no_grad()
def test_a_fresh_st_adapter_is_the_identity() -> None:
    generator = torch.Generator().manual_seed(0)
    model = build_model("vit", "vit_s", FRAMES, 5, width=0.125, adapter="st", generator=generator).double().eval()
    clip = clips(*CLIPS)
    expected = model(clip)
    for block in model.blocks:
        assert block.adapter.fc1.weight.any() and block.adapter.fc2.weight.any()
        block.adapter = nn.Identity()
    assert torch.equal(model(clip), expected)


@torch.inference_mode()
def test_a_past_only_shift_streams() -> None:
    model, clip = random_vit("shift", shift_direction="past"), clips(*CLIPS)
    theirs = frame_logits(model, clip)
    assert theirs.std(0).min() > 1e-6 * theirs.abs().max(), "the frames differ"
    assert_near(streamed(model, clip), theirs, 1e-12)


@torch.no_grad()
def test_each_form_sees_what_it_should() -> None:
    """Joint attention sees the order of the frames; an image ViT with the shift sees it too, and one frame at most."""
    clip = clips(*CLIPS)
    changed = clip.clone()
    changed[:, -1] += 1
    assert (random_vit()(clip) - random_vit()(clip.flip(1))).abs().max() > 1e-3
    past = random_vit("shift", shift_direction="past")
    before, after = frame_logits(past, clip), frame_logits(past, changed)
    assert torch.equal(before[:-1], after[:-1]) and not torch.equal(before[-1], after[-1])


def test_drop_path_takes_whole_clips_by_the_seed_and_grows_with_the_depth() -> None:
    model = random_vit("shift", drop_path=0.55)
    rates = [block.drop_path2.p for block in model.blocks]
    assert rates == pytest.approx([0.05 * number for number in range(12)])
    drop = model.blocks[11].drop_path1.train()
    x = torch.ones(500 * FRAMES, 3, 2, dtype=torch.double)
    drop.reseed(7)
    out = drop(x).unflatten(0, (500, FRAMES)).flatten(1)
    assert torch.equal(out, out[:, :1].expand_as(out)) and set(out.unique().tolist()) == {0.0, 1 / 0.45}
    assert out.mean().item() == pytest.approx(1, abs=5 * math.sqrt(0.55 / 0.45 / 500))
    assert torch.equal(drop(x), drop(x)), "the seed alone decides"
    drop.reseed(8)
    assert not torch.equal(drop(x).unflatten(0, (500, FRAMES)).flatten(1), out)
    first, second = (model.blocks[11].get_submodule(f"drop_path{n}").train() for n in (1, 2))
    model.reseed(3)
    assert not torch.equal(first(x), second(x))
    assert drop.eval()(x) is x and not any("drop" in name for name in model.state_dict())


def test_recomputed_blocks_leave_out_the_same_clips() -> None:
    kept, recomputed = (random_vit("shift", drop_path=0.9).train() for _ in range(2))
    recompute_blocks(recomputed)
    for model in (kept, recomputed):
        model.reseed(5)
        model(clips(4, FRAMES)).square().sum().backward()
    for (name, one), other in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_attention_and_adapters_are_counted() -> None:
    with torch.device("meta"):
        models = [build_model("vit", "vit_b", 8, 400, adapter=adapter) for adapter in ("shift", "st", "st")]
        freeze_trunk(models[2])
        plain, adapted, frozen = (count(model, 224) for model in models)
    # Attention: 2 products of 197 x 197 x 768 in 12 blocks and 8 frames. The rest are layers.
    assert plain.multiply_adds - sum(layer.multiply_adds for layer in plain.layers) == 12 * 8 * 2 * 197**2 * 768
    # An adapter: 768 to 384 and back, three taps each, and biases. Multiply-adds on 196 patches of 8 frames.
    one = 2 * 768 * 384 + 384 + 768 + 4 * 384
    assert adapted.parameters - plain.parameters == 12 * one
    assert adapted.multiply_adds - plain.multiply_adds == 12 * 8 * 196 * (2 * 768 * 384 + 3 * 384)
    assert (plain.trained_parameters, frozen.trained_parameters) == (plain.parameters, 12 * one + 769 * 400)
    assert frozen.gradient_bytes == 4 * (12 * one + 769 * 400)


def test_a_frozen_trunk_trains_adapters_and_classifier_alone() -> None:
    model = random_vit("st").train()
    freeze_trunk(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".adapter." in name or name.startswith("fc.")}
    assert sum(bucket.flat.numel() for bucket in split_buckets(model.parameters())) == sum(
        model.get_parameter(name).numel() for name in trained
    )
    model(clips(*CLIPS)).square().sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


@pytest.mark.parametrize(("arch", "backbone", "frames"), NETWORKS)
def test_every_architecture_has_a_trunk_that_freezes(arch: str, backbone: str | None, frames: int) -> None:
    with torch.device("meta"):
        model = build_model(arch, backbone, frames, 3, width=0.125)
    freeze_trunk(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {
        "tsm mobilenet_v2": {"classifier"}, "trn resnet18": {"fc", "consensus"},
    }.get(f"{arch} {backbone}", {"fc"})  # fmt: skip


def test_a_frozen_trunk_with_batch_normalisations_keeps_their_statistics() -> None:
    model = build_model("tsm", "resnet50", 2, 3, width=0.125, non_local="tsm").train()
    freeze_trunk(model)
    assert not model.bn1.training and model.get_submodule("layer2.0.nl.W.1").training
    model.train()
    assert not model.bn1.training
    assert all(p.requires_grad == ("nl." in name or name.startswith("fc.")) for name, p in model.named_parameters())
