"""Names of tensors in published files, turned into this project's (torchvision's) by rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from summit_train.models.mobilenet import BLOCKS

# Placeholder for the model's own name of the linear layer on its backbone's features: in most networks the last one.
CLASSIFIER = "<classifier>"


# Modules that wrap others where a shift or a non-local block was put in.
_UNWRAP = (r"\.(net|block)(?=\.)", "")

# The TSM authors' training code (ops/models.py, ops/temporal_shift.py, ops/non_local.py).
_AUTHORS = ((r"^base_model\.", ""), (r"^new_fc\.", f"{CLASSIFIER}."), _UNWRAP)

# Their MobileNetV2 (archs/mobilenet_v2.py, online_demo): a block is one flat sequence, in which ReLUs have numbers.
_FLAT_MOBILENET = (
    (r"^classifier\.(?=\w+$)", f"{CLASSIFIER}."),
    (r"\.conv\.([01])\.(\w+)$", r".conv.0.\1.\2"),
    (r"^features\.1\.conv\.3\.(\w+)$", r"features.1.conv.1.\1"),
    (r"^features\.1\.conv\.4\.(\w+)$", r"features.1.conv.2.\1"),
    (r"^(?!features\.1\.)(.*\.conv)\.3\.(\w+)$", r"\1.1.0.\2"),
    (r"\.conv\.4\.(\w+)$", r".conv.1.1.\1"),
    (r"\.conv\.6\.(\w+)$", r".conv.2.\1"),
    (r"\.conv\.7\.(\w+)$", r".conv.3.\1"),
)

# mmaction2's recognisers. Its non-local files fit where they are of the embedded Gaussian; names do not tell.
_MMACTION = (
    (r"^backbone\.", ""),
    (r"^cls_head\.fc_cls\.", f"{CLASSIFIER}."),
    (r"^cls_head\.consensus\.", "consensus."),
    _UNWRAP,
    (r"\.non_local_block\.conv_out\.conv\.", ".nl.W.0."),
    (r"\.non_local_block\.conv_out\.bn\.", ".nl.W.1."),
    (r"\.non_local_block\.(theta|phi\.0|g\.0)\.conv\.", r".nl.\1."),
)

_BLOCKS = [rf"^layer{layer}\.{index}\." for layer, row in enumerate(BLOCKS, 1) for index in range(row[2])]
# Its MobileNetV2 (mmaction/models/backbones/mobilenet_v2.py): convolution and norm are one module, layers are numbered.
_MMACTION_MOBILENET = (
    (r"^conv1\.conv\.", "features.0.0."),
    (r"^conv1\.bn\.", "features.0.1."),
    (r"^conv2\.conv\.", "features.18.0."),
    (r"^conv2\.bn\.", "features.18.1."),
    *((name, f"features.{number}.") for number, name in enumerate(_BLOCKS, 1)),
    (r"^features\.1\.conv\.1\.conv\.", "features.1.conv.1."),
    (r"^features\.1\.conv\.1\.bn\.", "features.1.conv.2."),
    (r"\.conv\.2\.conv\.", ".conv.2."),
    (r"\.conv\.2\.bn\.", ".conv.3."),
    (r"\.conv\.([01])\.conv\.", r".conv.\1.0."),
    (r"\.conv\.([01])\.bn\.", r".conv.\1.1."),
)

# Its ResNets (mmaction/models/backbones/resnet.py).
_MMACTION_RESNET = (
    (r"(^|\.)conv(\d)\.conv\.", r"\1conv\2."),
    (r"(^|\.)conv(\d)\.bn\.", r"\1bn\2."),
    (r"\.downsample\.conv\.", ".downsample.0."),
    (r"\.downsample\.bn\.", ".downsample.1."),
)

# VideoMAE's pre-training (modeling_pretrain.py) has the network as its encoder. V-JEPA and timm's image ViTs use the
# names of its fine-tuning (modeling_finetune.py), with the biases of queries, keys and values in one tensor.
_VIT = ((r"^encoder\.(?=patch_embed\.|blocks\.)", ""), (r"^head\.", f"{CLASSIFIER}."))

# transformers' VideoMAEForVideoClassification; its older files name the two biases as VideoMAE does.
_TRANSFORMERS = (
    (r"^videomae\.embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^videomae\.encoder\.layer\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.attention\.(q|v)(?:uery|alue|)(?:_|\.)bias$", r".attn.\1_bias"),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^classifier\.", f"{CLASSIFIER}."),
)

# A name in files of one kind -> rules, each of which replaces what matches in the name that those before it made.
CONVENTIONS = {
    r"^base_model\.": _AUTHORS,
    r"^features\.\d+\.conv\.7\.\w+$": _FLAT_MOBILENET,
    r"^backbone\.": _MMACTION,
    r"^layer\d\.\d+\.conv\.\d\.conv\.": _MMACTION_MOBILENET,
    r"^conv1\.conv\.": _MMACTION_RESNET,
    r"(^|\.)patch_embed\.proj\.": _VIT,
    r"^videomae\.": _TRANSFORMERS,
}
# Name prefixes that DistributedDataParallel and torch.compile leave behind.
_PREFIXES = ("module.", "_orig_mod.")


def our_names(
    names: Iterable[str], classifier: str, conventions: Mapping[str, Iterable[tuple[str, str]]] = CONVENTIONS
) -> dict[str, str]:
    """Return the names used here for the names in a file; classifier: that of the layer on the features, as "fc"."""
    ours = {name: name for name in names}
    while prefix := next((p for p in _PREFIXES if ours and all(name.startswith(p) for name in ours.values())), None):
        ours = {name: new.removeprefix(prefix) for name, new in ours.items()}
    for sign, rules in conventions.items():
        if any(re.search(sign, new) for new in ours.values()):
            for pattern, replacement in rules:
                ours = {name: re.sub(pattern, replacement, new) for name, new in ours.items()}
    return {name: new.replace(CLASSIFIER, classifier) for name, new in ours.items()}


def is_mmactions_resnet(names: Iterable[str]) -> bool:
    """True if these are names, as a file has them, of mmaction2's ResNets, 2D or 3D."""
    return any(re.search(r"(^|\.)backbone\.conv1\.conv\.", name) for name in names)
