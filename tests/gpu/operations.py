"""The work of a step on a GPU, counted on torch's meta device, where tensors have shapes but no values.

The step is the GPU's: its modules, its fused optimizer, its foreach operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from summit_train.models.video import KeyedModule

META = torch.device("meta")
_FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
# These only allocate; _unsafe_view is a view that its schema does not declare.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"}  # they write without reading
# ATen/native/cuda/MultiTensorApply.cuh: elements of a block; blocks and, by lists of tensors, tensors of a launch.
_CHUNK = 65536
_BLOCKS = 320
_TENSORS = (110, 64, 48, 36, 30)


@dataclass(frozen=True)
class Operation:
    """An operation on a GPU. launches: kernels. moved: bytes read and written."""

    launches: int
    flops: int
    moved: int
    is_convolution: bool = False


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that launch kernels in `counted`; bytes: of the tensors that they take and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = Counter[Operation]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        schema = operation._schema
        name = schema.name.removeprefix("aten::")
        written = result
        if not schema.returns:  # of lists; gradients only where a scale divides them
            pairs = zip(args, schema.arguments, strict=False)
            written = [arg for arg, one in pairs if one.alias_info and one.alias_info.is_write and one.name != "grads"]
        read = () if name.endswith("_like") else (args, kwargs)
        taken = {id(leaf): leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor)}
        returned = {id(leaf): leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)}
        moved = [*taken.values(), *(() if name.removeprefix("_foreach_") in _OVERWRITE else returned.values())]
        if any(tensor.device == META for tensor in moved) and not operation.is_view and name not in _NO_KERNEL:
            num_bytes = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in moved)
            flops = flop_registry.get(operation._overloadpacket, lambda *_, **__: 0)(*args, out_val=result)
            if name == "convolution_backward":  # torch counts the weights of a grouped one as if it had no groups
                gradients = sum(gradient is not None for gradient in result[:2])
                flops = 2 * gradients * args[0].numel() * math.prod(args[2].shape[1:])
            self.counted[Operation(_launches(name, args, result), flops, num_bytes, "convolution" in name)] += 1
        return result


def _launches(name: str, args: Sequence[Any], result: Any) -> int:
    """Return the least kernels of one operation: one for each gradient of a convolution, lists as torch packs them."""
    if name == "convolution_backward":
        return sum(gradient is not None for gradient in result)
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    given = (arg for arg in (*args, result) if isinstance(arg, list | tuple))
    lists: list[Sequence[torch.Tensor]] = [arg for arg in given if arg and isinstance(arg[0], torch.Tensor)]
    if name.startswith(("_fused_adam", "_foreach_norm")):
        lists.pop()  # steps or norms, which are not packed
    blocks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
    return max(-(-blocks // _BLOCKS), -(-len(lists[0]) // _TENSORS[len(lists) - 1]))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let torch take its foreach and fused kernels for the meta device, which has shapes for all but `_FUSED`."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        stack.callback(library._destroy)
        for name in _FUSED:
            library.impl(name, lambda *args, **kwargs: None, "Meta")  # type: ignore[no-untyped-call]
        for owner, name, value in (
            (_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["meta"]),
            (optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]),
            (KeyedModule, "generator_on", lambda module, device: torch.Generator()),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
