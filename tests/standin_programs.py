"""Stand-ins for a cluster's programs, which check what they are given: python standin_programs.py NAME ARGUMENT ...

bsub, bjobs and jskill know a job as a file in $STANDINS; jsrun starts the ranks by mpirun where $STANDIN_MPIRUN names
one, and else the command once, as srun and mpirun do here. Every call is a line in $STANDINS/calls.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(os.environ["STANDINS"])

COUNT, HOURS = r"[1-9]\d*", r"(\d+:)?\d+"
# What each launcher's manual allows, as far as the scripts use it: option -> form of its value, "" where it has none.
LAUNCHERS = {
    "jsrun": {
        "-n": COUNT, "-r": COUNT, "-a": COUNT, "-g": r"\d+", "-c": COUNT, "-b": rf"none|rs|packed:{COUNT}",
        "--smpiargs": ".*",
    },
    "srun": {
        "--nodes": COUNT, "--ntasks": COUNT, "--ntasks-per-node": COUNT, "--kill-on-bad-exit": "[01]",
        "--cpu-bind": "cores|none", "--mpi": "pmix",
    },
    "mpirun": {
        "-np": COUNT, "--hostfile": ".+", "--map-by": rf"ppr:{COUNT}:node(:PE={COUNT})?", "--bind-to": "core|none",
        "-x": r"\w+", "--oversubscribe": "",
    },
}  # fmt: skip
# IBM's reference of bsub's options.
BSUB = {
    "-J": r"[\w.-]+(\[1-\d+\](%\d+)?)?", "-o": ".+", "-nnodes": COUNT, "-n": COUNT, "-R": rf"span\[ptile={COUNT}\]",
    "-gpu": rf"num={COUNT}(:mode=(shared|exclusive_process))?(:j_exclusive=(yes|no))?", "-W": HOURS, "-wa": "USR2",
    "-wt": HOURS, "-Q": r"\d+", "-r": "", "-x": "", "-P": r"[\w.-]+", "-q": r"[\w.-]+",
    "-alloc_flags": r"(NVME|smt\d)( (NVME|smt\d))*", "-w": r"ended\(\d+\)",
}  # fmt: skip


def refuse(message: str) -> None:
    """End as a program does that was called wrongly."""
    print(message, file=sys.stderr)
    sys.exit(97)


def parse(name: str, words: Sequence[str], table: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(options with their values, the rest), by a table of what is allowed; --name=value or -n value."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        option, equals, value = left.pop(0).partition("=")
        if option not in table:
            refuse(f"{name}: no such option: {option}")
        if table[option] and not equals:
            if not left:
                refuse(f"{name}: {option} wants a value")
            value = left.pop(0)
        if not re.fullmatch(table[option], value):
            refuse(f"{name}: {option}: {value!r} is not {table[option]!r}")
        options[option] = value
    return options, left


def call(name: str, **values: object) -> None:
    """Note the call."""
    with open(FOLDER / "calls.jsonl", "a") as file:
        file.write(json.dumps({"program": name, **values}) + "\n")


def launch(name: str, words: Sequence[str]) -> int:
    """Start the command: by mpirun in a session of its own, as jsrun's ranks are on other machines; or once, here."""
    options, command = parse(name, words, LAUNCHERS[name])
    call(name, options=options, command=command)
    if not command:
        refuse(f"{name}: no command")
    mpirun = os.environ.get("STANDIN_MPIRUN")
    if name != "jsrun" or mpirun is None:
        os.execvp(command[0], command)
    sets, each, cores = int(options["-n"]), int(options["-a"]), int(options["-c"])
    if options["-b"].startswith("packed:") and int(options["-b"][7:]) * each > cores:
        refuse(f"jsrun: {each} ranks of {options['-b']} do not fit {cores} cores")
    prefix = [mpirun, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    step = subprocess.Popen([*prefix, "-np", str(sets * each), *command], start_new_session=True)
    (FOLDER / "step").write_text(str(step.pid))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: step.kill())
    return step.wait()


def jskill(words: Sequence[str]) -> int:
    """jskill -s NUMBER all."""
    options, which = parse("jskill", words, {"-s": r"\d+"})
    call("jskill", options=options)
    if which != ["all"] or "-s" not in options:
        refuse(f"jskill: -s NUMBER all is wanted, got {words}")
    os.kill(int((FOLDER / "step").read_text()), int(options["-s"]))
    return 0


def bsub(words: Sequence[str]) -> int:
    """Take a script, named or on standard input, and file it as a job."""
    options, command = parse("bsub", words, BSUB)
    text = Path(command[0]).read_text() if command else sys.stdin.read()
    if os.environ.get("STANDIN_REFUSES"):
        refuse("Request aborted by esub. Job not submitted.\n" + os.environ["STANDIN_REFUSES"])
    for line in text.splitlines():  # wherever it stands, as bsub does
        if line.startswith("#BSUB"):
            more, rest = parse("bsub", shlex.split(line)[1:], BSUB)
            if rest or set(more) & set(options):
                refuse(f"bsub: {line!r}")
            options |= more
    number = 101 + len(list(FOLDER.glob("job_*.json")))
    job = {"id": number, "options": options, "script": text, "folder": os.getcwd(), "named": bool(command)}
    (FOLDER / f"job_{number}.json").write_text(json.dumps(job))
    print(f"Job <{number}> is submitted to queue <{options.get('-q', 'batch')}>.")
    return 0


def bjobs(words: Sequence[str]) -> int:
    """The states that the test put into $STANDINS/bjobs, in the format that is asked for."""
    if list(words) != ["-noheader", "-o", "jobid jobindex stat"]:
        refuse(f"bjobs: {words}")
    if not (FOLDER / "bjobs").exists():
        print("No unfinished job found", file=sys.stderr)
        return 255
    print((FOLDER / "bjobs").read_text(), end="")
    return 0


def answer(name: str, words: Sequence[str]) -> int:
    """sbatch, squeue, scontrol: what the test put into $STANDINS/NAME."""
    call(name, words=list(words), folder=os.getcwd())
    if os.environ.get("STANDIN_REFUSES"):
        refuse(os.environ["STANDIN_REFUSES"])
    path = FOLDER / name
    print(path.read_text() if path.exists() else "", end="")
    return 0


def trainer(words: Sequence[str]) -> int:
    """In the place of Python with summit_train: does what $TRAINER says, once for the given run."""
    call("trainer", words=list(words), folder=os.getcwd())
    if words[:3] != ["-m", "summit_train", "train"]:
        return int(os.environ.get("STAGING_ENDS", "0"))
    run = Path(words[3]).parents[1]
    does = os.environ.get("TRAINER", "done")
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    if does == "fail":
        return 3
    if does.startswith("crash"):
        starts = (run / "starts").read_text() + "." if (run / "starts").exists() else "."
        (run / "starts").write_text(starts)
        if does == "crash after a step":
            (checkpoints / "step_00000008.pt").touch()
        return 0 if does == "crash once" and len(starts) > 1 else 139
    if does.startswith("stop"):
        signal.sigwait({signal.SIGUSR2})
        if does == "stop in the evaluation":
            (run / "predictions").mkdir(exist_ok=True)
            with open(run / "predictions/step_00000008.partial", "a") as file:
                file.write("scores")
        elif does != "stop without a step":
            (checkpoints / f"step_{len(list(checkpoints.iterdir())) + 8:08d}.pt").touch()
        (run / "stopped").touch()
        return 143 if does == "stop as another" else 85
    return 0


def main(name: str, words: Sequence[str]) -> int:
    """The exit status of the program of that name."""
    if name in LAUNCHERS:
        return launch(name, words)
    own = {"jskill": jskill, "bsub": bsub, "bjobs": bjobs, "trainer": trainer}
    return own[name](words) if name in own else answer(name, words)


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    sys.exit(main(sys.argv[1], sys.argv[2:]))
