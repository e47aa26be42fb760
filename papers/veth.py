"""Two ranks in two network namespaces on this machine, joined by a virtual cable whose rate `tc` sets.

    python papers/veth.py model                 is the cost model right? 50 Mbit/s to unlimited, a few minutes
    python papers/veth.py averaging             what an epoch sends: synchronous training, model averaging; 100 Mbit/s
    python papers/veth.py model --rates 100 0   other rates in Mbit/s, 0: unlimited

Run it as root on an idle machine. Where namespaces are not allowed it says why and ends with status 0.

model: at each rate `bench allreduce` fits the network, `bench step` measures the step of two ranks and that of ranks
which do not talk, and `simulate` predicts the first from the others. Exit status 1 if it is off by more than 15 %.
averaging: bytes are counted at the cable: those of a long run less those of one of a single epoch, so that start and
end cancel out. Seconds of communication are those of an epoch on the slow cable beyond those of the same epoch on the
unlimited one; the first epoch of each run is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from summit_train.core.processes import mpi_environment
from summit_train.core.result import TextTable
from summit_train.core.text import show
from summit_train.data.motion import MotionSet, write_motion_set

ROOT = Path(__file__).resolve().parents[1]
SPEC = str(ROOT / "configs" / "motion" / "tsm.yaml")
SUBNET, HOSTS = "10.213.77.0/24", ("10.213.77.1", "10.213.77.2")
TOLERANCE = 0.15
# Above this size Open MPI asks the receiver first, and the answer waits behind the data that the receiver itself is
# sending: on a slow link both halves of an exchange then go one after the other, at times, and the sum takes 1, 1.5 or
# 2 times as long. The model has an MPI that sends both ways at once, so all messages here are below it.
EAGER = str(8 << 20)
# mpirun's way to the other "machine": a shell in the other namespace. It is given the host's name first.
AGENT = '#!/bin/sh\nshift\nexec ip netns exec {namespace} unshare --uts sh -c "hostname {namespace}; $*"\n'
METHODS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "averaging, period 4": ("parallel.method=averaging", "parallel.period=4"),
    "averaging, period epoch": ("parallel.method=averaging", "parallel.period=epoch"),
}
CLIPS, EPOCHS = 256, 3
Names = tuple[str, str]
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("model", "averaging"))
    parser.add_argument("--rates", type=int, nargs="+", metavar="MBIT", help="0: unlimited")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="timed steps of the model's rows [9]")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    if (why := why_not()) is not None:
        print(json.dumps({"skipped": why}) if args.json else f"skipped: {why}")
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, namespaces() as names:
        if args.experiment == "model":
            rates = args.rates or (50, 100, 200, 500, 1000, 0)
            rows = [model_row(names, rate, args.repeats, Path(folder)) for rate in rates]
        else:
            list(write_motion_set(folder, CLIPS, 16, MotionSet()))
            rates = args.rates or (100,)
            rows = [averaging_row(names, rate, method, Path(folder)) for rate in rates for method in METHODS]
    cells = [{name: show(value) for name, value in row.items()} for row in rows]
    text = f"load before: {load:.2f}\n{TextTable.of_records(cells)}"
    print(json.dumps({"rows": rows, "load": load}) if args.json else text)
    return int(any(abs(row.get("error", 0.0)) > TOLERANCE for row in rows))


# --- the experiments


def model_row(names: Names, mbit: int, repeats: int, folder: Path) -> Row:
    """Measure and predict the step of two ranks at that rate."""
    limit(names, mbit)
    machine = folder / f"cable_{mbit}.yaml"
    plan = json.loads(finished(started("plan", SPEC, "scale.gpus=1", "--clips", "1000", "--json")))
    sizes = ("--max-bytes", str(plan["gradient_bytes"]), "--seconds", "6")
    fits = json.loads(on_both(names, "bench", "allreduce", SPEC, *sizes, "--write", str(machine), "--json"))["fits"]
    turns = ("--synthetic", "--peak", "0", "--steps", "1", "--repeats", str(repeats), "--json")
    together = json.loads(on_both(names, "bench", "step", SPEC, "scale.gpus=null", *turns))["specs"][0]
    # Both "machines" are this one: two ranks that do not talk share its cores as the two that do.
    alone = [started("bench", "step", SPEC, "scale.gpus=1", *turns) for _ in names]
    rate = fmean(json.loads(finished(one))["specs"][0]["clips_per_second"]["median"] for one in alone)
    share = () if len(os.sched_getaffinity(0)) > 3 else ("--set", "network.core_share=0.5")
    job = ("--nodes", "2", "--clips", "1000000", "--videos", "1", "--clips-per-second", f"{rate}", "--json")
    simulated = json.loads(finished(started("simulate", SPEC, "--site", str(machine), *share, *job)))
    predicted = simulated["rows"][0]["step_s"]
    step = together["step_s"]
    return {
        "mbit": mbit or "unlimited",
        "bytes_per_second": next(iter(fits.values()))["bytes_per_second"],
        "step_s": step["median"],
        "least_s": step["min"],
        "most_s": step["max"],
        "predicted_s": predicted,
        "error": predicted / step["median"] - 1,
    }


def averaging_row(names: Names, mbit: int, method: str, folder: Path) -> Row:
    """Train one method thrice: long on the slow cable, long and short on the unlimited one."""
    slow, slow_bytes = trained(names, method, mbit, EPOCHS, folder)
    fast, _ = trained(names, method, 0, EPOCHS, folder)
    _, once_bytes = trained(names, method, 0, 1, folder)
    return {
        "mbit": mbit,
        "method": method,
        "bytes_per_epoch": (slow_bytes - once_bytes) / (EPOCHS - 1),
        "epoch_s": fmean(slow),
        "unlimited_epoch_s": fmean(fast),
        "communication_s": fmean(slow) - fmean(fast),
    }


def trained(names: Names, method: str, mbit: int, epochs: int, folder: Path) -> tuple[list[float], int]:
    """Train; return the seconds of each epoch, without the first of several, and the bytes that both ends sent."""
    limit(names, mbit)
    before = sent(names)
    run = f"{method.replace(', ', '_').replace(' ', '_')}_{mbit}_{epochs}"
    print(f"{run} ...", file=sys.stderr, flush=True)
    words = [f"name={run}", f"run_dir={folder}", f"data.train={folder}/train.csv", f"data.val={folder}/val.csv"]
    words += ["scale.gpus=2", "data.workers=0", "schedule.warmup_epochs=0"]
    words += [f"schedule.epochs={epochs}", f"evaluate.every_epochs={epochs}"]
    on_both(names, "train", SPEC, *METHODS[method], *words)
    return seconds_of_epochs(folder / run)[epochs > 1 :], sent(names) - before


def seconds_of_epochs(run: Path) -> list[float]:
    """Return the seconds of each epoch's steps, averages of the networks included, from the run's metrics."""
    seconds: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            seconds[record["epoch"]] = seconds.get(record["epoch"], 0.0) + record["step_s"]
    return [seconds[epoch] for epoch in sorted(seconds)]


# --- namespaces, and commands in them


def why_not() -> str | None:
    """Return why this machine cannot, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not on PATH; apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"network namespaces are not allowed here: {tried.stderr.strip()}"


@contextlib.contextmanager
def namespaces() -> Iterator[Names]:
    """Make two namespaces with a cable between them for the block."""
    names = (f"st{os.getpid()}a", f"st{os.getpid()}b")
    made: list[str] = []
    try:
        for name in names:
            call(f"ip netns add {name}")
            made.append(name)
        call(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for name, address in zip(names, HOSTS, strict=True):
            call(f"ip -n {name} address add {address}/24 dev veth0")
            call(f"ip -n {name} link set veth0 up")
            call(f"ip -n {name} link set lo up")
        yield names
    finally:
        for name in made:  # the cable goes with them
            call(f"ip netns delete {name}")


def limit(names: Names, mbit: int) -> None:
    """Set the rate that each end sends with; 0 removes the limit."""
    for name in names:
        tc = f"ip netns exec {name} tc qdisc"
        subprocess.run([*tc.split(), "del", "dev", "veth0", "root"], capture_output=True)
        if mbit:
            # The bucket holds 1 ms of the rate, or two packets. Messages that fit into a larger one would be sent at
            # once, and the fitted bandwidth would exceed the cable's.
            burst = max(3_200, mbit * 125)
            call(f"{tc} add dev veth0 root tbf rate {mbit}mbit burst {burst} latency 100ms")


def sent(names: Names) -> int:
    """Return the bytes that both ends of the cable have sent so far."""
    return sum(int(call(f"ip netns exec {name} cat /sys/class/net/veth0/statistics/tx_bytes")) for name in names)


def on_both(names: Names, *words: str) -> str:
    """Run `summit-train WORDS` as two ranks, one in each namespace; return what rank 0 prints, or end with it."""
    agent = Path(f"/tmp/{names[1]}.agent")
    agent.write_text(AGENT.format(namespace=names[1]))
    agent.chmod(0o700)
    mpirun = [
        *("ip", "netns", "exec", names[0], str(Path(sys.executable).with_name("mpirun"))),
        *("-np", "2", "--host", ",".join(f"{host}:1" for host in HOSTS), "--bind-to", "none"),
        *("--mca", "plm_rsh_agent", str(agent), "--mca", "mpi_yield_when_idle", "1"),
        *("--mca", "btl_tcp_eager_limit", EAGER, "--mca", "btl_tcp_rndv_eager_limit", EAGER),
        *("--mca", "oob_tcp_if_include", SUBNET, "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", SUBNET),
        *("-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "-x", "LD_LIBRARY_PATH"),
    ]
    try:
        return finished(started(*words, prefix=mpirun))
    finally:
        agent.unlink()


def started(*words: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `summit-train WORDS`, one thread a rank."""
    environment = mpi_environment(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    line = [*prefix, sys.executable, "-m", "summit_train", *words]
    return subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for a program; return what it printed, or end with it."""
    out, errors = process.communicate(timeout=300)
    if process.returncode != 0:
        sys.exit(f"{process.args}:\n{out}{errors}")
    return out


def call(line: str) -> str:
    """Run a command; return what it prints, or end with it."""
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{line}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
