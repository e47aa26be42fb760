"""`train --ranks N`: the same network as under mpirun and torchrun, one host or two; signals and exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.cli.train import add_arguments
from tests.conftest import WriteSpec, made_once, spec_writer
from tests.runs import assert_bit_equal, final_state
from tests.worlds import PATIENCE_S, ROOT, Say, bench_script, environment, needs_ranks, refused, run, start, train

VETH = bench_script("veth")
TORCHRUN = ("-m", "torch.distributed.run")
TRAIN = ("-m", "summit_train", "train")

_ATTEND = """
import json, os, sys
from summit_train.core.ranks import attend
commands = [(["sh", "-c", text], os.environ) for text in sys.argv[1:]]
sys.exit(attend(commands, lambda line: os.write(1, f"{line}\\n".encode())))
"""
_WAIT = "echo ready; while :; do sleep 0.1; done"
_DEAF = "import os, signal, time; signal.pthread_sigmask(0, {12, 15}); os.write(1, b'ready\\n'); time.sleep(6000)"


@pytest.mark.parametrize(
    ("commands", "status"),
    [
        (["true", "true"], 0),
        (["true", "sleep 0.2; exit 85"], 85),
        (["exec sleep 600", "exit 2"], 2),
        (["trap 'exit 3' TERM; while :; do sleep 0.1; done", "exit 1"], 1),
        (["trap '' TERM; sleep 600", "exit 1"], 1),
        (["true", "kill -SEGV $$"], 139),
    ],
)
def test_the_exit_status_is_that_of_the_first_rank_that_fails(commands: list[str], status: int) -> None:
    """It ends the others, those that ignore SIGTERM too."""
    said = "rank 1 was ended by SIGSEGV\n" if status == 139 else ""
    assert run(0, "-c", _ATTEND, *commands) == (status, said)


@contextmanager
def _waiting(*commands: str) -> Iterator[subprocess.Popen[str]]:
    """A starter of commands that have all said that they are ready."""
    process = start(0, "-c", _ATTEND, *commands)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in commands] == ["ready\n"] * len(commands)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_every_rank_to_stop(number: signal.Signals) -> None:
    asked = f"trap '' TERM; trap 'echo asked; exit 85' USR2; {_WAIT}"  # as ranks that leave
    with _waiting(asked, asked) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 85 and output.count("asked\n") == 2
    assert output.count("are asked to save a checkpoint and stop; a second SIGINT") == 1


def test_a_second_sigint_ends_the_ranks() -> None:
    deaf = f"trap 'echo asked' USR2; {_WAIT}"
    with _waiting(deaf, deaf) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert {process.stdout.readline() for _ in range(3)} >= {"asked\n"}
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


def test_ranks_whose_starter_is_killed_are_asked_to_stop() -> None:
    with _waiting(f"trap 'echo asked; exit 85' USR2; {_WAIT}") as process:
        process.kill()
        output, _ = process.communicate(timeout=PATIENCE_S)  # until the rank has closed it
    assert output == "asked\n"


def _spec(write_spec: WriteSpec) -> str:
    return str(write_spec(precision="fp64", scale={"gpus": 2, "clips_per_gpu": 4}, schedule={"epochs": 1}))


# Runs the command that follows with as many open files as the first word says.
_WITH_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.fixture(scope="module")
def whole(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that no starter started."""

    def make(folder: Path) -> None:
        train(2, _spec(spec_writer(motion_set, folder)))

    return made_once(tmp_path_factory, "started", make) / "runs/run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environ", "how", "backend"),
    [
        pytest.param((*TRAIN, "--ranks", "2"), {}, "2 ranks joined by horovod, started by mpirun", "horovod",
                     marks=[needs_ranks, pytest.mark.nightly]),
        # With the fewest open files that are taken.
        (("-c", _WITH_FILES, "44", *TRAIN, "--ranks=2"), {"SUMMIT_TRAIN_COMM": "torch"}, "2 ranks joined by torch\n",
         "torch (gloo)"),
        pytest.param((*TORCHRUN, "--nproc-per-node", "2", *TRAIN), {}, "", "torch (gloo)", marks=pytest.mark.nightly),
    ],
    ids=["horovod", "torch", "torchrun"],
)  # fmt: skip
def test_every_starter_on_one_host_gives_the_same_bits(
    write_spec: WriteSpec, tmp_path: Path, whole: Path,
    words: tuple[str, ...], environ: dict[str, str], how: str, backend: str,
) -> None:  # fmt: skip
    status, output = run(0, *words, _spec(write_spec), env=environ)
    assert status == 0 and how in output, output
    started = tmp_path / "runs/run"
    assert json.loads((started / "environment.json").read_text())["backend"] == backend
    assert_bit_equal(final_state(whole), final_state(started))


# Runs a command on the host of that name: its network, name and table of hosts. Called as ssh is.
_ON_HOST = """#!/bin/sh
host=$1; shift
exec ip netns exec $host unshare --uts --mount sh -c "mount --bind {hosts} /etc/hosts; hostname $host; $*"
"""


@needs_ranks
@pytest.mark.nightly
@pytest.mark.skipif(VETH.why_not() is not None, reason=str(VETH.why_not()))
def test_ranks_of_two_hosts_give_the_bits_of_one(write_spec: WriteSpec, tmp_path: Path, whole: Path) -> None:
    """Two network namespaces. torchrun is started on each; mpirun reaches the second by what stands in for ssh."""
    spec, agent, hosts = _spec(write_spec), tmp_path / "agent", tmp_path / "hosts"
    agent.write_text(_ON_HOST.format(hosts=hosts))
    agent.chmod(0o700)
    with VETH.namespaces() as names:
        hosts.write_text("".join(f"{address} {name}\n" for address, name in zip(VETH.HOSTS, names, strict=True)))

        def on(name: str, *words: str, **env: str) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = [str(agent), name, sys.executable, *words]
            return subprocess.Popen(command, env=environment(**env), cwd=ROOT, text=True, **pipes)

        meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint")
        torchrun = (*TORCHRUN, *meeting, f"{names[0]}:29500", *TRAIN, spec, "name=torchrun")
        by_hosts = (*TRAIN, spec, "--ranks", "2", "--hosts", ",".join(names))
        started = {"torchrun": [on(name, *torchrun) for name in names]}
        started["hosts"] = [on(names[0], *by_hosts, "name=hosts", OMPI_MCA_plm_rsh_agent=str(agent))]
        for name, processes in started.items():
            for process in processes:
                output, _ = process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0, output
            told = json.loads((tmp_path / f"runs/{name}/environment.json").read_text())
            assert told["hosts"] == dict.fromkeys(names, 1)
            assert_bit_equal(final_state(whole), final_state(tmp_path / f"runs/{name}"))


def test_the_ranks_get_every_option_of_train(monkeypatch: pytest.MonkeyPatch, write_spec: WriteSpec) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("summit_train.cli.train.run_ranks", lambda *words: calls.append(words[:3]) or 3)
    spec = str(write_spec())
    passed_on = ["--trace", "2:3", "--more-epochs", "7", "--from", "9"]
    assert main(["train", "--ranks", "4", spec, "seed=1", "--hosts=a,b", *passed_on, "seed=2"]) == 3
    assert calls == [(["train", spec, "seed=1", "seed=2", *passed_on], 4, ["a", "b"])]
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    options = {"--ranks", "--hosts", "--trace", "--more-epochs", "--from"}
    assert set(re.findall(r"--[a-z-]+", parser.format_usage())) == options


@needs_ranks
def test_a_mistake_that_the_ranks_find_ends_them_with_2(write_spec: WriteSpec) -> None:
    """Without mpirun's notes. On a busy machine a second rank may have the time to say it, too."""
    words = (str(write_spec()), "data.train=gone.csv", "--ranks", "2")
    status, output = run(0, *TRAIN, *words, env={"SUMMIT_TRAIN_COMM": "horovod"})
    assert status == 2
    how, *said = output.splitlines()
    assert how.startswith("2 ranks joined by horovod")
    assert said[0].startswith("summit-train: ") and all("data.train: gone.csv not found" in line for line in said)


def test_a_request_to_stop_before_the_ranks_listen_ends_them_with_85(write_spec: WriteSpec) -> None:
    process = start(0, *TRAIN, str(write_spec()), "--ranks", "2", env={"SUMMIT_TRAIN_COMM": "torch"})
    assert process.stdout is not None
    assert process.stdout.readline() == "2 ranks joined by torch\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 85, output


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_ranks_that_never_listen_are_ended_with_85(number: signal.Signals) -> None:
    """As those that wait for another one at the rendezvous."""
    with _waiting(f'exec {sys.executable} -c "{_DEAF}"', f"trap '' TERM USR2; {_WAIT}") as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 85
    assert output.endswith("the ranks have not begun, so there is nothing to save; they are ended\n")


def _addresses(processes: Iterable[int]) -> dict[str, set[str]]:
    """The local addresses, in the kernel's hex, at which these processes listen: {"tcp": ..., "udp": ...}."""
    owned = set[str]()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):
                owned.add(os.readlink(file))
    found: dict[str, set[str]] = {"tcp": set(), "udp": set()}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if f"socket:[{inode}]" in owned and state in ("0A", "07"):
                found[name[:3]].add(local.split(":")[0])
    return found


def _started_ranks(spec: Path, comm: str) -> tuple[subprocess.Popen[str], list[Path]]:
    """Start two ranks, and wait until they train: the starter, and the folders of the ranks in /proc."""
    process = start(0, *TRAIN, str(spec), "--ranks", "2", env={"SUMMIT_TRAIN_COMM": comm})
    assert process.stdout is not None
    while not (spec.parent / "runs/run/metrics.jsonl").exists():
        assert process.stdout.readline(), "the ranks ended early"
    return process, [folder for folder in Path("/proc").glob("[0-9]*") if _is_rank_of(folder, str(spec))]


def _is_rank_of(folder: Path, spec: str) -> bool:
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
        return spec.encode() in words and b"--ranks" not in words and b"mpirun" not in words[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("comm", [pytest.param("horovod", marks=[needs_ranks, pytest.mark.nightly]), "torch"])
def test_ranks_of_one_machine_listen_on_the_loopback_alone(write_spec: WriteSpec, comm: str) -> None:
    process, ranks = _started_ranks(write_spec(schedule={"epochs": 200}), comm)
    found = _addresses(int(rank.name) for rank in ranks)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 85 and len(ranks) >= 2, output
    loopback = {"0100007F"}
    assert found == {"tcp": loopback if comm == "torch" else set(), "udp": loopback}


@pytest.mark.parametrize(("files", "workers"), [(22, 0), (20, 1), (55, 1)])
def test_ranks_without_enough_open_files_are_refused_in_one_line(
    write_spec: WriteSpec, files: int, workers: int
) -> None:
    """torch's own words would be a page for each rank, or it would hang."""
    words = (str(write_spec()), f"data.workers={workers}", "--ranks", "8")
    status, output = run(0, "-c", _WITH_FILES, str(files), *TRAIN, *words, env={"SUMMIT_TRAIN_COMM": "torch"})
    needed = "the limit of open files must be 56 or more for rank 0's connections"
    assert (status, output) == (2, f"summit-train: {needed}, got {files}; raise it by `ulimit -n`\n")


@needs_ranks
def test_a_rank_of_mpirun_that_is_killed_is_named(write_spec: WriteSpec) -> None:
    """mpirun's words on it are read, and not shown."""
    process, ranks = _started_ranks(write_spec(schedule={"epochs": 2000}), "horovod")
    number = b"\0OMPI_COMM_WORLD_RANK=1\0"
    (killed,) = (rank for rank in ranks if number in b"\0" + (rank / "environ").read_bytes())
    os.kill(int(killed.name), signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 137
    assert "rank 1 was ended by SIGKILL\n" in output and "mpirun noticed" not in output and "---" not in output


@needs_ranks
def test_what_mpirun_itself_cannot_do_is_said(write_spec: WriteSpec) -> None:
    """A folder for its session cannot be made in a file."""
    environ = {"SUMMIT_TRAIN_COMM": "horovod", "TMPDIR": os.devnull}
    status, output = run(0, *TRAIN, _spec(write_spec), "--ranks", "2", env=environ)
    assert status == 1 and "ORTE_ERROR_LOG" in output, output


def test_torchrun_says_last_why_a_rank_failed() -> None:
    status, output = run(0, *TORCHRUN, "--nproc-per-node", "1", *TRAIN, "gone.yaml")
    assert status == 1
    reason, border = output.strip().splitlines()[-2:]
    assert reason.startswith("  traceback : summit-train: gone.yaml: cannot be read: ") and set(border) == {"="}


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ("seed=-1 --ranks 2", {}, "override 'seed=-1': seed: "),
        ("--ranks 0", {}, "--ranks must be 1 or more, got 0"),
        ("--ranks 3 --hosts a,b", {}, "--ranks must be a multiple of the 2 hosts, got 3"),
        ("--ranks 2 --hosts a,", {}, "--hosts must be names separated by commas, got 'a,'"),
        ("--hosts a,b", {}, "--hosts must be used with --ranks N"),
        ("--ranks 2", {"RANK": "0", "WORLD_SIZE": "2"}, "--ranks must be used without a launcher, but torchrun start"),
        ("--ranks 2", {"SUMMIT_TRAIN_COMM": "mpi"}, "SUMMIT_TRAIN_COMM must be horovod, torch or auto, got 'mpi'"),
    ],
)
def test_ranks_that_cannot_be_started_are_refused(
    monkeypatch: pytest.MonkeyPatch, say: Say, write_spec: WriteSpec, words: str, environ: dict[str, str], message: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert refused(say("train", write_spec(), *words.split())).startswith(message)
