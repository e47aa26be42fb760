"""The spec's network, and how its step is computed: recomputed blocks give what kept ones give; wrong gradients."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.models import build_model, network
from summit_train.models.count import count
from summit_train.models.fast import accelerate
from summit_train.models.network import (
    RecomputedBlocks,
    check_arithmetic,
    check_batch,
    cpu_kernels,
    error_of_two_frames,
    initial_network,
    recompute_blocks,
    separate_compile_cache,
)
from summit_train.models.resnet import VARIANTS, BasicBlock
from summit_train.models.video import norm_momentum, trained_norms
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from tests.conftest import WriteSpec
from tests.held import kept
from tests.models.test_build import NETWORKS
from tests.worlds import Say

CPU = torch.device("cpu")
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def losses(spec: Spec, updates: int = 2) -> list[float]:
    """The losses of plain SGD on one random batch."""
    model = initial_network(spec, CPU).train()
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(2, spec.data.num_frames, 3, 32, 32, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for _ in range(updates):
        loss = torch.nn.functional.cross_entropy(model(clips), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_recompute_reaches_the_network_and_changes_no_loss(write_spec: WriteSpec) -> None:
    path = write_spec(model={"dropout": 0.0})
    plain, recomputed = (load_spec(path, [f"execution.recompute={value}"]) for value in ("false", "true"))
    assert isinstance(initial_network(recomputed, CPU).layer1, RecomputedBlocks)
    assert not isinstance(initial_network(plain, CPU).layer1, RecomputedBlocks)
    assert losses(recomputed) == losses(plain)


@pytest.mark.parametrize(
    ("arch", "num_frames", "crop"),
    # The largest crop of which one value per channel is left: strides are 32, and ECO-lite's pools round up.
    [("tsn", 1, 32), ("i3d_3x3x3", 16, 32), ("eco_lite", 4, 38), ("x3d_m", 1, 32), ("slowfast", 8, 32)],
)
def test_one_clip_without_variance_is_refused(write_spec: WriteSpec, arch: str, num_frames: int, crop: int) -> None:
    backbone = {"eco_lite": None, "x3d_m": None, "slowfast": "resnet50"}.get(arch, "resnet18")
    path = write_spec(model={"arch": arch, "backbone": backbone, "width": 0.125}, data={"num_frames": num_frames})
    words = [f"data.crop={crop}", f"data.short_side=[{crop + 1},{crop + 1}]", "scale.clips_per_gpu=1"]
    for more in (f"data.crop={crop + 1}", "scale.clips_per_gpu=2"):
        check_batch(load_spec(path, [*words, more]))
    with pytest.raises(UserError, match=rf"^scale\.clips_per_gpu: must be 2 or more, got 1: .* {crop} x {crop} pix"):
        check_batch(load_spec(path, words))


def test_one_clip_is_enough_for_norms_that_are_frozen(write_spec: WriteSpec) -> None:
    words = ["data.num_frames=1", "scale.clips_per_gpu=1", "data.crop=32", "optimizer.freeze=[layer4]"]
    spec = load_spec(write_spec(model={"arch": "tsn", "backbone": "resnet18"}), words)
    check_batch(spec)
    clip = torch.randn(1, 1, 3, 32, 32)
    assert initial_network(spec, CPU).train()(clip).isfinite().all()


def test_plan_and_train_refuse_a_batch_of_one_value(write_spec: WriteSpec, say: Say) -> None:
    model = {"arch": "eco_lite", "backbone": None, "width": 0.125}
    spec = write_spec(model=model, data={"num_frames": 4}, scale={"clips_per_gpu": 1})
    for command in ("plan", "train"):
        status, _, err = say(command, spec)
        assert status == 2 and err.count("\n") == 1 and "scale.clips_per_gpu: must be 2 or more, got 1" in err


def test_the_kernels_for_cpus_are_asked_for_on_cpus_alone() -> None:
    """On a GPU nothing would be compiled in vain, nor missed."""
    assert cpu_kernels(torch.device("cuda")) == "not used"


def _compare_compiled(write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare losses and names of one network, compiled and not."""
    monkeypatch.setitem(VARIANTS, "resnet18", (BasicBlock, (1, 0, 0, 0)))  # compiling eight blocks takes a minute
    path = write_spec(model={"dropout": 0.0, "width": 0.125, "backbone": "resnet18"}, data={"num_frames": 2})
    plain, compiled = (load_spec(path, [f"execution.compile={value}"]) for value in ("false", "true"))
    assert list(initial_network(compiled, CPU).state_dict()) == list(initial_network(plain, CPU).state_dict())
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


def test_traced_the_losses_and_the_names_are_the_same(write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile traces the network, without its code for CPUs."""
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    _compare_compiled(write_spec, monkeypatch)
    assert graphs


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiled_the_losses_and_the_names_are_the_same(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    _compare_compiled(write_spec, monkeypatch)
    # All compiled code is in the folder for this kind of processor.
    (folder,) = (tmp_path / "cache").iterdir()
    assert str(folder) == os.environ[CACHE] and any(folder.rglob("*.main.so"))


def test_compiled_code_is_kept_for_each_kind_of_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the user's own folder or torch's usual one; a second call, or a child's, adds nothing."""

    def folder(capability: str, isa: str, parent: str | None) -> Path:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
        if parent is None:
            monkeypatch.delenv(CACHE, raising=False)
        else:
            monkeypatch.setenv(CACHE, parent)
        separate_compile_cache()
        found = os.environ[CACHE]
        separate_compile_cache()
        assert os.environ[CACHE] == found
        return Path(found)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = os.umask(0)
    folders = [
        folder(*kind, str(tmp_path)) for kind in (("DEFAULT", ""), ("AVX2", ""), ("AVX512", ""), ("AVX2", "SSE41"))
    ]
    os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in folders} == {0o755}
    assert len(set(folders)) == 4 and {each.parent for each in folders} == {tmp_path}
    assert folders[1].name.startswith("avx2-")
    assert folder("AVX2", "", None) == tmp_path / f"temporary/torchinductor_{os.getuid()}" / folders[1].name


@pytest.mark.parametrize(("number", "arch", "backbone", "num_frames"), [(i, *row) for i, row in enumerate(NETWORKS)])
def test_gradients_and_statistics_are_the_same_bits(
    number: int, arch: str, backbone: str | None, num_frames: int
) -> None:
    """Every second network accelerated."""
    torch.manual_seed(0)
    plain = build_model(arch, backbone, num_frames, 3, width=0.125).train()
    recomputed = copy.deepcopy(plain)
    recompute_blocks(recomputed)
    if number % 2:
        accelerate(plain)
        accelerate(recomputed)
    assert all(isinstance(recomputed.get_submodule(name), RecomputedBlocks) for name in recomputed.sequences)
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    clip = torch.randn(2, num_frames, 3, 32, 32)
    for _ in range(2):
        plain(clip).square().sum().backward()
        loss = recomputed(clip).square().sum()
        with norm_momentum(trained_norms(recomputed), 0.0):  # as a training step does
            loss.backward()
    for (name, expected), (_, found) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name
    for name, buffer in plain.named_buffers():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(buffer, recomputed.get_buffer(name)), name


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_the_blocks_keep_their_inputs_only(arch: str, backbone: str | None, num_frames: int) -> None:
    model = build_model(arch, backbone, num_frames, 3, width=0.125).train()
    counted = count(model, 64)
    recompute_blocks(model)
    with kept(model.parameters()) as noted:
        for name, block in model.named_modules():
            if name.rpartition(".")[0] in model.sequences:
                block.register_forward_pre_hook(lambda _, inputs: (noted.note(inputs[0]), None)[1])
        logits = model(torch.randn(1, num_frames, 3, 64, 64))
    # While the largest blocks, which are the first ones, are computed again, the inputs of those behind are gone.
    assert noted.elements() <= counted.recomputed_elements
    assert counted.recomputed_elements < noted.elements() + counted.largest_block_elements
    assert logits.requires_grad
    assert counted.activation_bytes(recompute=True) < counted.activation_bytes()


def _shipped(arch: str = "i3d_3x3x3", precision: str = "bf16") -> Spec:
    words = [f"model.arch={arch}", f"precision={precision}", "data.num_frames=16", "model.width=0.125"]
    return load_spec(shipped("configs/kinetics") / "tsm_r50_8f.yaml", [*words, "data.crop=32", "model.dropout=0"])


@pytest.mark.parametrize(
    ("spec", "device", "error", "refused"),
    [
        (_shipped(), CPU, float("inf"), True),
        (_shipped(), CPU, 0.01, False),
        (_shipped(precision="fp32"), CPU, float("inf"), False),
        (_shipped("tsm"), CPU, float("inf"), False),
        (_shipped("i3d_replace"), CPU, float("inf"), False),  # no stride in time: 16 frames all the way
        (_shipped(), torch.device("cuda"), float("inf"), False),
    ],
)
def test_wrong_gradients_are_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, device: torch.device, error: float, refused: bool
) -> None:
    monkeypatch.setattr(network, "error_of_two_frames", lambda: error)
    message = pytest.raises(UserError, match=r"has two with data.num_frames 16; take precision=fp32")
    with message if refused else nullcontext():
        check_arithmetic(spec, device)


@pytest.mark.parametrize(("spoil", "least"), [(1.0, 0.0), (0.0, 1.0), (float("nan"), float("inf"))])
def test_the_probe_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, spoil: float, least: float) -> None:
    """Without oneDNN the gradient is right; one that comes out as zeros or as NaN is seen."""
    honest = torch.autograd.grad

    def grad(out: torch.Tensor, weight: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (found,) = honest(out, weight, sent)
        return (found * (spoil if found.dtype == torch.bfloat16 else 1),)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with torch.backends.mkldnn.flags(enabled=False):
        assert least <= error_of_two_frames() <= least + (0.01 if least == 0 else 0)
