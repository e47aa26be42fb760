"""The environment as one file: what it holds, that it runs elsewhere without the original, and jobs that copy it.

The environment is a small one: a venv of this Python, a package, and this checkout as an editable install.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest

from summit_train.cluster import submit
from summit_train.cluster.environment import environment_files, environment_key, pack
from summit_train.cluster.job import KEEPER, Job, facts, render
from summit_train.cluster.site import load_site
from summit_train.core.errors import UserError
from summit_train.core.files import write_json
from summit_train.spec import load_spec
from tests.slow_files import SlowFiles
from tests.worlds import PATIENCE_S, ROOT, environment

# Says at the end of its process where everything came from; a .pth file imports it, as the last of all.
SPY = """
import atexit, json, os, sys
@atexit.register
def note():
    if sys.argv[0].endswith("keeper.py"):
        return # the job keeper, which runs by the original
    files = [module.__spec__.origin for module in sys.modules.values() if getattr(module, "__spec__", None)]
    stale = [m.__spec__.cached for m in sys.modules.values()
             if getattr(m, "__spec__", None) and m.__spec__.cached and not os.path.exists(m.__spec__.cached)]
    with open("/proc/self/maps") as maps:
        files += {line.split(maxsplit=5)[5].strip() for line in maps if "python" in line}
    with open(os.environ["SPY"], "a") as file:
        file.write(json.dumps({"prefix": sys.prefix, "files": files, "stale": stale, "path": sys.path}) + "\\n")
"""
PACK = """
import sys; from pathlib import Path; from summit_train.cluster.environment import *
files = environment_files()
print(environment_key(files), pack(files, Path(sys.argv[1]), lambda done, total: None))
"""
Names = dict[str, tarfile.TarInfo]


class Tiny:
    """The small environment, packed."""

    def __init__(self, folder: Path) -> None:
        self.prefix, self.file = folder / "a venv", folder / "environment.tar"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.prefix], check=True)
        self.python = self.prefix / "bin/python"
        self.site = next(self.prefix.glob("lib/python*/site-packages"))
        texts = {
            "spy.py": SPY, "spy.pth": "import spy\n", "__editable__.summit_train-0.pth": f"{ROOT}\n",
            "tiny/__init__.py": "VALUE = 1\n", "tiny/old.py": "print 1\n", "tiny/lib.a": "", "tiny/tests/test.py": "",
            "pip-1.dist-info/METADATA": "Name: pip\nVersion: 1\n",
            "pip-1.dist-info/RECORD": "pip.py,,\n", "pip.py": "",
        }  # fmt: skip
        for name, text in texts.items():
            (self.site / name).parent.mkdir(parents=True, exist_ok=True)
            (self.site / name).write_text(text)
        for name in ("numpy", "numpy.libs"):  # the one library that `--version` needs
            (self.site / name).symlink_to(Path(numpy.__file__).parents[1] / name)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "far.py").write_text("")
        (self.site / "near.py").symlink_to("tiny/__init__.py")
        (self.site / "elsewhere").symlink_to(elsewhere)
        (elsewhere / "round").symlink_to(folder)  # follow it, and it never ends
        py_compile.compile(str(self.site / "tiny/__init__.py"))
        self.key, self.number = self.pack(self.file)

    def pack(self, out: Path) -> tuple[str, int]:
        words = [self.python, "-c", PACK, out]
        environ = _clean(SPY=os.devnull)
        key, number = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout.split()
        return key, int(number)


def _clean(**more: str) -> dict[str, str]:
    """Without folders of this checkout, in which a shell would look for its programs, and Python for modules.

    Without a language: argparse looks for the translation of each message below Debian's /usr.
    """
    values = environment(**more) | {"PATH": os.defpath}
    return {name: value for name, value in values.items() if not name.startswith(("PYTHONPATH", "LANG", "LC_"))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def names(tiny: Tiny) -> Names:
    with tarfile.open(tiny.file) as tar:
        return {member.name: member for member in tar}


def test_it_holds_what_a_rank_needs_and_not_the_rest(tiny, names):
    site, version = str(tiny.site.relative_to(tiny.prefix)), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    tag = sys.implementation.cache_tag
    kept = ("tiny/old.py", f"tiny/__pycache__/__init__.{tag}.pyc", "elsewhere/far.py", "summit_train/cluster/job.py")
    kept += (
        "summit_train/configs/sites/local.yaml",
        "summit_train/jobs/slurm_srun.sh.j2",
        "summit_train/models/fast/native/kernels.cpp",
        "numpy/__init__.py",
    )
    gone = ("tiny/lib.a", "numpy/lib/tests/test_io.py", "pip.py", f"tiny/__pycache__/old.{tag}.pyc", "elsewhere/round")
    gone += ("__editable__.summit_train-0.pth",)
    assert {f"{site}/{name}" for name in kept} <= set(names) and not {f"{site}/{name}" for name in gone} & set(names)
    assert {f"base/lib/{version}/os.py", f"base/lib/{version}/__pycache__/os.{tag}.pyc", "bin/python"} <= set(names)
    assert f"{site}/tiny/tests/test.py" in names and f"base/lib/{version}/test/__init__.py" not in names
    assert (names[f"{site}/near.py"].linkname, names["bin/python"].linkname[:12]) == (
        "tiny/__init__.py",
        "../base/bin/",
    )
    *_, last = names
    assert last == "SHA256SUMS" and tiny.number == sum(not name.endswith(".pyc") for name in names) - 1


@pytest.mark.parametrize(("cached", "source", "value"), [(1, 2, 2), (1, 1, 1), (None, 3, 3)])
def test_bytecode_is_that_of_the_cache_where_it_is_up_to_date(tmp_path, cached, source, value):
    """The cache is of a module that says so itself. What is unpacked is loaded whatever the source there is."""
    module, text = tmp_path / "a/m.py", "VALUE = {}\n"
    module.parent.mkdir()
    module.write_text(text.format(cached or source))
    if cached:
        kept = Path(py_compile.compile(str(module)) or "")
        kept.write_bytes(
            kept.read_bytes()[:16] + marshal.dumps(compile(f"FROM, VALUE = 'cache', {cached}", "m", "exec"))
        )
    if cached != source:
        module.write_text(text.format(f"{source}  # it is longer"))
    pack({"lib/python3/m.py": module}, tmp_path / "m.tar", lambda done, total: None)
    subprocess.run(["tar", "-xf", "m.tar"], cwd=tmp_path, check=True)
    unpacked = tmp_path / "lib/python3"
    code = next(unpacked.glob("__pycache__/*")).read_bytes()
    assert code[:8] == importlib.util.MAGIC_NUMBER + b"\1\0\0\0"
    assert code[8:16] == importlib.util.source_hash(module.read_bytes())
    (unpacked / "m.py").write_text("VALUE = 4\n")
    words = [sys.executable, "-c", "import m; print(m.VALUE, getattr(m, 'FROM', 'source'))"]
    said = subprocess.run(words, cwd=unpacked, capture_output=True, text=True).stdout.split()
    assert said == [str(value), "cache" if cached == source else "source"]


def test_the_same_files_make_the_same_bytes_and_a_change_another_name(tiny, tmp_path):
    again, file = tmp_path / "again.tar", tiny.site / "tiny/__init__.py"
    assert tiny.pack(again) == (tiny.key, tiny.number)
    assert again.read_bytes() == tiny.file.read_bytes()
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    try:
        assert tiny.pack(again)[0] != tiny.key
    finally:
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_the_systems_own_python_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(UserError, match=f"must be a virtual one or conda's, got {sys.base_prefix}; make one by"):
        environment_files()


# Jobs.


def _run(
    tiny: Tiny, folder: Path, *keys: str, file: Path | None = None, **environ: str
) -> tuple[str, list[dict[str, Any]]]:
    """Run a job of this machine whose ranks say their version; its output, and what the spy noted of each."""
    disk, run, spy = folder / "disk", folder / "run", folder / "spy"
    disk.mkdir(parents=True)
    (run / "job").mkdir(parents=True)
    spy.write_text("")
    file = file or tiny.file
    site = load_site("local", [f"node_local={disk}", f"stage_environment={file}", *keys])
    more = {"environment": file, "command": ("--version",)}
    job = Job("run", (run,), 1, 60, folder, str(tiny.python), **more)  # type: ignore[arg-type]
    write_json(run / "job/job.json", asdict(facts(site, job)))
    words, environ = ["bash", "-c", render(site, job)], _clean(SPY=str(spy), PYTHONDONTWRITEBYTECODE="1") | environ
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.count("summit-train ") == 1, done.stdout + done.stderr
    assert not any(disk.iterdir())
    return done.stdout + done.stderr, [json.loads(line) for line in spy.read_text().splitlines()]


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
def test_ranks_start_from_the_copy_and_leave_the_original_alone(tiny, tmp_path):
    """A few hundred calls are those of the script, which looks for its programs, and of the job keeper."""
    calls, keys = {}, {"copy": [], "shared": ["node_local=/nowhere"]}
    for name in keys:
        slow = SlowFiles(tmp_path, (str(tiny.prefix), sys.base_prefix, str(ROOT)))
        output, (noted,) = _run(tiny, tmp_path / name, *keys[name], **slow.environ)
        calls[name] = slow.calls
        is_shared = name == "shared"
        assert ("/nowhere" in output, noted["prefix"] == str(tiny.prefix)) == (is_shared, is_shared)
        if name == "copy":
            copy = str(tmp_path / "copy/disk/summit_train_environment_local-")
            files = [str(file) for file in noted["files"] if file not in ("built-in", "frozen")]
            assert len(files) > 50 and all(file.startswith(copy) for file in files)
            assert noted["stale"] == [] and noted["path"].index(str(tmp_path / "copy")) == len(noted["path"]) - 1
    assert calls["copy"] < 700 and calls["shared"] > calls["copy"] + 500, calls


@pytest.mark.parametrize("what", ["a bit of a file", "a bit of a name", "the end"])
def test_a_damaged_file_is_not_used(tiny, names, tmp_path, what):
    content = bytearray(tiny.file.read_bytes())
    if what == "the end":
        del content[names["SHA256SUMS"].offset :]
    elif what == "a bit of a name":
        content[next(iter(names.values())).offset] ^= 1
    else:
        content[next(member.offset_data for name, member in names.items() if name.endswith("/os.py"))] ^= 1
    file = tmp_path / "damaged.tar"
    file.write_bytes(content)
    output, (noted,) = _run(tiny, tmp_path, file=file)
    assert output.count("warning: ") == 1 and noted["prefix"] == str(tiny.prefix)
    assert f"{file} is not on every node's {tmp_path}/disk; the ranks start from the shared environment" in output
    assert what != "a bit of a file" or "/os.py: FAILED\n" in output


@pytest.mark.parametrize("keys", [("setup=[ulimit -f 64]",), ("node_local=/nowhere",)])
def test_a_disk_that_cannot_take_it_is_not_used(tiny, tmp_path, keys):
    """A limit of 64 KiB for each file ends as a full disk does."""
    output, (noted,) = _run(tiny, tmp_path, *keys)
    assert output.count("warning: ") == 1 and noted["prefix"] == str(tiny.prefix)


def test_a_signal_during_the_copying_ends_the_job(tiny, tmp_path):
    keys = [f"node_local={tmp_path}", f"stage_environment={tiny.file}"]
    job = Job("run", (tmp_path / "run",), 1, 60, tmp_path, str(tiny.python), environment=tiny.file)
    site = load_site("local", keys)
    write_json(tmp_path / "run/job/job.json", asdict(facts(site, job)))
    (tmp_path / "bin").mkdir()
    bash = tmp_path / "bin/bash"  # of each node
    bash.write_text("#!/bin/sh\nkill -USR2 $PPID\nsleep 0.1\n")
    bash.chmod(0o755)
    environ = _clean() | {"PATH": f"{bash.parent}:{os.defpath}"}
    words = ["/bin/bash", "-c", render(site, job)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "stopped at step 0 without a new step" in done.stdout, done


ENTER = """#!/bin/sh
echo "$@" >'{calls}'
until [ -f "$1" ]; do shift; done
shift 2 # the image and its python
exec '{trainer}' "$@"
"""


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_script_enters_the_image_or_its_copy_for_every_rank(standins, tmp_path, is_copied):
    """The job keeper starts by an interpreter that has no summit_train, from one file."""
    run, image, disk = tmp_path / "run", tmp_path / "my image.sif", tmp_path / "disk"
    (run / "job").mkdir(parents=True)
    disk.mkdir()
    image.write_text("an image")
    trainer = standins.program("trainer", tmp_path / "trainer")
    apptainer = standins.bin / "apptainer"
    apptainer.write_text(ENTER.format(calls=tmp_path / "calls", trainer=trainer))
    apptainer.chmod(0o755)
    box = f"container={{runtime: apptainer, image: {image}, binds: [{tmp_path}], python: /opt/venv/bin/python}}"
    host = f"host_python={sys._base_executable}"  # type: ignore[attr-defined]
    site = load_site("local", [box, host, f"node_local={disk}", f"stage_environment={is_copied}"])
    environment = submit.staged_environment(site, tmp_path)
    assert environment == (image if is_copied else None)
    job = Job("run", (run,), 1, 60, tmp_path, "/nowhere/python", environment=environment)
    write_json(run / "job/job.json", asdict(facts(site, job)))
    submit.write_keeper(run / "job" / KEEPER)
    words = ["bash", "-c", render(site, job)]
    done = subprocess.run(words, env=standins.environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (call,) = standins.calls("trainer")
    assert call["words"] == ["-m", "summit_train", "train", f"{run}/job/spec.yaml", "--ranks", "2"]
    entered = f"{disk}/summit_train_environment_local-\\d+/copy" if is_copied else re.escape(str(image))
    program = f"/opt/venv/bin/python -m summit_train train {run}/job/spec.yaml --ranks 2\n"
    line = (tmp_path / "calls").read_text()
    assert re.fullmatch(f"exec --bind {tmp_path}:{tmp_path} {entered} {program}", line), line


def test_an_image_that_is_missing_is_named(tmp_path):
    box = f"container={{runtime: apptainer, image: {tmp_path}/i.sif, binds: [/p]}}"
    site = load_site("local", [box, "node_local=/tmp", "stage_environment=true"])
    with pytest.raises(UserError, match=r"local: container.image: must be a file, to be copied to the nodes, got"):
        submit.staged_environment(site, tmp_path)


def test_submit_packs_it_once(monkeypatch, write_spec, tmp_path):
    """Below run_dir, under a name that changes with the environment; a file that the site names is taken as it is."""
    files = {"a": b"1"}
    monkeypatch.setattr(submit, "environment_files", lambda: files)
    spec, site = load_spec(write_spec("one")), load_site("slurm_generic", ["stage_environment=true"])
    for _ in range(2):
        file = submit.staged_environment(site, tmp_path / "runs")
        assert file == tmp_path / f"runs/environments/{environment_key(files)}.tar"
        submit.write_job(site, Job("one", (spec.run_path,), 2, 60, environment=file), "", [spec])
        with tarfile.open(file) as tar:
            assert tar.getnames() == ["a", "SHA256SUMS"]
        assert (first := file.stat().st_ino) == file.stat().st_ino
        files["a"] = files["a"]
    files["a"] = b"2"
    assert submit.staged_environment(site, tmp_path / "runs") != file and file.stat().st_ino == first
    named = load_site("slurm_generic", [f"stage_environment={file}"])
    assert submit.staged_environment(named, tmp_path) == file
    assert submit.staged_environment(load_site("slurm_generic"), tmp_path) is None


def test_submit_names_it(monkeypatch, write_spec, say, tmp_path):
    """The golden scripts have its lines."""
    monkeypatch.setattr(submit, "environment_files", lambda: {"a": b"1"})
    file = f"{tmp_path}/runs/environments/{environment_key({'a': b'1'})}.tar"
    words = ("--site", "slurm_generic", "--set", "stage_environment=true", "--nodes", "1", "--set", "ranks_per_node=2")
    status, _, err = say("submit", write_spec("one"), *words, "--dry-run")
    assert status == 0 and f"environment  {file} to /tmp\n" in err and not Path(file).exists()


@pytest.mark.nightly
def test_a_real_slurm_brings_it_to_both_nodes(slurm, tiny, tmp_path):
    """By sbcast; the nodes share one disk, so the second finds the first one's copy."""
    disk, run, spy = tmp_path / "disk", tmp_path / "run", tmp_path / "spy"
    disk.mkdir()
    (run / "job").mkdir(parents=True)
    keys = ["gpus_per_node=0", "ranks_per_node=1", "cores_per_node=1", "bind=false", "directives=[]", "comm=torch"]
    keys += [
        "launcher_options=[]",
        "setup=[unset PYTHONPATH]",
        f"environment={{SPY: {{value: {spy}, why: w}}}}",
        f"node_local={disk}",
    ]
    site = load_site("slurm_generic", [*keys, f"stage_environment={tiny.file}"])
    more = {"environment": tiny.file, "command": ("--version",)}
    job = Job("run", (run,), 2, 30, tmp_path, str(tiny.python), **more)  # type: ignore[arg-type]
    script = submit.write_job(site, job, render(site, job))
    number = slurm.run("sbatch", "--parsable", f"--chdir={run}/job", str(script)).strip()
    slurm.wait(number, "COMPLETED")
    output = (run / f"job/{number}.out").read_text()
    assert output.count("summit-train ") == 2 and "warning" not in output and "sbcast" not in output, output
    prefixes = [json.loads(line)["prefix"] for line in spy.read_text().splitlines()]
    copy = f"{disk}/summit_train_environment_{number}/copy"  # after each node was asked by the shared one
    assert prefixes == [str(tiny.prefix)] * 2 + [copy] * 2 and not any(disk.iterdir())
