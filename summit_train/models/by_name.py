"""Parameters chosen by name: those that `optimizer` freezes, for the run or its first epochs, and factors on the LR."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from summit_train.core.errors import UserError
from summit_train.core.text import listed
from summit_train.models.video import VideoNetwork, is_frozen
from summit_train.spec.keys import OptimizerSpec


def named(network: VideoNetwork, patterns: Sequence[str], key: str, norms: Iterable[str] = ()) -> list[str]:
    """Return the parameters that match a pattern by their own name, or by that of a module that they are part of.

    One that several modules share has a name for each, and is returned by the first. norms: names of modules without
    parameters that count as such. Raises UserError, about the spec's `key`, for a pattern that names none.
    """
    first = _first_names(network) | {name: name for name in norms}
    # layer1.0.conv1.weight is part of layer1, layer1.0 and layer1.0.conv1.
    names = {name: list(accumulate(name.split("."), "{}.{}".format)) for name in first}
    known = list(dict.fromkeys(part for parts in names.values() for part in parts))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3)
            right = f"did you mean {' or '.join(near)}?" if near else f"valid: {listed(known)}"
            raise UserError(f"{key}: {pattern!r} names no parameter of the network; {right}")
    matching = (name for name, parts in names.items() if any(fnmatchcase(part, p) for part in parts for p in patterns))
    return list(dict.fromkeys(first[name] for name in matching))


def _first_names(network: VideoNetwork) -> dict[str, str]:
    """Return the first name of each parameter under all of its names; those of a shared one are several."""
    first = {parameter: name for name, parameter in network.named_parameters()}
    return {name: first[parameter] for name, parameter in network.named_parameters(remove_duplicate=False)}


def frozen_until(network: VideoNetwork, solver: OptimizerSpec) -> dict[str, float]:
    """Return the parameters that `solver` freezes, with the epochs that they stay frozen for: inf, the whole run.

    Of batch normalisations without parameters, the module's own name. What is frozen otherwise is not among them, and
    stays so. Raises UserError if nothing is left to train.
    """
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    tensors = network.state_dict()
    owners = (name.removesuffix(".running_mean") for name in tensors if name.endswith(".running_mean"))
    norms = [name for name in owners if f"{name}.weight" not in tensors]
    epochs = dict[str, float]()
    for part in solver.freeze:
        for name in named(network, part.names, "optimizer.freeze", norms):
            if name in trained or name in norms:
                epochs[name] = max(epochs.get(name, 0), part.until_epoch or math.inf)
    if epochs and trained <= epochs.keys():
        raise UserError("optimizer.freeze: at least one parameter must be trained from the first epoch on, got none")
    return epochs


def freeze_by_name(network: nn.Module, epoch: int) -> int:
    """Train those of network.frozen_until whose epochs are over, freeze the others; return the elements changed.

    Those of a normalisation without parameters are its running statistics.
    """
    until: Mapping[str, float] = getattr(network, "frozen_until", {})
    parameters = dict(network.named_parameters())
    number = 0
    for name, epochs in until.items():
        if name in parameters:
            if parameters[name].requires_grad != (epoch >= epochs):
                parameters[name].requires_grad_(epoch >= epochs)
                number += parameters[name].numel()
        else:
            norm = network.get_submodule(name)
            if is_frozen(norm) != (epoch < epochs):
                norm.frozen = epoch < epochs  # type: ignore[assignment]
                number += sum(buffer.numel() for buffer in norm.buffers() if buffer.is_floating_point())
    if until:  # else the modes are those that a network of one's own has chosen
        network.train(network.training)  # frozen normalisations are in evaluation mode
    return number


def lr_factors(model: VideoNetwork, solver: OptimizerSpec) -> dict[str, float]:
    """Return the factors on the LR by parameter name: those of its module, its layer and its own name, multiplied.

    With L the classifier's layer, layer l has layer_decay^(L - l): BEiT's rule (Bao et al. 2022), as in timm.
    """
    modules = {model.head: solver.head_lr_factor} | dict.fromkeys(model.stem, solver.first_lr_factor)
    first = _first_names(model)
    factors = {
        first[f"{module}.{name}"]: factor
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
