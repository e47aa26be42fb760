"""What the commands print, compared whole with files, so that code which moves shows what moved for a user.

The run is trained in double, on pictures that are cropped and not scaled, from weights that numpy drew: its numbers,
rounded to six digits, are the same on other processors. What differs between machines, places and moments has a name in
its place (`masked`), or fixed values in the run's files (`settle`). Write the files anew only where a change is
meant to change what users read, and read each line of the difference before you commit it:
    python -m tests.cli.test_golden_words
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure

from summit_train.__main__ import _parser, main
from summit_train.data.video.encode import write_video
from summit_train.models import build_model
from tests.page_values import page_text, save_values
from tests.run_directories import ENVIRONMENT
from tests.scored_runs import FLOW, RGB, write_scored_run
from tests.training.test_golden_runs import SIDE, write_set
from tests.worlds import ROOT, forked, main_without_reports

GOLDEN = Path(__file__).parents[1] / "golden" / "words"
SCRIPT = GOLDEN.parent / "jobs" / "summit-many.sh"  # held by tests/cluster/test_job.py
PAPER = "shipped:kinetics/tsm_r50_8f_1536gpu --clips 240000"
MODEL = {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 4, "shift_direction": "past"}
SPEC: dict[str, Any] = {
    "name": "words",
    "model": MODEL | {"dropout": 0.2, "pretrained": "weights.pth"},
    "data": {
        "train": "train.csv", "val": "val.csv", "num_frames": 4, "frame_stride": 1, "short_side": [SIDE, SIDE],
        "crop": SIDE, "workers": 0,
    },
    "scale": {"gpus": 4, "clips_per_gpu": 2},
    "optimizer": {"base_lr": 0.005, "weight_decay": 1e-3},
    "schedule": {"epochs": 3, "warmup_epochs": 1},
    "loss": {"label_smoothing": 0.1},
    "noise_scale": {"every_steps": 1},
    "ema": {"decay": 0.5},
    "evaluate": {"every_epochs": 1, "clips": 2, "short_side": SIDE, "last_checkpoints": 2, "precise_bn": 2},
    "checkpoint": {"keep_best": "top1"},
    "precision": "fp64",
    "run_dir": "runs",
}  # fmt: skip
AVERAGING: dict[str, Any] = {
    **{key: SPEC[key] for key in ("data", "scale", "optimizer", "run_dir")},
    "name": "averaging",
    "model": MODEL,
    "schedule": {"epochs": 3, "warmup_epochs": 0.5, "early_stop": {"measure": "top1", "epochs": 2}},
    "evaluate": {"every_epochs": 1},
    "parallel": {"method": "averaging", "grow_batch": {"margin": 2.0, "max": 3}},
}
SWEEP = "name: study\nbase: spec.yaml\nnodes: 1\ngrid: {scale.gpus: [6, 12]}\nat_once: 2\n"
# Of a record in metrics.jsonl: what no two runs share.
FIXED = {"time": 1_700_000_000.0, "startup_s": 2.0, "seconds": 0.25, "step_s": 0.5, "data_wait_s": 0.05}
FIXED |= {"clips_per_second": 16.0}

# File -> the commands whose output it holds.
TRANSCRIPTS: dict[str, tuple[str, ...]] = {
    "plan": (
        "plan spec.yaml --ranks 3 name=new optimizer.name=lamb",
        "plan averaging.yaml",
        f"plan {PAPER} --site summit --nodes 8 --price 2",
        f"plan {PAPER} --ranks 768 --json",
        "plan shipped:aavg/hmdb51_flow --clips 3570",
        "plan shipped:imagenet_vid/rfcn_tsm_online_r101 --clips 50000 scale.gpus=6 --ranks 4",
        "plan shipped:kinetics/vit_b_16f --clips 240000",
    ),
    "model": (
        "model shipped:kinetics/tsm_r50_8f",
        "model shipped:kinetics/tsm_r50_8f --json",
        "model shipped:kinetics/slowfast_r50_4x16",
        "model shipped:imagenet_vid/rfcn_tsm_online_r101",
    ),
    "simulate": (
        f"simulate {PAPER} --machine summit",
        f"simulate {PAPER} --machine summit --nodes 256 --json",
    ),
    "submit": (f"submit {PAPER} --site summit --nodes 256 --set account=abc123 --dry-run",),
    "sweep": (
        "sweep sweep.yaml --dry-run",
        "sweep sweep.yaml --dry-run --site summit",
        "sweep sweep.yaml --dry-run --site summit --json",
    ),
    "eval": (
        "eval runs/words --json",
        "eval runs/words --checkpoints last:1 evaluate.clips=1",
        "eval runs/words --observed 0.5,1",
    ),
    "predict": ("predict runs/words val.csv --json", "predict runs/words val.csv --top 2"),
}


def printed(words: str) -> tuple[str, str, int | str | None]:
    """Run a command in this process: what it printed on stdout and on stderr, and its exit status."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: int | str | None = main(shlex.split(words))
        except SystemExit as leaving:  # argparse
            status = leaving.code
    return masked(out.getvalue()), masked(err.getvalue()), status


def masked(text: str) -> str:
    """Put names in the place of the present folder, of Python and of the checkout."""
    for place, name in ((os.getcwd(), "FOLDER"), (sys.executable, "PYTHON"), (str(ROOT), "ROOT")):
        text = text.replace(place, name)
    return re.sub(r"'((?:FOLDER|PYTHON)[^']*)'", r"\1", text)  # a script quotes a path with spaces


def said(words: str) -> str:
    """Return a command and what it printed; lines on stderr, and an exit status that is not 0, are marked."""
    out, err, status = printed(words)
    if out.startswith("{"):
        out = "".join(f"{line}\n" for line in value_lines(json.loads(out)))
    errors = "".join(f"stderr: {line}\n" for line in err.splitlines())
    return f"$ summit-train {words}\n{out}{errors}" + (f"exit status {status}\n" if status else "")


def value_lines(values: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key of a JSON object, and for each object in a list, with numbers of six digits."""
    for key, value in rounded(values).items():
        is_table = isinstance(value, list) and value and isinstance(value[0], dict)
        yield from (f"{key}: {json.dumps(part)}" for part in (value if is_table else [value]))


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def transcript(name: str) -> str:
    return "".join(map(said, TRANSCRIPTS[name]))


def but_for_the_script(name: str) -> str:
    """Return a transcript, of whose job scripts only what differs from Summit's is said."""
    script, text = SCRIPT.read_text(encoding="utf-8").splitlines(), transcript(name).splitlines()
    [_, _, *lines] = difflib.unified_diff(script, text, n=0, lineterm="")
    return "".join(f"{line}\n" for line in lines if not line.startswith("@@"))


def help_words() -> str:
    """Return what --help prints for each command, an argument a line, without the lines that all have."""

    def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
        yield parser.prog.removeprefix("summit-train")
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for listed in action._choices_actions:  # without those that were removed
                    yield from commands(action.choices[listed.dest])

    lines = []
    for command in commands(_parser(["completion"])[0]):  # which has the arguments of all
        out, err, status = printed(f"{command} --help")
        assert (err, status) == ("", 0), command
        lines += [
            line for line in out.splitlines() if not re.fullmatch(r"|positional arguments:|options:| *-h, .*", line)
        ]
    return "".join(f"{line}\n" for line in lines)


def refusals() -> str:
    """Return what each command of the golden file says of its mistake, before its work and without writing anything.

    To add a refusal, add its line `$ summit-train ...` to that file, and write the files anew.
    """
    before = {path: path.lstat().st_mtime_ns for path in Path().rglob("*")}
    text = ""
    with pytest.MonkeyPatch.context() as patch:
        for work in ("cli.predict.predict_videos", "inference.export.export.exported"):
            patch.setattr(f"summit_train.{work}", None)
        for words in re.findall(r"^\$ summit-train (.*)", (GOLDEN / "refusals.txt").read_text(encoding="utf-8"), re.M):
            out, err, status = printed(words)
            assert (out, status) == ("", 2) and err.startswith(("summit-train: ", "usage: ")), (words, out, err)
            is_usage = err.startswith("usage: ")
            reason = err.splitlines()[-1] if is_usage else err.removeprefix("summit-train: ").rstrip("\n")
            text += f"$ summit-train {words}\n{reason}\n"
    assert {path: path.lstat().st_mtime_ns for path in Path().rglob("*")} == before
    return text


def data_words() -> str:
    """Return what the commands of the golden file print in the folder `data`, and the files that `cat` names."""
    text = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("data")
        for words in re.findall(r"^\$ (.*)", (GOLDEN / "data.txt").read_text(encoding="utf-8"), re.M):
            command, _, rest = words.partition(" ")
            if command == "summit-train":
                text += said(rest)
            else:
                content = Path(rest).read_text(encoding="utf-8") if Path(rest).exists() else "no such file\n"
                text += f"$ {words}\n{content}"
    return re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)


def cost_words() -> str:
    """Return what the commands of the golden file print; of job scripts only some directives and the last line."""
    golden = (GOLDEN / "cost.txt").read_text(encoding="utf-8")
    text = "".join(map(said, re.findall(r"^\$ summit-train (.*)", golden, re.M)))
    is_script = False
    kept = []
    for line in text.splitlines(keepends=True):
        is_script = line.startswith("#!") or (is_script and not line.startswith(("stderr: ", "$ ")))
        if not is_script or re.match(r"#(BSUB -W|SBATCH --(mail|account)|PBS -m)|# \{staged\}|.* train ", line):
            kept.append(line)
    return "".join(kept)


def train_words() -> str:
    """Return what `train` printed, without times and speeds; a step that is not the last is only said of slow ones."""
    text = re.sub(r".*: step (?!9/9).*\n", "", Path("train.log").read_text(encoding="utf-8"))
    text = re.sub(r"[\d.]+ clips/s  data wait \d+ %", "... clips/s  data wait ... %", text)
    return re.sub(r"(?<=^network: ).*|(?<=done in )[^;]*", "...", text, flags=re.M)


def report_words() -> str:
    """Return the page of the run, then what the page of two runs says before it comes to the first one."""
    spec = " ".join(Path("runs/words/spec.yaml").read_text(encoding="utf-8").split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_values)
        text = said("report runs/words --out one.html") + page_text(Path("one.html").read_text(encoding="utf-8"))
        text += said("report runs/words runs/other --out two.html")
    both = page_text(Path("two.html").read_text(encoding="utf-8"))
    assert f"\n{spec}\n" in text
    return text.replace(spec, "(the text of spec.yaml)") + both[: both.index("\nwords\n") + 1]


WORDS: dict[str, Callable[[], str]] = {
    "help": help_words,
    "train": train_words,
    **{name: partial(transcript, name) for name in TRANSCRIPTS},
    **{name: partial(but_for_the_script, name) for name in ("submit", "sweep")},
    "report": report_words,
    "refusals": refusals,
    "data": data_words,
    "cost": cost_words,
}


def every_word(folder: Path) -> dict[str, str]:
    """Return what each golden file has to hold. `eval` writes results that `report` shows."""
    make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "400")  # an argument's help on one line
        patch.setenv("NO_COLOR", "1")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # show progress
            patch.delenv(name, raising=False)
        return {name: words() for name, words in WORDS.items()}


def write_weights(path: Path) -> None:
    """Write initial weights that numpy drew, as torch's random numbers differ between processors in the last bit."""
    generator, state = np.random.default_rng(0), build_model(num_frames=4, **MODEL).state_dict()
    for name, values in state.items():
        if values.ndim > 1:
            bound = (6 / values[0].numel()) ** 0.5
            state[name] = torch.from_numpy(generator.uniform(-bound, bound, values.shape).astype(np.float32))
    torch.save(state, path)


def make(folder: Path) -> None:
    """Train the run, and write what the commands need beside it."""
    write_set(folder)
    (folder / "classes.txt").write_text("right\ndown\nleft\nup\n")
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (folder / "averaging.yaml").write_text(yaml.safe_dump(AVERAGING))
    (folder / "sweep.yaml").write_text(SWEEP)
    write_weights(folder / "weights.pth")

    def work() -> int:
        os.chdir(folder)
        return main_without_reports(["train", "spec.yaml"])

    status, output = forked(0, work)
    assert status == 0, output
    (folder / "train.log").write_text(output)
    settle(folder / "runs/words")
    shutil.copytree(folder / "runs/words", folder / "runs/other")
    changed = (folder / "runs/other/spec.yaml").read_text().replace("name: words", "name: other")
    (folder / "runs/other/spec.yaml").write_text(changed)
    make_what_is_refused(folder)
    make_data(folder / "data")


def make_what_is_refused(folder: Path) -> None:
    """Write files that are of no use to the commands of refusals.txt, and such as they must not replace."""
    for name in ("set/jump/a.mp4", "set/walk/b.mp4", "video.mp4"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(folder / name, np.zeros((3, 16, 16, 3), np.uint8))
    texts = {
        "three.txt": "a\nb\nc\n",
        "regions.csv": "path,label,left,top,width,height\nvideo.mp4,0,1,2,9,8\n",
        "gone.csv": "path,label\n1.mp4,0\n2.mp4,1\n",
        "train.html": "",
        "site.yaml": (ROOT / "configs/sites/summit.yaml").read_text(encoding="utf-8"),
        "machine.yaml": (ROOT / "configs/machines/ib_cluster.yaml").read_text(encoding="utf-8"),
        "ours.yaml": "extends: shipped:sites/slurm_generic\nname: ours\nrequires: [account]\n"
        "spec: {precision: bf16, watch.stall_seconds: 60}\ndirectives: [{option: --constraint=gpu, why: GPUs}]\n",
        "packed_val/pack.json": "",
        "two.yaml": "grid: {seed: [0, 1]}",
        "many_ranks.yaml": "grid: {seed: [0]}\nnodes: 3",
        "many_gpus.yaml": "grid: {seed: [0], scale.gpus: [64]}",
        "unknown.yaml": "grid: {sed: [0, 1]}",
    }
    (folder / "packed_val").mkdir()
    for name, text in texts.items():
        is_sweep = text.startswith("grid: ")
        (folder / name).write_text(f"name: study\nbase: spec.yaml\n{text}\n" if is_sweep else text, encoding="utf-8")
    for name in ("empty", "folder.json", "folder.mp4"):
        (folder / name).mkdir()
    (folder / "link.csv").symlink_to("train.csv")
    os.mkfifo(folder / "pipe")
    shutil.copytree(folder / "runs/other", folder / "without", ignore=shutil.ignore_patterns("*.pt*", "best.json"))
    train = str(folder / "train.csv")
    for words in (
        ("split", train, str(folder / "folds"), "--folds", "3"),
        ("pack", train, str(folder / "packed"), "--kind", "bytes", "--workers", "0"),
    ):
        assert main(["data", *words]) == 0


def make_data(folder: Path) -> None:
    """Write lists and class folders, whose videos are missing, torn, changed, or too short for their clips."""
    write_scored_run(folder / "rgb", RGB)
    write_scored_run(folder / "flow", FLOW)
    texts = {
        "classes/jump/torn.mp4": "x",
        "classes/walk/notes.txt": "",
        "torn.mp4": "x",
        "spans.csv": "path,label,start_frame,end_frame a.mp4,0,0,8 a.mp4,1,8, a.mp4,0,15,21 a.mp4,1,, a.mp4,0,20, "
        "torn.mp4,1,2,3 gone.mp4,1,,",
        "bad/jump/torn.mp4": "x",
        "own/list.csv": "path,label,group,start_frame,end_frame,own gone.mp4,0;2,a,0,8,x "
        "gone.mp4,1,b,8,,y a.mp4,2,c,,,z",
        "regions.csv": "path,label,left,top,width,height b.mp4,0,2,3,30,13 c.mp4,1,2,3,30,14 c.mp4,0,,,,",
        "one.csv": "path,label,group b.mp4,0,g0 classes/jump/a.mp4,0,g1 a.mp4,0,g2",
        "other.csv": "path,label b.mp4,0 copy.mp4,0 d.mp4,0 torn.mp4,0 gone.mp4,0",
        "both.csv": "path,label,group b.mp4,0,g0 a.mp4,0,g2 b.mp4,1, copy.mp4,0,g1 classes/jump/a.mp4,0,",
    }
    videos = {"classes/jump/a": (3, 16), "a": (20, 16), "b": (3, 32), "c": (4, 32), "d": (5, 16)}
    for name, (num_frames, width) in videos.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(folder / f"{name}.mp4", np.full((num_frames, 16, width, 3), 9, np.uint8))
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(" ", "\n") + "\n" * text.startswith("path"))
    (folder / "mounted").mkdir()
    copies = {"classes/walk/b.mp4": "classes/jump/a.mp4", "copy.mp4": "classes/jump/a.mp4"}
    for name, source in (copies | {"own/a.mp4": "a.mp4", "mounted/gone.mp4": "a.mp4"}).items():
        shutil.copy(folder / source, folder / name)
    shutil.copytree(folder / "classes", folder / "changed")
    video = folder / "changed/walk/b.mp4"
    video.write_bytes(video.read_bytes()[:-1] + b"?")  # in the title, which no decoder looks at
    shutil.copytree(folder / "classes", folder / "good", ignore=shutil.ignore_patterns("torn.mp4"))


def settle(run: Path) -> None:
    """Put fixed values in the place of what no two runs share: times, speeds and the machine."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for place, record in enumerate(records):
        record |= {key: value for key, value in FIXED.items() if key in record}
        record["time"] += place
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return every_word(tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize("name", WORDS)
def test_the_words_are_those_of_the_golden_file(name: str, found: dict[str, str]) -> None:
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    changed = list(difflib.unified_diff(golden.splitlines(), found[name].splitlines(), n=0, lineterm=""))
    assert not changed, "\n".join(changed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in every_word(Path(scratch)).items():
            (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")
