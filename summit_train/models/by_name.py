"""Parameters chosen by name: those that `optimizer` freezes, for the run or its first epochs, and factors on the LR."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from summit_train.core.errors import UserError
from summit_train.core.text import listed
from summit_train.models.video import VideoNetwork
from summit_train.spec.optimizer import OptimizerSpec


def named(network: VideoNetwork, patterns: Sequence[str], key: str) -> list[str]:
    """Return the parameters that match a pattern by their own name, or by that of a module that they are part of.

    Raises UserError, about the spec's `key`, for a pattern that names none.
    """
    # layer1.0.conv1.weight is part of layer1, layer1.0 and layer1.0.conv1.
    names = {name: list(accumulate(name.split("."), "{}.{}".format)) for name, _ in network.named_parameters()}
    known = list(dict.fromkeys(name for own in names.values() for name in own))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3)
            right = f"did you mean {' or '.join(near)}?" if near else f"valid: {listed(known)}"
            raise UserError(f"{key}: {pattern!r} names no parameter of the network; {right}")
    return [name for name, own in names.items() if any(fnmatchcase(one, p) for one in own for p in patterns)]


def frozen_until(network: VideoNetwork, solver: OptimizerSpec) -> dict[str, float]:
    """Return the parameters that `solver` freezes, with the epochs that they stay frozen for: inf, the whole run.

    What is frozen otherwise is not among them, and stays so. Raises UserError if nothing is left to train.
    """
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    epochs = dict[str, float]()
    for part in solver.freeze:
        for name in named(network, part.names, "optimizer.freeze"):
            if name in trained:
                epochs[name] = max(epochs.get(name, 0), part.until_epoch or math.inf)
    if epochs and trained == epochs.keys():
        raise UserError("optimizer.freeze: at least one parameter must be trained from the first epoch on, got none")
    return epochs


def freeze_by_name(network: nn.Module, epoch: int) -> int:
    """Train those of network.frozen_until whose epochs are over, freeze the others; return the elements changed."""
    until: Mapping[str, float] = getattr(network, "frozen_until", {})
    parameters = dict(network.named_parameters())
    changed = [parameters[name] for name in until if parameters[name].requires_grad != (epoch >= until[name])]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    if until:  # else the modes are those that a network of one's own has chosen
        network.train(network.training)  # frozen normalisations are in evaluation mode
    return sum(parameter.numel() for parameter in changed)


def lr_factors(model: VideoNetwork, solver: OptimizerSpec) -> dict[str, float]:
    """Return what the LR of each parameter is multiplied by, by name: its module's factors and its layer's.

    With L the classifier's layer, layer l has layer_decay^(L - l): BEiT's rule (Bao et al. 2022), as in timm.
    """
    modules = {model.head: solver.head_lr_factor} | dict.fromkeys(model.stem, solver.first_lr_factor)
    factors = {
        f"{module}.{name}": factor
        for module, factor in modules.items()
        if module  # a foreign network may not name them
        for name, _ in model.get_submodule(module).named_parameters()
    }
    if solver.layer_decay != 1:
        layers = model.layer_numbers()
        last = max(layers.values())
        factors = {
            name: factors.get(name, 1.0) * solver.layer_decay ** (last - layer) for name, layer in layers.items()
        }
    for pattern, factor in solver.lr_factors.items():
        for name in named(model, [pattern], "optimizer.lr_factors"):
            factors[name] = factors.get(name, 1.0) * factor
    return factors
