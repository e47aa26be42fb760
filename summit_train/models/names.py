"""Names of tensors in published files, turned into this project's (torchvision's) by rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from summit_train.models.mobilenet import BLOCKS

# Placeholder for the model's own name of the linear layer on its backbone's features: in most networks the last one.
CLASSIFIER = "<classifier>"


class Convention(NamedTuple):
    """Files of one kind, known by a name that matches `sign`; `rules` replace what matches in a name, one by one."""

    sign: str
    rules: tuple[tuple[str, str], ...]


# Modules that wrap others where a shift or a non-local block was put in.
_UNWRAP = (r"\.(net|block)(?=\.)", "")

# The TSM authors' training code (ops/models.py, ops/temporal_shift.py, ops/non_local.py).
_AUTHORS = Convention(sign=r"^base_model\.", rules=((r"^base_model\.", ""), (r"^new_fc\.", f"{CLASSIFIER}."), _UNWRAP))

# Their MobileNetV2 (archs/mobilenet_v2.py, online_demo): a block is one flat sequence, in which ReLUs have numbers.
_FLAT_MOBILENET = Convention(
    sign=r"^features\.\d+\.conv\.7\.\w+$",
    rules=(
        (r"^classifier\.(?=\w+$)", f"{CLASSIFIER}."),
        (r"\.conv\.([01])\.(\w+)$", r".conv.0.\1.\2"),
        (r"^features\.1\.conv\.3\.(\w+)$", r"features.1.conv.1.\1"),
        (r"^features\.1\.conv\.4\.(\w+)$", r"features.1.conv.2.\1"),
        (r"^(?!features\.1\.)(.*\.conv)\.3\.(\w+)$", r"\1.1.0.\2"),
        (r"\.conv\.4\.(\w+)$", r".conv.1.1.\1"),
        (r"\.conv\.6\.(\w+)$", r".conv.2.\1"),
        (r"\.conv\.7\.(\w+)$", r".conv.3.\1"),
    ),
)

# mmaction2's recognisers. Its non-local files fit where they are of the embedded Gaussian; names do not tell.
_MMACTION = Convention(
    sign=r"^backbone\.",
    rules=(
        (r"^backbone\.", ""),
        (r"^cls_head\.fc_cls\.", f"{CLASSIFIER}."),
        (r"^cls_head\.consensus\.", "consensus."),
        _UNWRAP,
        (r"\.non_local_block\.conv_out\.conv\.", ".nl.W.0."),
        (r"\.non_local_block\.conv_out\.bn\.", ".nl.W.1."),
        (r"\.non_local_block\.(theta|phi\.0|g\.0)\.conv\.", r".nl.\1."),
    ),
)


def _numbered_blocks() -> Iterable[tuple[str, str]]:
    number = 1
    for layer, (_, _, num_blocks, _) in enumerate(BLOCKS, 1):
        for index in range(num_blocks):
            yield rf"^layer{layer}\.{index}\.", f"features.{number}."
            number += 1


# Its MobileNetV2 (mmaction/models/backbones/mobilenet_v2.py): convolution and norm are one module, layers are numbered.
_MMACTION_MOBILENET = Convention(
    sign=r"^layer\d\.\d+\.conv\.\d\.conv\.",
    rules=(
        (r"^conv1\.conv\.", "features.0.0."),
        (r"^conv1\.bn\.", "features.0.1."),
        (r"^conv2\.conv\.", "features.18.0."),
        (r"^conv2\.bn\.", "features.18.1."),
        *_numbered_blocks(),
        (r"^features\.1\.conv\.1\.conv\.", "features.1.conv.1."),
        (r"^features\.1\.conv\.1\.bn\.", "features.1.conv.2."),
        (r"\.conv\.2\.conv\.", ".conv.2."),
        (r"\.conv\.2\.bn\.", ".conv.3."),
        (r"\.conv\.([01])\.conv\.", r".conv.\1.0."),
        (r"\.conv\.([01])\.bn\.", r".conv.\1.1."),
    ),
)

# Its ResNets (mmaction/models/backbones/resnet.py).
_MMACTION_RESNET = Convention(
    sign=r"^conv1\.conv\.",
    rules=(
        (r"(^|\.)conv(\d)\.conv\.", r"\1conv\2."),
        (r"(^|\.)conv(\d)\.bn\.", r"\1bn\2."),
        (r"\.downsample\.conv\.", ".downsample.0."),
        (r"\.downsample\.bn\.", ".downsample.1."),
    ),
)

# Each sees the names that those before it have made.
CONVENTIONS = (_AUTHORS, _FLAT_MOBILENET, _MMACTION, _MMACTION_MOBILENET, _MMACTION_RESNET)
# Name prefixes that DistributedDataParallel and torch.compile leave behind.
_PREFIXES = ("module.", "_orig_mod.")


def our_names(names: Iterable[str], classifier: str) -> dict[str, str]:
    """Return the names used here for the names in a file; classifier: that of the layer on the features, as "fc"."""
    ours = {name: name for name in names}
    while prefix := next((p for p in _PREFIXES if ours and all(name.startswith(p) for name in ours.values())), None):
        ours = {name: new.removeprefix(prefix) for name, new in ours.items()}
    for convention in CONVENTIONS:
        if any(re.search(convention.sign, new) for new in ours.values()):
            for pattern, replacement in convention.rules:
                ours = {name: re.sub(pattern, replacement, new) for name, new in ours.items()}
    return {name: new.replace(CLASSIFIER, classifier) for name, new in ours.items()}


def is_mmactions_resnet(names: Iterable[str]) -> bool:
    """Return whether the names, as a file has them, are those of mmaction2's ResNets, 2D or 3D."""
    return any(re.search(r"(^|\.)backbone\.conv1\.conv\.", name) for name in names)


def has_shift(name: str) -> bool:
    """Return whether `name`, as a file has it, is of a convolution with a shift in front, as others write them."""
    return name.endswith(".net.weight")
