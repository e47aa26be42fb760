"""Is the cost model right? Two ranks in two network namespaces, joined by a veth whose rate `tc` sets.

    python bench/veth.py                        50 Mbit/s to unlimited, a few minutes, as root, on an idle machine
    python bench/veth.py --rates 100 0 --json   other rates in Mbit/s (0: unlimited)

For each rate, in one world of two ranks: allreduces are timed and fitted as `bench allreduce` does; steps are timed in
turn with and without the other rank's gradients. Predicted is `scaling/cost.py` with the fitted network and the steps
that were alone as its rate. Where namespaces are not allowed it says why and ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from summit_train.core.processes import mpi_environment
from summit_train.core.text import text_table

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "configs" / "motion" / "tsm.yaml"
RATES = (50, 100, 200, 500, 1000, 0)
SUBNET, HOSTS = "10.213.77.0/24", ("10.213.77.1", "10.213.77.2")
TOLERANCE = 0.15
# Above this size Open MPI asks the receiver first, and the answer waits behind the data that the receiver itself is
# sending: on a slow link both halves of an exchange then go one after the other, at times, and the sum takes 1, 1.5 or
# 2 times as long. The model has an MPI that sends both ways at once, so all messages here are below it.
EAGER = str(8 << 20)
# mpirun's way to the other "machine": a shell in the other namespace. It is given the host's name first.
AGENT = '#!/bin/sh\nshift\nexec ip netns exec {namespace} unshare --uts sh -c "hostname {namespace}; $*"\n'


def main() -> int:
    """Make the namespaces, run every rate, print predicted against measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, metavar="MBIT", help="0: unlimited")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="pairs of steps for each rate (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        return rank(args.repeats)
    why = why_not()
    if why is not None:
        print(json.dumps({"skipped": why}) if args.json else f"skipped: {why}")
        return 0
    load = os.getloadavg()[0]
    with namespaces() as names:
        rows = [measured(names, rate, args.repeats) for rate in args.rates]
    worst = max(abs(row["error"]) for row in rows)
    if args.json:
        print(json.dumps({"rows": rows, "load": load, "worst_error": worst, "tolerance": TOLERANCE}))
    else:
        print_rows(rows, load)
    return 0 if worst <= TOLERANCE else 1


def why_not() -> str | None:
    """Return why this machine cannot, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program} on PATH; apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"network namespaces are not allowed here: {tried.stderr.strip()}"


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
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


def limit(names: tuple[str, str], mbit: int) -> None:
    """Set the rate that each end sends with; 0 removes the limit."""
    for name in names:
        tc = f"ip netns exec {name} tc qdisc"
        subprocess.run([*tc.split(), "del", "dev", "veth0", "root"], capture_output=True)
        if mbit:
            # The bucket holds 1 ms of the rate, or two packets. Messages that fit into a larger one would pass for
            # nothing, and the fitted bandwidth would come out above the cable's.
            burst = max(3_200, mbit * 125)
            call(f"{tc} add dev veth0 root tbf rate {mbit}mbit burst {burst} latency 100ms")


def measured(names: tuple[str, str], mbit: int, repeats: int) -> dict[str, Any]:
    """Measure two ranks at that rate, one in each namespace; return rank 0's row."""
    limit(names, mbit)
    said = on_both(names, [__file__, "--as-rank", "--repeats", str(repeats)])
    return {"mbit": mbit, **json.loads(said.splitlines()[-1])}


def on_both(names: tuple[str, str], words: list[str]) -> str:
    """Run `python WORDS` as two ranks, one in each namespace; return what they print, or end with it."""
    with launcher(names, (1, 1)) as mpirun:
        command = [*mpirun, sys.executable, *words]
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"the ranks failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def launcher(names: tuple[str, str], ranks: tuple[int, int]) -> Iterator[list[str]]:
    """Give mpirun's words for so many ranks in each namespace, for the block."""
    agent = Path(f"/tmp/{names[1]}.agent")
    agent.write_text(AGENT.format(namespace=names[1]))
    agent.chmod(0o700)
    mpirun = Path(sys.executable).with_name("mpirun")
    hosts = ",".join(f"{host}:{slots}" for host, slots in zip(HOSTS, ranks, strict=True))
    try:
        yield [
            *("ip", "netns", "exec", names[0], str(mpirun), "-np", str(sum(ranks)), "--host", hosts),
            *("--bind-to", "none", "--mca", "plm_rsh_agent", str(agent), "--mca", "mpi_yield_when_idle", "1"),
            *("--mca", "btl_tcp_eager_limit", EAGER, "--mca", "btl_tcp_rndv_eager_limit", EAGER),
            *("--mca", "oob_tcp_if_include", SUBNET, "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", SUBNET),
            *("-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "-x", "LD_LIBRARY_PATH"),
        ]
    finally:
        agent.unlink()


def environment() -> dict[str, str]:
    """Return the environment of ranks in namespaces."""
    own = Path(sys.executable).parent
    return mpi_environment(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{own}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }


def rank(repeats: int) -> int:
    """Measure allreduces and steps as one rank; rank 0 prints the row."""
    import torch

    from summit_train.bench.allreduce import fits_of, machine_of, measure, message_sizes, setting_of, slowest
    from summit_train.bench.commands.arguments import experiment_of
    from summit_train.bench.steps import StepBench
    from summit_train.core.comm import World, open_world
    from summit_train.core.watch import Watchdog
    from summit_train.scaling.cost import Job, step_time
    from summit_train.scaling.machines import with_rate
    from summit_train.spec import load_spec

    torch.set_num_threads(1)
    world, cpu = open_world(), torch.device("cpu")
    spec = load_spec(SPEC, ["scale.gpus=null"])
    together, alone = (experiment_of(spec, ranks, synthetic=True) for ranks in (2, 1))
    gradient_bytes = together.plan.gradient_bytes
    # Both "machines" are this one: each has half of its cores.
    setting = replace(setting_of(world, cpu, spec.name, gradient_bytes), cores=len(os.sched_getaffinity(0)) // 2)
    fits = fits_of(list(measure(world, cpu, message_sizes(gradient_bytes), 6.0)))
    with Watchdog(world, None) as watchdog:
        benches = [StepBench(alone, World(), cpu, watchdog), StepBench(together, world, cpu, watchdog)]
        pairs = [[slowest(world, partial(bench.repeat, 1)) for bench in benches] for _ in range(repeats + 2)][2:]
    alones, steps = zip(*pairs, strict=True)
    compute_s, step_s = statistics.median(alones), statistics.median(steps)
    machine = with_rate(machine_of("veth", setting, fits), spec, spec.scale.clips_per_gpu / compute_s)
    predicted = step_time(Job(spec, machine, 2, 10**6, 1))
    horovod = fits["horovod"]
    assert horovod is not None, "machine_of raises NoFit without it"
    if world.rank == 0:
        row = {"latency_s": horovod.latency_s, "bytes_per_second": horovod.bytes_per_second}
        row |= {"compute_s": compute_s, "step_s": step_s, "low_s": min(steps), "high_s": max(steps)}
        row |= {"predicted_s": predicted.step_s, "exposed_s": predicted.communication_s}
        row |= {"error": predicted.step_s / step_s - 1, "gradient_bytes": gradient_bytes}
        print(json.dumps(row), flush=True)
    world.close()
    return 0


def print_rows(rows: list[dict[str, Any]], load: float) -> None:
    """Print predicted beside measured, and whether the machine was quiet."""
    print(f"two ranks, one thread each, {rows[0]['gradient_bytes']:,} bytes of gradients; load before: {load:.2f}")
    cells = [
        {
            "Mbit/s": f"{row['mbit']:,}" if row["mbit"] else "unlimited",
            "fitted MB/s": f"{row['bytes_per_second'] / 1e6:.1f}",
            "latency ms": f"{1e3 * row['latency_s']:.2f}",
            "compute s": f"{row['compute_s']:.3f}",
            "step s (least, most)": f"{row['step_s']:.3f} ({row['low_s']:.3f}, {row['high_s']:.3f})",
            "predicted s": f"{row['predicted_s']:.3f}",
            "exposed s": f"{row['exposed_s']:.3f}",
            "error": f"{100 * row['error']:+.1f} %",
        }
        for row in rows
    ]
    print(text_table(cells))
    if load > 0.5:
        print("other work ran: ratios of steps that were not taken in turn mean little")


def call(command: str) -> None:
    """Run a command, or end with what it printed."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
