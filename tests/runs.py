"""Helpers of tests that look into run directories."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from summit_train.core.run_folder import checkpoint_path
from summit_train.core.saved import Bound, load_checkpoint
from summit_train.training.checkpoint import save_checkpoint

LARGE: Bound = lambda path, content: 1 << 40  # noqa: E731


def load_any(path: Path) -> dict[str, Any]:
    """A checkpoint of any network."""
    return load_checkpoint(path, LARGE)


def small_checkpoints(run: Path, *steps: int) -> list[Path]:
    """Write checkpoints with a few numbers into a run folder."""
    paths = [checkpoint_path(run, step) for step in steps]
    for path, step in zip(paths, steps, strict=True):
        weights = {"w": torch.arange(1000.0) + step}
        save_checkpoint(path, {"model": weights, "optimizer": {"state": {}}, "step": step})
    return paths


@contextmanager
def full_disk() -> Iterator[None]:
    """In the block the kernel refuses every byte that is written to a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """What the run has recorded of one kind so far, in the order of the file."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in (json.loads(line) for line in lines if line.endswith("}")) if record["kind"] == kind]


def steps_of(run: Path) -> list[int]:
    """The steps that the run has recorded so far."""
    return [record["step"] for record in records(run, "step")]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative difference of the networks of two checkpoints: of weights and of running statistics, the larger.

    Each as one vector: tensor by tensor would divide the rounding of BN biases, which begin at 0, by next to nothing.
    """
    one, other = one["model"], other["model"]
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if key.endswith("num_batches_tracked"))
    found = [0.0]
    for are_statistics in (True, False):
        keys = [key for key in one if ("running_" in key) == are_statistics and one[key].is_floating_point()]
        if keys:
            mine, theirs = (torch.cat([state[key].double().flatten() for key in keys]) for state in (one, other))
            found.append(float((mine - theirs).norm() / mine.norm()))
    return max(found)


def final_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run that trained to its end."""
    path = max((run / "checkpoints").glob("step_*.pt"))
    state: dict[str, Any] = torch.load(path, weights_only=True)
    assert state["step"] == json.loads((run / "plan.json").read_text())["total_steps"]
    return state


def rewound(run: Path, name: str, step: int) -> Path:
    """A copy of a run folder, `name` beside it, as if the run had been killed before the checkpoint of `step`."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    for later in (copy / "checkpoints").glob(f"step_{step:08d}*"):
        later.unlink()
    return copy


def changed_copy(run: Path, target: Path, **changes: object) -> Path:
    """A copy of a run's last checkpoint, without its digest, with other entries; None leaves one out."""
    state = {**final_state(run), **changes}
    torch.save({key: value for key, value in state.items() if value is not None}, target)
    return target


def assert_bit_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights, running statistics, solver, loss scale, averages of two checkpoints are the same bits."""
    parts = {"model", "optimizer", "loss_scale", "ema", "noise_scale"}
    assert one.keys() == other.keys()
    for part in sorted(parts & one.keys()):
        flat_one, flat_other = _flat(one[part], part), _flat(other[part], part)
        assert flat_one.keys() == flat_other.keys()
        for key, value in flat_one.items():
            same = value.equal(flat_other[key]) if isinstance(value, torch.Tensor) else value == flat_other[key]
            assert same, key


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {k: v for key, part in enumerate(value) for k, v in _flat(part, f"{name}.{key}").items()}
    return {name: value}
