"""Shares of different sizes: V virtual GPUs train the same network on any number of ranks, whether it divides V or not.

One rank runs the V micro-batches of a step one after the other. Its last step is that of a run which resumes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from summit_train.core.comm import World, open_world
from summit_train.core.run_folder import learner_path
from summit_train.core.saved import Checkpoint
from summit_train.data.batches.loader import BadClip, MicroBatch
from summit_train.models import VideoNetwork
from summit_train.models.network import initial_network
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.catalog import ARCHITECTURES
from summit_train.spec.keys import OptimizerSpec
from summit_train.spec.source import shipped
from summit_train.training.averaging import AveragingStep
from summit_train.training.build import build_step
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.step import TrainStep
from summit_train.training.vote import Requests
from tests.conftest import WriteSpec
from tests.runs import difference, final_state, load_any, records
from tests.worlds import forked, needs_ranks, take_step, train

CPU = torch.device("cpu")
STEPS, LR = 3, 0.001
SPEC = (
    "scale.clips_per_gpu=2 schedule.epochs=1 schedule.warmup_epochs=0 precision=fp64 model.backbone=resnet18 "
    "model.width=0.0625 model.num_classes=4 data.num_frames=2 data.crop=32 noise_scale.every_steps=0"
)
AVERAGING = "parallel.method=averaging parallel.period=2"
FOREIGN = "model.backbone=null model.width=1.0 model.dropout=0.0 model.arch={folder}/nets.py:Odd"
SOLVERS = get_args(OptimizerSpec.model_fields["name"].annotation)
CASES = {
    # A ResNet of so few channels makes 1e-9 of a rounding error where the update is g / sqrt(v), on any ranks.
    **{name: f"{FOREIGN} optimizer.name={name}" for name in SOLVERS},
    "lars": "optimizer.trust_ratio.kind=lars",
    "bounded": "optimizer.trust_ratio.kind=bounded",
    "clipped": "optimizer.clip_norm=0.05",
    "ema, noise scale": "ema.decay=0.9 noise_scale.every_steps=2 model.dropout=0.3 data.erase=0.5",
    "averaging": AVERAGING,
    "averaging, local": f"{AVERAGING} parallel.optimizer_state=local parallel.bn=local",
    "averaging, foreign, adam": f"{FOREIGN} {AVERAGING} optimizer.name=adam",
    "frozen norms": "model.freeze_bn=all_but_first model.pretrained=none.pth",
    "fp16": f"{FOREIGN} precision=fp16",
    "compressed": f"{FOREIGN} optimizer.compression=fp16",
}
BOUNDS = {"fp16": 1e-5, "compressed": 2e-3}  # of sums in fp32, and of numbers that are sent as halves; else 1e-12

# Norms that run a number of times that the clips decide, none included, or average over all steps, and recomputation.
NETS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Odd(nn.Module):
    def __init__(self, num_classes, num_frames):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.second, self.head = nn.BatchNorm2d(8, momentum=0.9), nn.Linear(8, num_classes)

    def forward(self, x):
        y = sum(checkpoint(lambda f: self.first(self.stem(f)), f, use_reentrant=False) for f in x.unbind(1))
        for pixel in x.flatten()[:3]:
            y = self.second(y.tanh()) if pixel > 0 else y
        return self.head(y.tanh().mean((2, 3)))
"""


def _batch(step: int, number: int, shape: tuple[int, ...], *, is_bad: bool) -> MicroBatch:
    draw = torch.Generator().manual_seed(1000 * step + number)
    clips = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    labels, ids = torch.randint(0, 4, shape[:1], generator=draw), torch.arange(shape[0])
    return MicroBatch(step, number, clips, labels, ids, (BadClip(0, "a", "b", 1),) if is_bad else ())


def _build(words: Sequence[str], world: World) -> tuple[Spec, Plan, VideoNetwork, TrainStep | AveragingStep]:
    spec = load_spec(shipped("configs/motion") / "tsm.yaml", words)
    plan, model = make_plan(spec, world.size, 1000), initial_network(spec, CPU)
    return spec, plan, model, build_step(spec, plan, world, model, CPU)


def _train(words: Sequence[str], world: World, path: Path) -> dict[str, torch.Tensor]:
    """What a run of some steps leaves, as vectors: the network, its average, solvers, learners, and all votes."""
    spec, plan, model, step = _build(words, world)
    shape, last, votes = (2, *spec.data.clip_shape), world.rank == world.size - 1, []
    asked = Requests(stop=last, data_wait_s=float(world.rank))
    for number in range(STEPS):
        if number == STEPS - 1 and world.size == 1:
            saved = {**step.checkpoint(path, number), "model": model.state_dict()}
            save_checkpoint(path, saved)
            _, _, model, step = _build(words, world)
            checkpoint = Checkpoint(path, saved, world)
            checkpoint.restore(model)
            step.restore(checkpoint)
        own = plan.virtual_gpus_of(world.rank)
        batches = [_batch(number, v, shape, is_bad=v + 1 == plan.virtual_gpus) for v in own]
        vote = take_step(step, batches, LR, asked).read(plan.global_batch, plan.virtual_gpus, world.size)
        assert (vote.stop, vote.checkpoint, vote.bad_clips) == (True, False, 1)
        assert vote.data_wait_s == (world.size - 1) / 2
        squares = [0.0, 0.0] if vote.squares is None else [vote.squares.single, vote.squares.average]
        votes.append([vote.loss, vote.top1, vote.skipped, *squares])
    state = {**step.checkpoint(path, STEPS), "model": model.state_dict()}
    columns = torch.tensor(votes, dtype=torch.float64).T
    found = _vectors(state) | dict(zip(("loss", "top1", "skipped", "single", "mean"), columns, strict=True))
    for number, _ in enumerate(state.get("learner_digests", [])) if world.rank == 0 else []:
        of_learner = _vectors(load_any(learner_path(path, number)))
        found |= {f"learner {number} {name}": value for name, value in of_learner.items()}
    return found


def _vectors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A state's numbers by what they are: those of a layer alone may be next to nothing."""
    tensors = defaultdict[str, list[torch.Tensor]](list)
    for part, network in (("model", state["model"]), ("ema", state.get("ema", {}).get("model", {}))):
        for name, value in network.items():
            kind = name.rpartition(".")[2] if "running" in name or "num_" in name else "weights"
            tensors[f"{part} {kind}"].append(value)
    for name, value in [item for values in state["optimizer"]["state"].values() for item in values.items()]:
        tensors[f"solver {name}"].append(torch.as_tensor(value))
    for name, value in state["loss_scale"].items():
        tensors[f"loss {name}"] = [value]
    return {name: torch.cat([value.double().flatten() for value in values]) for name, values in tensors.items()}


def _train_all(cases: Mapping[str, Sequence[str]], folder: Path) -> int:
    world = open_world()
    found = {case: _train(words, world, folder / case) for case, words in cases.items()}
    if world.rank == 0:
        torch.save(found, folder / "found.pt")
    world.close()
    return 0


def differences(cases: Mapping[str, Sequence[str]], ranks: int, folder: Path) -> dict[str, float]:
    """By case, whose words are those of its spec: the largest relative difference of `ranks` ranks and one rank."""
    (folder / "ranks").mkdir()
    status, output = forked(ranks, partial(_train_all, cases, folder / "ranks"))
    assert status == 0, output
    together = torch.load(folder / "ranks/found.pt", weights_only=True)
    largest = {}
    for case, words in cases.items():
        one, other = _train(words, World(), folder / "alone" / case), together[case]
        assert one.keys() == other.keys()
        errors = {name: float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-300)) for name in one}
        largest[case] = float(torch.tensor([*errors.values()], dtype=torch.float64).max())  # NaN if one is
    return largest


@needs_ranks
@pytest.mark.parametrize(("virtual_gpus", "ranks"), [(6, 4), (7, 3)])
@pytest.mark.nightly
def test_uneven_shares_train_the_network_of_one_rank(virtual_gpus: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    cases = {
        case: [*SPEC.split(), *words.format(folder=tmp_path).split(), f"scale.gpus={virtual_gpus}"]
        for case, words in CASES.items()
    }
    found = differences(cases, ranks, tmp_path)
    assert [case for case, error in found.items() if not error <= BOUNDS.get(case, 1e-12)] == [], found


NETWORKS = {
    "tsm_mobilenet": "model.backbone=mobilenet_v2",
    "tsn": "model.arch=tsn data.num_frames=1",
    "tsm_non_local": "model.backbone=resnet50 model.non_local=tsm",
    "i3d_3x3x3": "model.arch=i3d_3x3x3 data.num_frames=16",
    "i3d_3x1x1": "model.arch=i3d_3x1x1 model.backbone=null data.num_frames=8 model.non_local=original",
    "i3d_replace": "model.arch=i3d_replace model.backbone=null",
    "trn": "model.arch=trn data.num_frames=4",
    "eco_lite": "model.arch=eco_lite model.backbone=null data.num_frames=4",
    "slowfast": "model.arch=slowfast model.backbone=null data.num_frames=8 model.zero_init_residual=true",
    "x3d_m": "model.arch=x3d_m model.backbone=null",
    "ir_csn": "model.arch=ir_csn model.backbone=null data.num_frames=8",
    "vit": "model.arch=vit model.backbone=null model.adapter=st model.drop_path=0.5",
}


@needs_ranks
@pytest.mark.nightly
def test_two_ranks_are_one_rank_with_every_network(tmp_path: Path) -> None:
    cases = {name: [*SPEC.split(), *words.split(), "scale.gpus=2"] for name, words in NETWORKS.items()}
    archs = {load_spec(shipped("configs/motion") / "tsm.yaml", words).model.arch for words in cases.values()}
    assert archs == set(ARCHITECTURES)
    found = differences(cases, 2, tmp_path)
    assert all(error <= 1e-9 for error in found.values()), found


RUNS: dict[str, dict[str, Any]] = {
    "synchronous": {"ema": {"decay": 0.9}, "evaluate": {"precise_bn": 2}},
    # Each decision but the first grows the batch: 5, 5 and 2 steps of 2, 2 and 4 clips of a learner.
    "growing": {
        "parallel": {
            "method": "averaging", "period": 2, "optimizer_state": "local", "bn": "local",
            "grow_batch": {"margin": 1000.0},
        },
        "evaluate": {"every_epochs": 1},
    },
}  # fmt: skip


@needs_ranks
@pytest.mark.parametrize(
    ("kind", "begin", "ranks", "comm"),
    [("synchronous", 5, 2, "horovod"), ("growing", 10, 4, "torch")],
)
@pytest.mark.nightly
def test_3_ranks_continue_on_others(
    write_spec: WriteSpec, tmp_path: Path, kind: str, begin: int, ranks: int, comm: str
) -> None:
    """Seven virtual GPUs and three epochs of five steps; the second start finds the checkpoint of `begin`."""
    common = {"scale": {"gpus": 7, "clips_per_gpu": 2}, "schedule": {"epochs": 3}, "precision": "fp64"}
    whole, moved = (write_spec(name, **common, **RUNS[kind]) for name in ("whole", "moved"))
    train(0, whole)
    train(3, moved)
    for later in (tmp_path / "runs/moved/checkpoints").glob("step_*"):
        if int(later.name[5:13]) > begin:
            later.unlink()
    output = train(ranks, moved, comm=comm)
    assert f"step_{begin:08d}.pt" in output
    assert (comm == "torch") != ("continues over horovod; earlier steps ran over torch (gloo)" in output)
    one, other = (tmp_path / f"runs/{name}" for name in ("whole", "moved"))
    assert difference(final_state(one), final_state(other)) <= 1e-12
    results = [json.loads((run / "eval.json").read_text()) for run in (one, other)]
    scores = [[part["top1_mean"] for part in (result, *filter(None, [result.get("ema")]))] for result in results]
    assert scores[0] == scores[1] and len(scores[0]) == 1 + ("ema" in RUNS[kind])
    grown = [[record["clips_per_gpu"] for record in records(run, "batch")][-1:] for run in (one, other)]
    assert grown[0] == grown[1] == ([4] if kind == "growing" else [])
    plan = json.loads((other / "plan.json").read_text())
    assert (plan["ranks"], plan["accumulation"], plan["load_balance"]) == (ranks, -(-7 // ranks), 7 / 8)


@needs_ranks
def test_fp16_skips_the_same_updates_on_any_ranks(write_spec: WriteSpec, tmp_path: Path) -> None:
    """The loss scale begins too large for this network: some updates are skipped, some are not."""
    common = {"scale": {"gpus": 6, "clips_per_gpu": 2}, "precision": "fp16", "watch": {"nonfinite_steps": 20}}
    ends = {}
    for ranks in (1, 3):
        train(ranks, write_spec(f"on_{ranks}", optimizer={"base_lr": 0.001}, schedule={"epochs": 3}, **common))
        run = tmp_path / f"runs/on_{ranks}"
        ends[ranks] = [record["step"] for record in records(run, "step") if record["skipped"]], final_state(run)
    skipped, alone = ends[1]
    assert 0 < len(skipped) < alone["step"]
    for others, state in ends.values():
        assert others == skipped and state["loss_scale"] == alone["loss_scale"]
        assert difference(alone, state) <= 1e-3  # fp32's rounding, which the updates amplify
