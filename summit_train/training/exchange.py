"""The gradients' way over the ranks: a few flat buckets, added up while the backward pass still runs.

A number's place in a message decides in which order a ring of ranks adds its parts. So the messages are fixed before
the first step, and they start in a fixed order: the batch normalisation's statistics, which are ready before the last
backward pass, then the buckets, then the votes. Equal runs on the same ranks end in equal bits, however fast each is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed
from summit_train.training.buckets import BUCKET_BYTES, bucket_counts
from summit_train.training.timer import StepTimer


@dataclass
class Bucket:
    """Gradients in one piece of memory, of which those of `parameters` are views in order. name: of its message."""

    name: str
    flat: torch.Tensor
    parameters: list[nn.Parameter]
    views: list[torch.Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)  # those without a gradient in the last backward pass so far
    repeats: bool = False  # whether a gradient has ever come in several parts, so that only the pass's end completes it
    finish: Callable[[], None] | None = None  # waits for the mean, once it has begun


def split_buckets(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """Return buckets, each of one type, for the trained parameters in the order of the backward pass.

    Their memory is not touched before the first step, so that a run that resumes does not need it any earlier.
    """
    buckets = list[Bucket]()
    trained = reversed([parameter for parameter in parameters if parameter.requires_grad])
    for _, same_type in itertools.groupby(trained, lambda parameter: parameter.dtype):
        group = list(same_type)
        rest = iter(group)
        for count in bucket_counts([parameter.nbytes for parameter in group]):
            members = list(itertools.islice(rest, count))
            sizes = [parameter.numel() for parameter in members]
            flat = members[0].new_empty(sum(sizes)).detach()
            parts = zip(torch.split(flat, sizes), members, strict=True)
            # Views have the layout of their weights, which autograd and the fused solvers expect.
            views = [part.as_strided(weight.shape, torch.empty_like(weight).stride()) for part, weight in parts]
            buckets.append(Bucket(f"gradients.{len(buckets)}", flat, members, views))
    return buckets


class Exchange:
    """Averages gradients over the virtual GPUs of all ranks. That of a parameter which a step does not use is zero.

    Backward passes add up the gradients of a rank's virtual GPUs; the sum over the ranks is divided by their number V.
    Before the passes the division would change what they round, or overflow, in half precision with the ranks.

    A bucket is sent once each of its parameters has a gradient. A block that is used several times through
    checkpoint(use_reentrant=True) gets its gradients in as many parts: the first step, which sends nothing before its
    backward passes end, finds the buckets of such parameters, and these always wait for the end.
    One rank has no buckets: its gradients stay where autograd puts them.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        world: World,
        virtual_gpus: int,
        compression: str = "none",
    ) -> None:
        """Give each parameter, by name, a place in a bucket. compression: "fp16" sends gradients as halves."""
        names = {parameter: name for name, parameter in parameters}
        self._parameters = list(names)
        self._world = world
        self._virtual_gpus = virtual_gpus
        self._type = torch.float16 if compression == "fp16" else None
        self.buckets = split_buckets(self._parameters) if world.size > 1 else []
        self._begun = 0  # buckets whose mean has begun
        self._is_last_pass = False
        self._is_first_step = True
        self._hooks = list[RemovableHandle]()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                fill = partial(self._fill, bucket, names[parameter])
                self._hooks.append(parameter.register_post_accumulate_grad_hook(fill))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave the parameters to another exchange, such as one of more of them."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None

    def begin_step(self, timer: StepTimer) -> None:
        self._begun = 0
        self._is_last_pass = False
        self._timer = timer
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = set(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        if not self.buckets:
            for parameter in self._parameters:
                parameter.grad = None

    def begin_last_pass(self) -> None:
        """From here on, but for the first step, send each bucket as soon as it and those before it are full."""
        self._is_last_pass = True

    def finish(self) -> None:
        """Wait until every gradient is the mean over the virtual GPUs; buckets that are not full are sent first."""
        for bucket in self.buckets[self._begun :]:
            self._begin(bucket)
        if not self.buckets:
            for parameter in self._parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            if self._virtual_gpus > 1:
                torch._foreach_div_(gradients, self._virtual_gpus)
        for bucket in self.buckets:
            assert bucket.finish is not None
            bucket.finish()
            bucket.finish = None
            self._timer.arrive(bucket.name)
        self._is_first_step = False

    def _fill(self, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        if not self._is_last_pass:
            return
        if parameter in bucket.missing:
            bucket.missing.remove(parameter)
        elif bucket.finish is None:
            bucket.repeats = True
        else:
            late = f"a part of the gradient of {name} arrived after the ranks began to average it"
            why = "the network used it more often in this step than in the first one"
            raise RunFailed(f"{late}: {why}; use torch.utils.checkpoint with use_reentrant=False")
        while not self._is_first_step and self._begun < len(self.buckets):
            following = self.buckets[self._begun]
            if following.missing or following.repeats:
                break
            self._begin(following)

    def _begin(self, bucket: Bucket) -> None:
        self._begun += 1
        # In halves a sum overflows above 65,504, and quotients below 6e-8 vanish, so half of the division by V comes
        # before the sum and half after it: first by 2^k, about the root of V, which costs no digit.
        is_half = self._type is not None
        first = 2 ** math.ceil(math.log2(self._virtual_gpus) / 2) if is_half else 1
        message = (bucket.flat / first).to(self._type) if is_half else bucket.flat
        self._timer.send(bucket.name, message.nbytes)
        wait = self._world.start_total(message, bucket.name)

        def finish() -> None:
            wait()
            if is_half:
                bucket.flat.copy_(message)
            bucket.flat.div_(self._virtual_gpus / first)

        bucket.finish = finish


def average(flat: torch.Tensor, world: World, name: str) -> None:
    """Average a long tensor over the ranks in place, in messages of a bucket's size."""
    parts = torch.split(flat, BUCKET_BYTES // flat.element_size())
    for finish in [world.start_mean(part, f"{name}.{number}") for number, part in enumerate(parts)]:
        finish()
