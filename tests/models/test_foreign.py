"""A network of one's own: found, built, counted, drawn from keys, fed in its own layout, and its mistakes named."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from summit_train.core.errors import UserError
from summit_train.models import VideoNetwork, build_model
from summit_train.models.build import build_network
from summit_train.models.by_name import freeze_by_name, lr_factors
from summit_train.models.count import count_model, count_network
from summit_train.models.fast import accelerate
from summit_train.models.foreign import check_norms
from summit_train.optim.solvers import parameter_groups
from summit_train.spec import ModelSpec, Spec, spec_from_values
from summit_train.spec.keys import OptimizerSpec
from tests.networks import load

# 3 x 8 x 27 weights and 8 norms' pairs; 4 classes of 8 features and their biases.
SMALL = """
import torch
from torch import nn

class Small(nn.Module):
    layout = "NCTHW"

    def __init__(self, num_classes, num_frames, width=8, drop=0.5):
        super().__init__()
        self.stem = nn.Conv3d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(width)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, num_classes)

    def feature_maps(self, x):
        return torch.relu(self.norm(self.stem(x)))

    def forward(self, x):
        return self.head(self.drop(self.feature_maps(x).mean((2, 3, 4))))
"""
PER_FRAME = """
from torch import nn

class Frames(nn.Module):
    def __init__(self, num_classes, num_frames):
        super().__init__()
        self.places = nn.Linear(num_frames * 3, num_classes)

    def forward(self, x):
        return self.places(x.mean((3, 4)).flatten(1))

def constant(num_classes, num_frames):
    return 3

def wrong(num_classes, num_frames):
    return Frames(num_classes + 1, num_frames)

def parts(num_classes, num_frames):
    network = Frames(num_classes, num_frames)
    network.forward = lambda x: [x]
    return network

def layout(num_classes, num_frames):
    network = Frames(num_classes, num_frames)
    network.layout = "THWC"
    return network
"""


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "nets.py"
    path.write_text(text)
    return path


def small(folder: Path, text: str = SMALL, **options: Any) -> VideoNetwork:
    generator = torch.Generator().manual_seed(3)
    return build_model(f"{write(folder, text)}:Small", None, 2, 4, generator=generator, options=options)


def _spec(arch: str, **sections: dict[str, Any]) -> Spec:
    data = {"train": "a", "val": "b", "num_frames": 2, "crop": 16, "short_side": [16, 20], **sections.get("data", {})}
    values = {"name": "own", "evaluate": {"short_side": 16}, **sections, "data": data}
    return spec_from_values({**values, "model": {"arch": arch, "num_classes": 4, **sections.get("model", {})}}, "here")


def test_the_network_gets_its_options_and_the_clip_in_its_layout(tmp_path: Path) -> None:
    network = small(tmp_path, width=5, drop=0.0).eval()
    clip = torch.randn(3, 2, 3, 6, 6)
    inner: Any = network.network
    assert inner.stem.out_channels == 5 and inner.drop.p == 0.0
    assert torch.equal(network(clip), inner(clip.transpose(1, 2)))
    with pytest.raises(ValueError, match=r"takes \(N, 2, 3, H, W\)"):
        network(clip.transpose(1, 2))


def test_it_keeps_the_modes_that_it_chose_unless_a_part_is_frozen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace("BatchNorm3d(width)", "BatchNorm3d(width).eval()"))
    network = build_network(_spec(f"{path}:Small"))
    freeze_by_name(network, 1)
    assert not network.get_submodule("norm").training and network.get_submodule("drop").training
    frozen = build_network(_spec(f"{path}:Small", optimizer={"freeze": ["stem"]}))
    assert frozen.get_submodule("norm").training


def test_frames_come_first_where_no_layout_is_named(tmp_path: Path) -> None:
    network = build_model(f"{write(tmp_path, PER_FRAME)}:Frames", None, 2, 4).eval()
    clip = torch.randn(3, 2, 3, 6, 6)
    weight, bias = network.get_submodule("places").parameters()
    assert torch.allclose(network(clip), clip.mean((3, 4)).flatten(1) @ weight.T + bias, atol=1e-6)


def test_initial_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, other = small(tmp_path).state_dict(), small(tmp_path).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's draws go on as they would have
    torch.manual_seed(3)
    inner: Any = small(tmp_path).network
    own = type(inner)(4, 2)
    assert torch.equal(inner.stem.weight, own.stem.weight)  # its own initialisation, not TSM's


def test_dropout_of_torch_is_a_function_of_the_seed(tmp_path: Path) -> None:
    network, clip = small(tmp_path).train(), torch.randn(4, 2, 3, 6, 6)

    def logits(seed: int) -> torch.Tensor:
        torch.rand(7)  # what was drawn before does not matter
        network.reseed(seed)
        return network(clip)

    assert torch.equal(logits(5), logits(5))
    assert not torch.equal(logits(5), logits(6))
    network.reseed(2**63 - 1)  # the largest key


def test_names_are_those_of_the_network(tmp_path: Path) -> None:
    network = small(tmp_path)
    assert list(network.state_dict())[:2] == ["stem.weight", "norm.weight"]
    assert (network.head, network.stem) == ("head", ("stem",))
    factors = lr_factors(network, OptimizerSpec(head_lr_factor=10.0, first_lr_factor=0.5))
    groups = parameter_groups(network, 0.1, factors)
    sizes = {(group["lr_factor"], group["weight_decay"]): sum(p.numel() for p in group["params"]) for group in groups}
    assert sizes == {(1.0, 0.0): 16, (10.0, 0.1): 32, (10.0, 0.0): 4, (0.5, 0.1): 648}
    twin = copy.deepcopy(network)
    twin.load_state_dict(network.state_dict())


def test_it_is_counted_without_numbers(tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"arch": f"{write(tmp_path)}:Small", "num_classes": 4})
    found = count_model(model, (2, 6, 6, 3))
    assert found.parameters == 3 * 8 * 27 + 16 + 8 * 4 + 4
    # A zero-padded 3x3x3 at each of 2 x 6 x 6 places, and the classifier.
    assert found.multiply_adds == 3 * 8 * 27 * 72 + 32
    assert found.note == "" and found.stages == {"data": 2, "global_pool": 1}


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (SMALL.replace("self.drop = nn.Dropout(drop)", "self.drop = nn.Dropout(torch.tensor(drop).item())"), "cannot"),
        (SMALL.replace("return torch.relu(", "assert x.sum().item() < 1e9\n        return torch.relu("), "not run"),
    ],
)
def test_one_that_reads_numbers_is_counted_on_the_cpu(tmp_path: Path, text: str, note: str) -> None:
    plain = count_model(ModelSpec.model_validate({"arch": f"{write(tmp_path)}:Small", "num_classes": 4}), (2, 6, 6, 3))
    found = count_model(
        ModelSpec.model_validate({"arch": f"{write(tmp_path, text)}:Small", "num_classes": 5}), (2, 6, 6, 3)
    )
    assert found.parameters == plain.parameters + 9 and found.multiply_adds == plain.multiply_adds + 8
    assert found.note.startswith("on the CPU to be counted, as it") and note in found.note


def test_what_a_file_makes_when_it_is_imported_has_numbers(tmp_path: Path) -> None:
    text = SMALL.replace("class Small", "HALF = torch.tensor(0.5)\n\nclass Small").replace("relu(", "relu(HALF * ")
    arch = f"{write(tmp_path, text)}:Small"
    with torch.device("meta"):
        build_network(_spec(arch))
    assert build_network(_spec(arch))(torch.randn(2, 2, 3, 6, 6)).isfinite().all()


def test_the_code_is_part_of_the_network_identity(tmp_path: Path) -> None:
    first = small(tmp_path)
    (key, digest), *more = first.sources.items()
    assert (key, more) == ("model.arch (SHA-256)", []) and len(digest) == 64
    # The same size, in the same second: Python's own cache of bytecode would take the first one.
    second = small(tmp_path, SMALL.replace("width=8", "width=9"))
    assert second.sources[key] != digest
    assert second.state_dict()["norm.weight"].numel() == 9
    assert build_model("tsn", "resnet18").sources == {}


def test_modules_are_left_as_they_are(tmp_path: Path) -> None:
    """models/fast knows nothing of what a network's code does with its modules."""
    network = small(tmp_path)
    assert accelerate(network) == "plain: a network of your own"
    assert isinstance(network.get_submodule("norm"), nn.BatchNorm3d)


def test_a_state_dict_of_its_own_names_is_loaded(tmp_path: Path) -> None:
    """Also under names that published files of other networks have, and with a classifier for other classes."""
    path = write(tmp_path, SMALL.replace("self.stem", "self.backbone").replace("self.norm", "self.bn"))
    network = build_model(f"{path}:Small", None, 2, 4)
    weights = {name: torch.full_like(value, 2) for name, value in network.state_dict().items()}
    weights["head.weight"] = torch.zeros(7, 8)
    content = {"state_dict": {f"module.{name}": value for name, value in weights.items()}}
    report = load(network, content, tmp_path)
    norms = tuple(f"bn.{kind}" for kind in ("weight", "bias", "running_mean", "running_var"))
    assert report.names("loaded") == ("backbone.weight", *norms, "head.bias")
    assert "head.weight (the model has (4, 8), the file (7, 8))" in str(report)
    assert (network.state_dict()["backbone.weight"] == 2).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nets.py:Smal", {}, r"nets\.py must have a class or function Smal"),
        ("nets.py:Small", {"widht": 5}, r"Small\(num_classes, num_frames, width=8.*unexpected .*'widht'"),
        ("nets.py:Small", {"num_classes": 5}, r"multiple values for.* 'num_classes'"),
        ("none.py:Small", {}, r"none\.py not found; a relative path starts at the current directory"),
        ("no_such.package:net", {}, r"cannot be imported: No module named 'no_such'; install what is missing"),
        ("needs.py:net", {}, r"cannot be imported: No module named 'no_such'; install what is missing"),
        ("sys:exit", {}, r"sys must have a source file"),
        ("frames.py:constant", {}, r"constant must return a torch\.nn\.Module, got int"),
        ("frames.py:wrong", {}, r"wrong must return logits \(1, 4\) for a clip \(1, 2, 3, 16, 16\) .*, got \(1, 5\)"),
        ("frames.py:parts", {}, r"must return logits \(1, 4\) .* got list"),
        ("frames.py:layout", {}, r"layout of .* must be NTCHW or NCTHW, got 'THWC'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    write(tmp_path)
    (tmp_path / "frames.py").write_text(PER_FRAME)
    (tmp_path / "needs.py").write_text("import no_such\n")
    arch = f"{tmp_path}/{name}" if ".py" in name else name
    with pytest.raises(UserError, match=message):
        count_network(_spec(arch, model={"options": options}))


def test_an_error_in_the_network_keeps_its_traceback(tmp_path: Path) -> None:
    """Here one that reads its number of frames wrongly, which the count finds."""
    arch = f"{write(tmp_path, PER_FRAME.replace('num_frames * 3', 'num_frames * 2'))}:Frames"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_network(_spec(arch))


def test_one_that_cannot_see_the_pictures_of_the_evaluation_is_refused(tmp_path: Path) -> None:
    text = SMALL.replace("nn.Linear(width,", "nn.Linear(width * 256,").replace("mean((2, 3, 4))", "mean(2).flatten(1)")
    count_network(_spec(f"{write(tmp_path, text)}:Small"))
    with pytest.raises(UserError, match=r"evaluate\.short_side: .* takes 16 x 16 pixels \(data.crop\) but not 20 x 20"):
        count_network(_spec(f"{write(tmp_path, text)}:Small", evaluate={"short_side": 20}))


@pytest.mark.parametrize(
    ("norm", "is_refused"),
    [
        ("SyncBatchNorm(width)", True),
        ("InstanceNorm3d(width, track_running_stats=True)", True),
        ("InstanceNorm3d(width)", False),
        ("BatchNorm3d(width)", False),
    ],
)
def test_statistics_that_depend_on_the_ranks_are_refused(tmp_path: Path, norm: str, is_refused: bool) -> None:
    network = small(tmp_path, SMALL.replace("BatchNorm3d(width)", norm))
    with pytest.raises(UserError, match=r"model\.arch: norm is torch's .*use Batch") if is_refused else nullcontext():
        check_norms(network)


def test_a_factor_needs_the_name_of_its_layers(tmp_path: Path) -> None:
    arch = f"{write(tmp_path, PER_FRAME)}:Frames"
    for key, attribute in (("head_lr_factor", "head"), ("first_lr_factor", "stem")):
        with pytest.raises(UserError, match=rf"optimizer\.{key}: must be 1, because .* has no attribute {attribute}"):
            build_network(_spec(arch, optimizer={"base_lr": 0.1, key: 10.0}))
        build_network(_spec(f"{write(tmp_path, PER_FRAME + SMALL)}:Small", optimizer={"base_lr": 0.1, key: 10.0}))
