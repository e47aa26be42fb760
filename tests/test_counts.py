"""Counts of networks: kept once, read without torch, made anew when anything that they depend on has changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from summit_train import counts
from summit_train.counts import count_model, count_network
from summit_train.models import count
from summit_train.spec import ModelSpec, Spec, load_spec
from tests.worlds import Say

SHIPPED = "shipped:motion/tsm"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "summit_train" / "counts"


def spec_with(*overrides: str) -> Spec:
    return load_spec(SHIPPED, overrides)


def refuse(*_: object) -> None:
    raise AssertionError("counted again")


def test_a_kept_count_is_the_fresh_one_to_the_last_layer(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_with()
    fresh = count.count_network(spec)
    assert count_network(spec) == fresh and len(fresh.layers) > 10
    monkeypatch.setattr(count, "count_network", refuse)
    assert count_network(spec) == fresh  # Count is compared field by field
    assert count_network(spec_with("seed=7", "scale.clips_per_gpu=3", "optimizer.base_lr=0.5")) == fresh
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.parametrize(
    "override",
    [
        "model.width=0.5",
        "data.crop=48",
        "data.num_frames=4",
        "execution.compile=true",
        "optimizer.freeze=[conv1]",
        "optimizer.lr_factors={conv1: 0.5}",
    ],
)
def test_a_key_that_a_count_depends_on_has_a_count_of_its_own(override: str) -> None:
    spec = spec_with(override)
    count_network(spec_with())
    assert count_network(spec) == count.count_network(spec)


def test_changed_code_and_a_damaged_file_are_counted_again(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_with()
    fresh = count_network(spec)
    [file] = cache_folder.iterdir()
    whole = file.read_bytes()
    for damage in (b"", b"{}", whole[:-9], whole.replace(b'"parameters": ', b'"parameters": "')):
        file.write_bytes(damage)
        assert count_network(spec) == fresh
        assert file.read_bytes() == whole
    monkeypatch.setattr(counts, "_code", lambda: "other")
    monkeypatch.setattr(count, "count_network", refuse)
    with pytest.raises(AssertionError, match="counted again"):
        count_network(spec)


def test_an_error_of_a_count_is_not_blamed_on_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "count_network", refuse)
    with pytest.raises(AssertionError) as error:
        count_network(spec_with())
    assert error.value.__context__ is None


def test_the_digest_of_the_code_sees_torch_and_all_that_builds_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    for part in ("core", "models", "spec", "tasks"):
        shutil.copytree(Path(counts.__file__).parent / part, package / part)
    digest = counts._code.__wrapped__
    seen = {digest(package)}
    files = ("core/count.py", "models/resnet.py", "models/fast/norm.py", "spec/model.py", "tasks/detection/rfcn.py")
    for file in files:
        with (package / file).open("a") as source:
            source.write("# changed")
        seen.add(digest(package))
    monkeypatch.setattr(counts, "version", lambda name: f"{name} 99")
    assert len(seen | {digest(package)}) == 7


def test_a_torch_without_metadata_is_counted_with(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(counts, "version", none)
    monkeypatch.setattr(counts, "_code", counts._code.__wrapped__)
    assert count_network(spec_with()) == count.count_network(spec_with())
    assert not cache_folder.exists()


def test_a_model_at_another_size_is_kept_as_a_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(arch="tsm", backbone="resnet18", num_classes=4, width=0.25)
    fresh = count_model(model, (8, 32, 40, 3))
    assert fresh.clip == (8, 32, 40)
    monkeypatch.setattr(count, "count_model", refuse)
    assert count_model(model, (8, 32, 40, 3)) == fresh
    with pytest.raises(AssertionError, match="counted again"):
        count_model(model, (8, 40, 32, 3))


def test_an_own_network_is_counted_each_time(tmp_path: Path, cache_folder: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "def net(num_classes, num_frames):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(num_frames * 3 * 56 * 56, num_classes))\n"
    )
    spec = spec_with(f"model.arch={source}:net", "model.backbone=null", "model.width=1", "evaluate.short_side=56")
    assert count_network(spec).parameters == 8 * 3 * 56 * 56 * 4 + 4
    assert not cache_folder.exists()


def test_the_command_counts_the_network_of_its_overrides_by_hand(say: Say) -> None:
    words = ("model.backbone=resnet18", "model.width=0.25", "model.num_classes=4", "data.num_frames=8", "data.crop=64")
    printed = json.loads(say("model", SHIPPED, "--json", *words)[1])
    # ResNet-18 with 16, 32, 64 and 128 channels and 4 classes, added up by hand.
    convolutions = 3 * 16 * 49 + 4 * 16 * 16 * 9
    for narrow, wide in ((16, 32), (32, 64), (64, 128)):
        convolutions += narrow * wide * 9 + 3 * wide * wide * 9 + narrow * wide
    norms = 2 * (5 * 16 + 5 * 32 + 5 * 64 + 5 * 128)
    assert printed["parameters"] == convolutions + norms + 128 * 4 + 4
    assert (printed["input_bytes"], printed["frames"], printed["stages"]["res5"]) == (8 * 3 * 64 * 64, 8, 8)


@pytest.mark.parametrize("home", ["nowhere", "file"])
def test_without_a_cache_a_network_is_counted(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if home == "file":
        (tmp_path / "summit_train").write_text("in the way")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "~nobody_by_this_name/cache")
    assert count_network(spec_with()) == count.count_network(spec_with())


def test_the_second_plan_needs_no_torch(say: Say, tmp_path: Path) -> None:
    command = ["plan", SHIPPED, "--clips", "64", f"run_dir={tmp_path}"]
    program = (
        "import sys; sys.modules['torch'] = None; from summit_train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    first = say(*command)
    again = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert (again.returncode, again.stdout, again.stderr) == first and first[0] == 0
