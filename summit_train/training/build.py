"""Build the training step that a spec asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.models import VideoNetwork
from summit_train.models.by_name import lr_factors
from summit_train.models.network import initial_network
from summit_train.optim.solvers import build_solver, parameter_groups
from summit_train.optim.trust import TrustRatio
from summit_train.plan import Plan
from summit_train.spec import Spec
from summit_train.spec.keys import OptimizerSpec
from summit_train.training.averaging import AveragingStep
from summit_train.training.loss import TaskLoss, build_loss
from summit_train.training.step import StepSettings, TrainStep


def build_step(
    spec: Spec, plan: Plan, world: World, model: VideoNetwork, device: torch.device, loss: TaskLoss | None = None
) -> TrainStep | AveragingStep:
    """Return the step of the spec's method of parallel training, before its first update of `model`.

    loss: the spec's, on any device; None: build it as if all classes had equally many clips.
    """
    solver = spec.optimizer
    is_synchronous = spec.parallel.method == "synchronous"
    virtual_gpus = plan.virtual_gpus if is_synchronous else 1
    settings = StepSettings(
        seed=spec.seed,
        virtual_gpus=virtual_gpus,
        precision=spec.precision,
        clip_norm=solver.clip_norm,
        loss=(build_loss(spec) if loss is None else loss).to(device),
        noise_every=spec.noise_scale.every_steps if virtual_gpus > 1 else 0,
        ema_decay=spec.ema.decay,
        modality=spec.data.input,
        compression=solver.compression,
        mix=spec.data.mix,
        erase=spec.data.erase,
    )
    if is_synchronous:
        return build_train_step(solver, settings, world, model, device, lr_factors(model, solver))
    learners = dict[int, TrainStep]()
    alone = World()
    for number in plan.virtual_gpus_of(world.rank):
        learner = initial_network(spec, device)
        learner.load_state_dict(model.state_dict())
        learners[number] = build_train_step(solver, settings, alone, learner, device, lr_factors(learner, solver))
    return AveragingStep(spec.parallel, model, learners, plan.virtual_gpus, world, device, plan.steps_per_epoch)


def build_train_step(
    solver: OptimizerSpec,
    settings: StepSettings,
    world: World,
    model: nn.Module,
    device: torch.device,
    factors: Mapping[str, float],
) -> TrainStep:
    """Return a step that updates `model` over all ranks, not yet run. factors: of the LR of some parameters."""
    groups = parameter_groups(model, solver.weight_decay, factors, decay_norms=solver.decay_norms)
    optimizer = build_solver(solver, groups)
    trust = None if solver.trust_ratio is None else TrustRatio(solver.trust_ratio, model, optimizer)
    return TrainStep(model, optimizer, world, device, settings, trust)
