"""The command line: exit statuses, one message and no traceback, JSON on stdout, no torch where none is needed."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import summit_train
from summit_train.__main__ import _parser
from summit_train.core.errors import AgreedError, RunFailed
from summit_train.data.video.encode import write_video
from summit_train.spec.source import split_overrides
from tests.conftest import WriteSpec
from tests.worlds import Say, refused, stdout_of

ROOT = Path(__file__).resolve().parents[1]
SPEC = """name: t
model: {arch: tsm, num_classes: 400}
data: {train: FOLDER/train.csv, val: FOLDER/val.csv, root: FOLDER}
scale: {gpus: 6, clips_per_gpu: 16}
run_dir: FOLDER/runs
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """A spec whose manifests do not exist."""
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("FOLDER", str(tmp_path)))
    return str(path)


@pytest.fixture
def say(say: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs a command in this process: (status, stdout, stderr). No launcher started it."""
    for name in list(os.environ):
        if re.match(r"OMPI_|PMI|SLURM_|JSM_|MV2_|RANK$|WORLD_SIZE$", name):
            monkeypatch.delenv(name)
    return say


def _plan(say: Say, *arguments: str) -> dict[str, Any]:
    status, out, err = say("plan", *arguments)
    assert (status, err, out.count("\n")) == (0, "", 1)
    values: dict[str, Any] = json.loads(out)
    return values


def _helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each command's words and help, those of sub-commands too."""
    yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:  # without those that were removed
                yield from _helps(action.choices[listed.dest])


def test_every_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    helps = dict(_helps(_parser(["completion"])[0]))  # which has the arguments of all commands
    assert helps.keys() >= {"summit-train", "summit-train data import", "summit-train bench step"} and len(helps) > 35
    assert {name: text.count("\n") for name, text in helps.items() if text.count("\n") > 50} == {}
    assert all(" --help " in text for text in helps.values())


def test_the_version(say: Say) -> None:
    assert re.fullmatch(r"summit-train \d+\.\d+\.\d+\n", stdout_of(say("--version")))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "COMMAND"),
        (["--json"], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["plan"], "SPEC"),
        (["plan", "SPEC", "--rank", "x"], "invalid int value: 'x'"),
        (["plan", "SPEC", "--bogus"], "unrecognized arguments: --bogus"),
        (["plan", "SPEC", "--bogus=1", "seed=1"], "unrecognized arguments: --bogus=1"),
        (["plan", "SPEC", "--json", "word"], "unrecognized arguments: word"),
        (["schema", "seed=1"], "unrecognized arguments: seed=1"),
        (["report", "RUN", "--json", "seed=1"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_end_with_2_and_the_usage(say: Say, arguments: list[str], part: str) -> None:
    status, out, err = say(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: summit-train")
    assert part in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["plan", "NO.yaml"], "NO.yaml: cannot be read: No such file or directory"),
        (["plan", "SPEC"], "train.csv not found; give the number of its clips with --clips N"),
        (["plan", "SPEC", "--clips", "95"], "data.train has 95 clips, less than one global batch of 96"),
        (["plan", "SPEC", "--clips", "960", "--ranks", "0"], "--ranks must be 1 or more, got 0"),
        (["plan", "SPEC", "--clips", "960", "--speed", "8"], "--speed must be used with --site; try --site local"),
        (["plan", "SPEC", "sead=1"], "override 'sead=1': sead: unknown key; did you mean seed?"),
        (["plan", "SPEC", "word", "--json"], "override 'word': must have the form section.key=value"),
        (["train", "SPEC"], "train.csv not found (relative paths start at "),
        (["train", "SPEC", "model.arch=x"], "override 'model.arch=x': model.arch: 'x' is not a choice"),
        (["eval", "SPEC"], "val.csv not found (relative paths start at "),
        (["report", "NO"], "NO"),
    ],
)
def test_a_mistake_of_the_user_is_one_line_and_2(say: Say, spec: str, arguments: list[str], part: str) -> None:
    assert part in refused(say(*(spec if word == "SPEC" else word for word in arguments)))


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("summit_train.cli.schema.run", run)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunFailed("the disk is full"), 1, "summit-train: the disk is full\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 1, "summit-train: /a/b: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),  # by hand
    ],
)
def test_a_known_failure_has_its_status_and_one_line(
    say: Say, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    _raising(monkeypatch, error)
    assert say("schema") == (status, "", message)


def test_a_fault_of_ours_keeps_its_traceback(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_code = SyntaxError("bad", ("module.py", 1, 1, "x ="))  # it has a file name too
    for fault in (ValueError("axis"), RuntimeError("size"), KeyError("x"), OSError("?"), AssertionError(), wrong_code):
        _raising(monkeypatch, fault)
        with pytest.raises(type(fault)):
            say("schema")


@pytest.mark.parametrize(
    ("rank", "waits"),
    [(None, False), ("0", False), ("1", True), ("one", False)],
)
def test_rank_0_speaks_at_once_and_the_others_only_where_they_are_left_alone(
    say: Say, monkeypatch: pytest.MonkeyPatch, rank: str | None, waits: bool
) -> None:
    """A rank that waits is ended by its launcher meanwhile, where rank 0 has met the same."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    status, _, err = say("plan", "NO.yaml")
    assert (status, err.count("\n")) == (2, 1)
    assert bool(waited) == waits == ("rank 1 on" in err)


def test_what_all_ranks_agreed_on_is_said_by_rank_0_alone(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, AgreedError("two steps in a row"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for rank, message in (("0", "summit-train: two steps in a row\n"), ("1", "")):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        assert say("schema") == (1, "", message)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ("RANK=0 WORLD_SIZE=2", "2 processes were started by torchrun, and nothing says where rank 0 is"),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", "2 processes were started by srun, and nothing says where rank 0 is"),
        ("SLURM_PROCID=first SLURM_STEP_NUM_TASKS=2", "the environment of srun is broken: must be numbers, got SLURM_"),
    ],
)
def test_ranks_that_nothing_joins_are_refused_in_one_line(
    say: Say, write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch, environ: str, message: str
) -> None:
    for word in environ.split():
        monkeypatch.setenv(*word.split("="))
    assert refused(say("train", write_spec())).startswith(message)


def test_the_plan_for_people(say: Say, spec: str) -> None:
    """What a smaller number of ranks costs is in the golden words."""
    out = stdout_of(say("plan", spec, "--clips", "240000", "--ranks", "4", "scale.gpus=7"))
    assert "7 = 1 rank x 1 + 3 ranks x 2 accumulation" in out and "87.5 %" in out and "as fast" not in out
    assert "6 = 6 ranks x 1" in stdout_of(say("plan", spec, "--clips", "240000"))


def test_overrides_stand_before_and_behind_options(say: Say, spec: str) -> None:
    groups = (["scale.gpus=12"], ["schedule.epochs=7"], ["--json"], ["--clips", "960"])
    found = [_plan(say, spec, *itertools.chain(*order)) for order in list(itertools.permutations(groups))[::5]]
    found.append(_plan(say, "--json", spec, "scale.gpus=12", "schedule.epochs=7", "--clips=960"))
    assert (found[0]["virtual_gpus"], found[0]["epochs"]) == (12, 7)
    assert all(plan == found[0] for plan in found)
    # The last override of a key wins, wherever it stands.
    for words in ("scale.gpus=2 scale.gpus=3 --json", "scale.gpus=2 --json scale.gpus=3"):
        assert _plan(say, spec, *words.split(), "--clips", "960")["virtual_gpus"] == 3


def test_files_and_overrides_in_one_list_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").touch()
    overrides = ["evaluate.clips=1", "seed=2", "data.+crop_scales=[0.5]", "+tags=[a]", "model.options.Depth=3"]
    files = ["last:5", "runs/lr=0.1/step_00000001.pt", "seed=1", "a+b.mp4"]
    assert split_overrides([*files, *overrides]) == (files, overrides)


def _started(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    # Without PYTHONUNBUFFERED, under which no output is left for the exit.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


_HEAVY = """
import sys
from summit_train.__main__ import main
status = main(sys.argv[1:])
heavy = {"torch", "av", "horovod", "mpi4py", "matplotlib"} & set(sys.modules)
print(status, sorted(heavy), file=sys.stderr)
"""


def test_a_command_imports_no_library_that_it_does_not_need(spec: str) -> None:
    done = _started("-c", _HEAVY, "plan", spec, "--clips", "240000", "--json")
    assert done.stderr in ("0 []\n", "0 ['torch']\n")  # torch counts the network
    assert json.loads(done.stdout)["global_batch"] == 96
    for words, end in ((["schema"], "0 []\n"), (["configs"], "0 []\n"), (["init", "none"], "2 ['av']\n")):
        assert _started("-c", _HEAVY, *words).stderr.endswith(end), words


def test_the_module_runs_as_the_console_script_does(spec: str) -> None:
    done = _started("-m", "summit_train", "plan", spec, "--clips", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"summit-train: data\.train has 1 clip, .*\n", done.stderr)
    assert "summit-train = summit_train.__main__:main" in (ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize("word", ["schema", "--help"])
def test_a_reader_that_left_is_no_error_and_a_full_disk_is_one_line(word: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for stdout, message in ((writer, ""), (full, "summit-train: standard output: No space left on device\n")):
            done = _started("-m", "summit_train", word, stdout=stdout)
            assert (done.returncode, done.stderr) == (1, message)
    finally:
        os.close(writer)
        os.close(full)


def test_names_that_the_terminals_encoding_lacks(tmp_path: Path) -> None:
    for name in ("日本/1.mp4", "b/é.mp4"):
        (tmp_path / "videos" / name).parent.mkdir(parents=True)
        write_video(tmp_path / "videos" / name, np.zeros((2, 64, 64, 3), np.uint8), codec="mpeg4", b_frames=0)
    made = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(tmp_path / "de_DE")]
    if shutil.which("localedef") is None or subprocess.run(made, capture_output=True).returncode:
        pytest.skip("localedef makes no locale here")
    latin = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE"}
    ways = {"utf": {"LC_ALL": "C.UTF-8"}, "ascii": {"PYTHONIOENCODING": "ascii"}, "latin": latin}
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "PYTHONIOENCODING")}
    said = {}
    for way, environ in ways.items():
        words = ["data", "index", "videos", "--workers", "0", "--out", f"{way}/clips.csv"]
        command = [sys.executable, "-m", "summit_train", *words]
        done = subprocess.run(command, cwd=tmp_path, env=outside | environ, capture_output=True)
        assert done.returncode == 0, done.stderr
        said[way] = done.stdout
        for name in ("clips.csv", "classes.txt"):
            assert (tmp_path / way / name).read_bytes() == (tmp_path / "utf" / name).read_bytes()
    assert "日本/1.mp4 = b/é.mp4".encode() in said["utf"]
    assert rb"\u65e5\u672c/1.mp4 = b/\xe9.mp4" in said["ascii"]
    assert rb"\u65e5\u672c/1.mp4 = b/" + "é.mp4".encode("latin-1") in said["latin"]


def test_the_import_loads_no_library() -> None:
    """The first call of `load` does, which is all there is. Python alone may import modules of its own here."""
    program = (
        "import sys; before = set(sys.modules); import summit_train\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))\n"
    )
    done = _started("-c", program)
    assert (done.stdout, done.stderr) == ("['summit_train']\n", "")
    assert summit_train.__all__ == ["load"] and callable(summit_train.load)
