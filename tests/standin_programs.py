"""Stand-ins for a cluster's programs, which check what they are given: python standin_programs.py NAME ARGUMENT ...

bsub, bjobs, jskill, qsub and flux know a job as a file in $STANDINS; jsrun starts the ranks by mpirun where
$STANDIN_MPIRUN names one; with $STANDIN_RANKS the launchers of PBS and Flux start them, with the variables that theirs
have. Else a launcher starts the command once. Every call is a line in $STANDINS/calls.jsonl.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(os.environ["STANDINS"])

STOPS = {signal.SIGUSR2, signal.SIGTERM}
COUNT, HOURS = r"[1-9]\d*", r"(\d+:)?\d+"
# What each launcher's manual allows, as far as the scripts use it: option -> form of its value, "" where it has none.
LAUNCHERS = {
    "jsrun": {
        "-n": COUNT, "-r": COUNT, "-a": COUNT, "-g": r"\d+", "-c": COUNT, "-b": rf"none|rs|packed:{COUNT}",
        "--smpiargs": ".*",
    },
    "srun": {
        "--nodes": COUNT, "--ntasks": COUNT, "--ntasks-per-node": COUNT, "--kill-on-bad-exit": "[01]",
        "--cpu-bind": "cores|none", "--mpi": "pmix|none", "--nodelist": r"(?s:[\w.,-]+|/.+)", "--overlap": "",
    },
    "mpirun": {
        "-np": COUNT, "--hostfile": ".+", "--map-by": rf"ppr:{COUNT}:node(:PE={COUNT})?", "--bind-to": "core|none",
        "-x": r"\w+", "--oversubscribe": "",
    },
    "pals": {
        "--hostfile": "(?s:.+)", "-n": COUNT, "--ppn": COUNT, "--depth": COUNT,
        "--cpu-bind": r"depth|none|list:[\d:,-]+",
    },
    "hydra": {"-f": "(?s:.+)", "-n": COUNT, "-ppn": COUNT, "-bind-to": rf"core:{COUNT}"},
    "flux run": {
        "--requires": r"host:[\w.,\[\]-]+", "--nodes": COUNT, "--ntasks": COUNT, "--exclusive": "",
        "-o": r"exit-on-error|(cpu-affinity=(per-task|off))|(gpu-affinity=off)|mpibind=off",
    },
}  # fmt: skip
# A rank's variables: Hydra's and Flux's by their manuals, those of PALS by the centres' guides.
RANKS = {
    "pals": {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}", "PALS_RANKID": "{rank}", "PALS_LOCAL_RANKID": "{local}"},
    "hydra": {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}", "MPI_LOCALRANKID": "{local}"},
    "flux run": {
        "FLUX_TASK_RANK": "{rank}", "FLUX_JOB_SIZE": "{size}", "FLUX_TASK_LOCAL_ID": "{local}", "FLUX_JOB_ID": "f2",
    },
}  # fmt: skip
# OpenPBS's qsub(1B), with the resources that ALCF's guide adds, and Flux's flux-batch(1).
QSUB = {
    "-N": r"[\w.-]{1,230}", "-j": "oe|eo|n", "-k": r"d?o?e?", "-r": "[yn]", "-A": r"[\w.-]+", "-q": r"[\w.-]+",
    # qsub refuses to wait for a job of an array, 7[2].pbs.
    "-W": r"tolerate_node_failures=all|depend=afterany:\d+(\.pbs)?",
    "-l": r"select=\d+(:\w+=\w+)+|place=(scatter|pack|free)(:excl)?|walltime=\d+:\d\d:\d\d|filesystems=\w+(:\w+)*",
}  # fmt: skip
FLUX_BATCH = {
    "--job-name": r"[\w.-]+", "--nodes": COUNT, "--exclusive": "", "--time-limit": rf"{COUNT}[smhd]?",
    "--signal": r"SIGUSR2@\d+s", "--bank": r"[\w.-]+", "--queue": r"[\w.-]+", "--setattr": r"[\w.]+(=.+)?",
    "--dependency": r"afterany:f\w+", "--requires": r"-host:[\w.,-]+",
}  # fmt: skip
# IBM's reference of bsub's options.
BSUB = {
    "-J": r"[\w.-]+(\[1-\d+\](%\d+)?)?", "-o": ".+", "-nnodes": COUNT, "-n": COUNT,
    "-R": rf"span\[ptile={COUNT}\]|select\[hname!='[\w.-]+'( && hname!='[\w.-]+')*\]",
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
        repeated = option in options and option in ("-o", "-l", "-x", "-R")
        options[option] = f"{options[option]} {value}" if repeated else value
    return options, left


def call(name: str, **values: object) -> None:
    """Note the call."""
    with open(FOLDER / "calls.jsonl", "a") as file:
        file.write(json.dumps({"program": name, **values}) + "\n")


def launch(name: str, words: Sequence[str]) -> int:
    """Start the command: by mpirun in a session of its own, as jsrun's ranks are on other machines; or once, here."""
    options, command = parse(name, words, LAUNCHERS[name])
    if "--answer" in command or "--version" in command:  # nodes are asked whether ranks can start there
        return answer_for_nodes(name, options, command)
    call(name, options=options, command=command)
    if not command:
        refuse(f"{name}: no command")
    if "--watch" in command:  # over the script's own node
        return 0
    if name in RANKS and "STANDIN_RANKS" in os.environ:
        return start_ranks(name, options, command)
    mpirun = os.environ.get("STANDIN_MPIRUN")
    if name != "jsrun" or mpirun is None:
        (FOLDER / "step").write_text(str(os.getpid()))
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


def answer_for_nodes(name: str, options: Mapping[str, str], command: Sequence[str]) -> int:
    """What nodes answer: $STANDINS/broken names those that cannot start Python; those that are lost answer nothing.

    Where one is lost, srun starts the command on the others, and the other launchers start nothing.
    """
    named = next(options[option] for option in ("--nodelist", "--hostfile", "-f", "--requires") if option in options)
    is_list = not named.startswith("/")
    nodes = named.removeprefix("host:").split(",") if is_list else Path(named).read_text().split()
    for node in nodes:
        call("asked", node=node, together=len(nodes), command=command)
    refusal = FOLDER / ("later refusal" if (FOLDER / "starts").exists() else "refusal")
    if refusal.exists():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    if (FOLDER / "answers at once").exists():
        broken = (FOLDER / "broken").read_text().split()
        pause = float((FOLDER / "answers at once").read_text() or 0)
        for node in nodes:
            time.sleep(pause)
            text = "127 python: cannot open shared object file" if node in broken else "0 "
            print(f"@answer {node} {text}", flush=True)
        return 1
    while (FOLDER / "silent").exists() and (FOLDER / "starts").exists():  # after the ranks have failed
        time.sleep(0.02)
    lost = gone() & {*nodes}
    if lost and name != "srun":
        return 1
    for node in [node for node in nodes if node not in lost]:
        subprocess.run(command, env=os.environ | {"SLURMD_NODENAME": node}, check=False)
    return int(bool(lost))


def gone() -> set[str]:
    """The nodes that are lost by now, of $STANDINS/lost, `n2 then -n2`: with each start one more, or one less."""
    path, starts = FOLDER / "lost", FOLDER / "starts"
    words = path.read_text().replace(" then ", " ").split() if path.exists() else []
    found = set[str]()
    for word in words[: len(starts.read_text()) if starts.exists() else 0]:
        found = found - {word[1:]} if word.startswith("-") else found | {word}
    return found


def start_ranks(name: str, options: Mapping[str, str], command: Sequence[str]) -> int:
    """Start every rank here, pass signals on as the launcher does, and return the highest exit status."""
    size = int(options.get("-n") or options["--ntasks"])
    ranks = []
    for rank in range(size):
        variables = {key: form.format(rank=rank, size=size, local=rank) for key, form in RANKS[name].items()}
        ranks.append(subprocess.Popen(command, env=os.environ | variables, start_new_session=True))
    (FOLDER / "step").write_text(" ".join(str(rank.pid) for rank in ranks))
    # Hydra 5.0.2 was seen to pass these on, and to end of SIGUSR2; aprun's manual, PALS' model, has SIGUSR2 too.
    for number in {"pals": (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), "hydra": (signal.SIGTERM,)}.get(name, ()):
        signal.signal(number, lambda number, _: [rank.send_signal(number) for rank in ranks])
    return max(rank.wait() for rank in ranks)


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
    directives = [line for line in text.splitlines() if line.startswith("#BSUB")]  # wherever they stand, as bsub does
    options = with_directives("bsub", options, [shlex.split(line)[1:] for line in directives], BSUB)
    number = file_job(options, text, named=bool(command))
    print(f"Job <{number}> is submitted to queue <{options.get('-q', 'batch')}>.")
    return 0


def with_directives(
    name: str, options: Mapping[str, str], directives: Sequence[Sequence[str]], table: Mapping[str, str]
) -> dict[str, str]:
    """The options of a script and of the command line, which win."""
    found: dict[str, str] = {}
    for words in directives:
        more, rest = parse(name, words, table)
        if rest or (set(more) & set(found)) - {"-l", "--setattr"}:
            refuse(f"{name}: {words!r}")
        found |= {option: f"{found[option]} {value}" if option in found else value for option, value in more.items()}
    return found | dict(options)


def file_job(options: Mapping[str, str], text: str, *, named: bool, **more: object) -> int:
    """File a job and return its number."""
    first = FOLDER / "first_job"
    number = int(first.read_text() if first.exists() else 101) + len(list(FOLDER.glob("job_*.json")))
    job = {"id": number, "options": options, "script": text, "folder": os.getcwd(), "named": named, **more}
    (FOLDER / f"job_{number}.json").write_text(json.dumps(job))
    return number


def qsub(words: Sequence[str]) -> int:
    """Take a script, named or on standard input, and file it as a job. Directives end at the first command."""
    options, command = parse("qsub", words, QSUB)
    call("qsub", options=options, command=command, folder=os.getcwd())
    if os.environ.get("STANDIN_REFUSES"):
        refuse(os.environ["STANDIN_REFUSES"])
    text = Path(command[0]).read_text() if command else sys.stdin.read()
    head = itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), text.splitlines())
    directives = [shlex.split(line)[1:] for line in head if line.startswith("#PBS ")]
    options = with_directives("qsub", options, directives, QSUB)
    number = file_job(options, text, named=bool(command))
    print(f"{number}.pbs")
    return 0


def qselect(words: Sequence[str]) -> int:
    """The jobs that the test put into $STANDINS/qselect, a line of id and state each, in the states asked for."""
    options, rest = parse("qselect", words[1:], {"-u": r"\w+", "-s": "[BEHQRSTUWX]+"})
    if words[0] != "-T" or rest:
        refuse(f"qselect: {words}")
    path = FOLDER / "qselect"
    for line in path.read_text().splitlines() if path.exists() else ():
        name, state = line.split()
        if state in options.get("-s", state):
            print(name)
    return 0


def flux(words: Sequence[str]) -> int:
    """flux batch, run, jobs, hostlist, getattr jobid and job killall; --parent batch from within a job."""
    words = list(words)
    inside = "STANDIN_FLUX_JOB" in os.environ
    parent = words[0] == "--parent"
    if parent and not inside:
        refuse("flux: --parent: no parent instance")
    name, *rest = words[1:] if parent else words
    if name == "run":
        return launch("flux run", rest)
    if name == "batch":
        if inside and not parent:
            refuse("flux: this would be a job of the batch job's own instance")
        return flux_batch(rest)
    if name == "getattr" and rest == ["jobid"] and inside:
        print(os.environ["STANDIN_FLUX_JOB"])
        return 0
    if [name, *rest] == ["job", "killall", "--force", "--signal=SIGUSR2"]:
        call("flux", words=words)
        for pid in (FOLDER / "step").read_text().split():
            os.kill(int(pid), signal.SIGUSR2)
        return 0
    if name == "hostlist":
        return flux_hostlist(rest)
    if name == "jobs":
        options, left = parse("flux jobs", rest, {"--no-header": "", "--filter": "pending,running", "--format": ".+"})
        if left or options["--format"] != "{id.f58plain} {status}":
            refuse(f"flux jobs: {rest}")
        print((FOLDER / "jobs").read_text() if (FOLDER / "jobs").exists() else "", end="")
        return 0
    refuse(f"flux: {words}")
    return 2


def flux_batch(words: Sequence[str]) -> int:
    """File a script with its directives, which must be one group of comments."""
    options, command = parse("flux batch", words, FLUX_BATCH)
    if os.environ.get("STANDIN_REFUSES"):
        refuse(os.environ["STANDIN_REFUSES"])
    text = Path(command[0]).read_text()
    lines = text.splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("# flux:")]
    if not all(line.startswith("# ") for line in lines[at[0] : at[-1] + 1]):
        refuse("flux batch: orphan 'flux:' detected")
    directives = [shlex.split(lines[number], comments=False)[2:] for number in at]
    number = file_job(with_directives("flux batch", options, directives, FLUX_BATCH), text, named=True)
    print(("f" if "FLUX_F58_FORCE_ASCII" in os.environ else "\u0192") + f"A{number}")
    return 0


def flux_hostlist(words: Sequence[str]) -> int:
    """The hosts that the test put into $STANDINS/hosts."""
    table = {"--expand": "", "--delimiter": r"\s"}
    options, sources = parse("flux hostlist", words, table)
    if sources != ["avail"] or len(options) != 2:
        refuse(f"flux hostlist: {words}")
    if (FOLDER / "warned").exists() and (FOLDER / "starts").exists():  # at a restart: the job's signal
        os.killpg(0, signal.SIGUSR2)
    print("".join(f"{host}\n" for host in (FOLDER / "hosts").read_text().split() if host not in gone()), end="")
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
    """sbatch, squeue, scontrol: what the test put into $STANDINS/NAME; the hosts for `scontrol show hostnames`."""
    if list(words[:2]) == ["show", "hostnames"]:
        print((FOLDER / "hosts").read_text(), end="")
        return 0
    if list(words[:3]) == ["--oneliner", "show", "job"]:
        print((FOLDER / "record").read_text() if (FOLDER / "record").exists() else "", end="")
        return 0
    call(name, words=list(words), folder=os.getcwd())
    if os.environ.get("STANDIN_REFUSES"):
        refuse(os.environ["STANDIN_REFUSES"])
    path = FOLDER / name
    print(path.read_text() if path.exists() else "", end="")
    return 0


def trainer(words: Sequence[str]) -> int:
    """In the place of Python with summit_train: does what $TRAINER says, once for the given run."""
    if words[:2] == ["-m", "summit_train.cluster.keeper"]:
        refuse("the job keeper must be the real one")
    where = {
        name: os.environ.get(name)
        for name in ("MASTER_ADDR", "PBS_NODEFILE", "SUMMIT_TRAIN_FAILURE", "SUMMIT_TRAIN_SECRET")
    }
    if where["SUMMIT_TRAIN_FAILURE"] is not None and (Path(where["SUMMIT_TRAIN_FAILURE"]).parent / "spares").exists():
        where["spares"] = Path(where["SUMMIT_TRAIN_FAILURE"]).with_name("spares").read_text()
    if "--answer" in words or "--version" in words:
        broken = FOLDER / "broken"
        if broken.exists() and os.environ["SLURMD_NODENAME"] in broken.read_text().split():
            print("it is\npython: cannot open shared object file", file=sys.stderr)
            return 127
        return 0
    call("trainer", words=list(words), folder=os.getcwd(), **where)
    if words[:3] != ["-m", "summit_train", "train"]:
        return int(os.environ.get("STAGING_ENDS", "0"))
    run = Path(words[3]).parents[1]
    does = os.environ.get("TRAINER", "done")
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    while does == "done beside a guard" and '"--watch"' not in (FOLDER / "calls.jsonl").read_text():
        time.sleep(0.02)  # the script has started it before, in the background
    if does in ("fail", "your mistake"):
        return 3 if does == "fail" else 2
    if does == "fail beside a silent node" and not (run / "job/restarts").exists():
        Path(os.environ["SUMMIT_TRAIN_FAILURE"]).write_text("rank 1 on n2: silent\n")
        signal.pause()
    if does.startswith("crash") or does == "lose a node":
        starts = (FOLDER / "starts").read_text() + "." if (FOLDER / "starts").exists() else "."
        (FOLDER / "starts").write_text(starts)
        if does in ("crash after a step", "lose a node"):
            (checkpoints / f"step_{len(starts):08d}.pt").touch()
        return 9 if does == "lose a node" else 0 if does == "crash once" and len(starts) > 1 else 139
    if does.startswith("stop"):
        signal.sigwait(STOPS)
        if does == "stop in the evaluation":
            (run / "predictions").mkdir(exist_ok=True)
            with open(run / "predictions/step_00000008.partial", "a") as file:
                file.write("scores")
        elif does == "stop after the result":
            (run / "job/done").touch()
            return 138
        elif does != "stop without a step":
            (checkpoints / f"step_{len(list(checkpoints.iterdir())) + 8:08d}.pt").touch()
        (run / "stopped").touch()
        return 143 if does == "stop as another" else 85
    return 0


def main(name: str, words: Sequence[str]) -> int:
    """The exit status of the program of that name."""
    if name in LAUNCHERS:
        return launch(name, words)
    own = {"jskill": jskill, "bsub": bsub, "bjobs": bjobs, "qsub": qsub, "qselect": qselect, "flux": flux}
    own |= {"trainer": trainer}
    return own[name](words) if name in own else answer(name, words)


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
