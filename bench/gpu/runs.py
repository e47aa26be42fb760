"""Small whole runs of `summit-train train`, each in a process of its own, on generated videos."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from outcome import Outcome, fact

import summit_train
from summit_train.spec.source import shipped

ROOT = Path(summit_train.__file__).resolve().parents[1]
KEPT = ("model", "optimizer", "loss_scale", "ema", "noise_scale", "bad_clips", "growth")  # of a checkpoint


def write_videos(folder: Path, train: int = 80, val: int = 12) -> None:
    """Write a set of motion videos of 48 x 48 pixels and 16 frames. Raises ImportError without PyAV."""
    from summit_train.data.motion import MotionSet, write_motion_set

    for _ in write_motion_set(folder, train, val, MotionSet(size=48, num_frames=16)):
        pass


def on_videos(outcome: Outcome, work: Callable[[Path], None]) -> None:
    """Call `work` with a temporary folder that has the videos; without PyAV fail a fact that says so."""
    if importlib.util.find_spec("av") is None:
        outcome.add(fact("PyAV is there to read videos", False, "no module named av; no run could be made"))
        return
    with tempfile.TemporaryDirectory(prefix="summit_train_gpu_") as name:
        write_videos(Path(name))
        work(Path(name))


def words(folder: Path, name: str, *more: str) -> list[str]:
    """Return the spec configs/motion/tsm.yaml, shrunk: ten steps of 4 x 2 clips an epoch."""
    return [
        str(shipped("configs/motion") / "tsm.yaml"),
        f"name={name}",
        f"data.train={folder}/train.csv",
        f"data.val={folder}/val.csv",
        f"run_dir={folder}/runs",
        "data.num_frames=4",
        "data.short_side=[40,48]",
        "data.crop=32",
        "model.dropout=0.2",
        "scale.clips_per_gpu=2",
        "schedule.warmup_epochs=1",
        "evaluate.every_epochs=0",
        "evaluate.last_checkpoints=1",
        "ema.decay=0.9",
        *more,
    ]


def start(program: str, arguments: Sequence[str], device: torch.device, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -c program arguments` in a process group of its own, on the device; its output goes to `log`."""
    more = {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device.type != "cuda":
        more["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=without_launcher(os.environ) | more,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the traces of mpirun, srun or jsrun: the runs are alone."""
    traces = ("OMPI_", "PMI", "SLURM_", "JSM_", "MV2_")
    return {name: value for name, value in environment.items() if not name.startswith(traces)}


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for a process; return its exit status, None where it had to be killed after `seconds`."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        return None


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its data workers at once, as a node that fails does."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps_of(run: Path) -> list[int]:
    """Return the steps that a run has written down, in the order of its file."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record["step"] for record in records if record["kind"] == "step"]


def reaches(run: Path, step: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a run has written down a step; False where it ended, or the time did, before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if any(done >= step for done in steps_of(run)):
            return True
        time.sleep(0.005)
    return False


def checkpoints(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order."""
    return sorted(int(path.stem.rpartition("_")[2]) for path in (run / "checkpoints").glob("step_*.pt"))


def final_state(run: Path) -> dict[str, Any]:
    """Return the parts of the newest checkpoint that training goes on from, flat: name -> tensor or number."""
    step = checkpoints(run)[-1]
    path = run / "checkpoints" / f"step_{step:08d}.pt"
    state = torch.load(path, weights_only=True, map_location="cpu")
    return flat({name: state[name] for name in ("step", *KEPT) if name in state}, "")


def flat(value: Any, name: str) -> dict[str, Any]:
    """Return what is in nested dictionaries and lists by dotted names."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: leaf for key, inner in items for place, leaf in flat(inner, f"{name}.{key}").items()}
    return {name.lstrip("."): value}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same to the bit; a NaN equals nothing."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not _same(one[name], other[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
