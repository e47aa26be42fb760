"""Job scripts: every shipped site against golden files, compared whole, and through bash and shellcheck.

A golden file is a whole script, or a diff that shows what a case changes of another case's script. After a change that
is meant, write the files anew and read the difference:
    python -m tests.cluster.test_job; git diff tests/golden/jobs
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from summit_train.cluster import job as job_module
from summit_train.cluster.job import Job, facts, job_name, render
from summit_train.cluster.site import load_site
from summit_train.core.errors import UserError
from tests.cluster.test_site import SITES

GOLDEN = Path(__file__).resolve().parents[1] / "golden/jobs"
CENTRES = ("alps", "aurora", "el_capitan", "frontier", "perlmutter", "polaris")
BY_MPIRUN = ("launcher=mpirun", "launcher_options=[]")
ONE = Job("tsm_r50_8f", (Path("/proj/runs/tsm_r50_8f"),), 1, 120, Path("/proj/our videos"), "/proj/venv/bin/python")
MANY = replace(ONE, name="O'Neil & sons", runs=(Path("/proj/runs/O'Neil & sons"),), nodes=16, walltime_minutes=33)
STAGED = replace(MANY, stage=(Path("/proj/packed/train"), Path("/proj/packed/val set")))
ARRAY = replace(
    ONE, name="sweep", runs=tuple(Path(f"/proj/runs/lr {lr}") for lr in (0.1, 0.2, 0.4)), nodes=2, at_once=2
)
JOBS = {"one": ONE, "many": MANY, "staged": STAGED, "array": ARRAY}
# The schedulers with every kind of job; the centres, which differ in their options, with one.
GENERIC = ("lsf_generic", "slurm_generic", "slurm_v100", "summit")
CASES = {f"{site}-{what}": (site, (), JOBS[what]) for site in GENERIC for what in JOBS}
ALONE = ("flux_generic", "pbs_generic")  # without arrays
CASES |= {f"{site}-{what}": (site, (), JOBS[what]) for site in ALONE for what in ("one", "many", "staged")}
ACCOUNT = "account=abc123"  # a centre's profile requires it
CASES |= {f"{site}-many": (site, (ACCOUNT,), MANY) for site in CENTRES}
CASES["local-one"] = ("local", (), ONE)  # this machine is one node, has no arrays and no disk of its own to stage to
CASES["local-mpirun-one"] = ("local", ("launcher=mpirun",), ONE)
CASES |= {f"slurm_v100-mpirun-{what}": ("slurm_v100", BY_MPIRUN, JOBS[what]) for what in JOBS}
CASES |= {
    f"pbs_generic-{launcher}-many": ("pbs_generic", (f"launcher={launcher}",), MANY) for launcher in ("pals", "mpirun")
}
STARTED = replace(STAGED, environment=Path("/proj/runs/environments/0123.tar"))
CASES |= {f"{site}-environment": (site, ("stage_environment=true",), STARTED) for site in ("slurm_generic", "summit")}
CASES |= {
    f"{site}-spare": (site, ("spare_nodes=2", "min_nodes=12"), STAGED)
    for site in ("slurm_generic", "pbs_generic", "flux_generic")
}
_BOX = ("container.image=/proj/it's $(mine).sif", "container.options=[{option: --gpu, why: the node's driver}]")
_BINDS = dict.fromkeys(("apptainer", "podman_hpc", "pyxis"), "container.binds=[/proj, '/nvme/$USER:/fast']")
RUNTIMES = _BINDS | {"edf": "container.binds=[]"}
CASES |= {
    f"slurm_generic-{runtime}": ("slurm_generic", (f"container.runtime={runtime}", *_BOX, binds), STAGED)
    for runtime, binds in RUNTIMES.items()
}
KEYS = ("account=abc123", "queue=batch-hm", "modules=[gcc/12, cuda]", "setup=['ulimit -n 4096 # workers']")
OPTIONS = (
    "gpus_flag=--gres=gpu:a100:{gpus}",
    "directives=[{option: '--x=[a|b]&c', why: w}, {option: '-R \"select[mem>1000 && ncpus>2]\"', why: w}]",
    "launcher_options=[{option: --mca pml ^ucx, why: w}, {option: --x=a&b, why: w}]",
)
CASES |= {"slurm_v100-keys": ("slurm_v100", (*KEYS, *OPTIONS), MANY), "summit-keys": ("summit", KEYS, MANY)}
CASES |= {f"{site}-uncapped": (site, (), replace(ARRAY, at_once=None)) for site in ("slurm_generic", "summit")}

# Kept whole: a script of each kind of site. The others are kept as diffs.
WHOLE = ("local-one", *(f"{site}-many" for site in (*ALONE, "lsf_generic", "slurm_generic", "summit")))
# Another launcher, and a centre's site: what they are most like.
LIKE = {f"{site}-many": "slurm_generic-many" for site in ("alps", "frontier", "perlmutter", "slurm_v100")}
LIKE |= {f"pbs_generic-{launcher}-many": "pbs_generic-many" for launcher in ("mpirun", "pals")}
LIKE |= {f"{site}-many": "pbs_generic-pals-many" for site in ("aurora", "polaris")}
LIKE |= {"el_capitan-many": "flux_generic-many", "slurm_v100-mpirun-many": "slurm_v100-many"}
LIKE |= {"local-mpirun-one": "local-one"}
LIKE |= {f"{site}-uncapped": f"{site}-array" for site in ("slurm_generic", "summit")}


def _base(case: str) -> str:
    """Return the case whose script the golden file of another one is a diff against."""
    site, _, what = case.rpartition("-")
    return LIKE.get(case) or f"{site}-{'staged' if what in ('environment', 'spare', *RUNTIMES) else 'many'}"


def script(case: str) -> str:
    """Return a case's job script."""
    site, overrides, job = CASES[case]
    return render(load_site(site, overrides), job)


def _golden(case: str) -> tuple[str, str]:
    """Return the name of a case's golden file, and what must be in it."""
    if case in WHOLE:
        return f"{case}.sh", script(case)
    base = _base(case)
    difference = difflib.unified_diff(script(base).split("\n"), script(case).split("\n"), base, case, n=0, lineterm="")
    return f"{case}.diff", "\n".join(difference) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_the_golden_file(case):
    name, text = _golden(case)
    assert text == (GOLDEN / name).read_text()


def test_there_is_a_golden_file_of_each_case_and_no_other():
    assert {path.name for path in GOLDEN.iterdir()} == {_golden(case)[0] for case in CASES}


# Every launcher, and every kind of job that has commands of its own. The others differ from them in values.
COMMANDS = [case for case in CASES if case.rpartition("-")[2] in ("array", "environment", "keys", "spare", *RUNTIMES)]
COMMANDS += ["local-mpirun-one", "local-one", "pbs_generic-mpirun-many", "pbs_generic-pals-many"]


@pytest.mark.parametrize(
    "cases", [COMMANDS, pytest.param(list(CASES), marks=pytest.mark.nightly)], ids=["commands", "all"]
)
def test_bash_and_shellcheck_take_the_scripts(tmp_path, cases):
    files = [tmp_path / f"{case}.sh" for case in cases]
    for file in files:
        file.write_text(script(file.stem))
        done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), file
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # SC2016: $ in single quotes is quoting of ours.
    done = subprocess.run([shellcheck, "--exclude=SC2016", *files], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


def test_every_option_of_summits_script_is_explained():
    """In papers/summit.md, and those of the launcher above its line in the script too."""
    page = (Path(__file__).resolve().parents[2] / "papers/summit.md").read_text()
    rows = re.findall(r"^\| (`-.*?) \|", page, re.M)
    explained = {option for row in rows for option in re.findall(r"`([^`]+)`", row)}
    text = script("summit-staged")
    launch = re.findall(r" (-\S+)", text[text.index("    jsrun ") : text.rindex(" -- ")])
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#BSUB ")] + launch
    assert len(options) == 16
    assert set(options) <= explained
    reasons = {
        option
        for line in text.splitlines()
        for option in line.partition(": ")[0].removeprefix("# ").split(", ")
        if line.startswith("# -")
    }
    assert {*launch} <= reasons
    assert all("#" in line for line in text.splitlines() if line.startswith("export "))


def test_a_script_fits_on_a_screen():
    """Without what a site's profile adds: its directives, modules, set-up and environment, a line of reason each."""
    for case in CASES:
        name, overrides, _ = CASES[case]
        site = load_site(name, overrides)
        own = 2 * len(site.directives) + len(site.modules) + len(site.setup) + len(site.environment)
        own += len(site.launcher_options)
        assert len(script(case).splitlines()) - own <= 45, case


def test_a_name_for_the_scheduler_has_no_character_that_it_would_read():
    names = {"tsm_r50-8f.v2": "tsm_r50-8f.v2", "a b; $(touch x) \"'": "a_b_touch_x_", "--wrap=id": "wrap_id"}
    names |= {"a%j%%J": "a_j_J", "a\n#SBATCH --uid=0": "a_SBATCH_--uid_0", "Größe": "Gr_e", "視頻": "_"}
    names |= {"...": "run", "n" * 200: "n" * 64}
    assert {name: job_name(name) for name in names} == names


@pytest.mark.parametrize("name", ["a\n#BSUB -P other\nb", "a\r#SBATCH --uid=0", "\t", "\x1b[2J"])
@pytest.mark.parametrize("site", ["summit", "slurm_generic"])
def test_no_line_of_the_users_stands_in_a_script(site, name):
    """LSF reads a line that begins with #BSUB wherever it stands, within quotes too."""
    hostile = replace(ONE, name=name, runs=(Path("/runs") / name,), workdir=Path("/w") / name)
    plain, script = (render(load_site(site), job) for job in (ONE, hostile))
    assert len(script.split("\n")) == len(plain.split("\n"))
    assert len(script.splitlines()) == len(plain.splitlines())


@pytest.mark.parametrize("text", ["a\nb", "it's\ta \\ and a $(b) `c`", "\x01\x7f", "ä\n視", "\udcff\n", "-n\r", " \n "])
def test_what_is_not_printable_reads_back_as_it_was(text):
    raw = text.encode("utf-8", "surrogateescape")
    program = f"printf %s {job_module._quote(text)}".encode("utf-8", "surrogateescape")
    assert subprocess.run(["bash", "-c", program], capture_output=True).stdout == raw


def test_jobs_that_cannot_be():
    site = load_site("local")
    with pytest.raises(UserError, match="local has no disk to stage to; set node_local in the profile"):
        render(site, STAGED)
    for name in ("local", *ALONE):
        with pytest.raises(UserError, match=f"{name}: has no job arrays"):
            render(load_site(name), ARRAY)


def test_a_smaller_job_than_the_profile_asks_for_keeps_all_of_its_nodes():
    assert [facts(load_site("slurm_generic", [f"min_nodes={n}"]), MANY).min_nodes for n in (15, 16, 17)] == [15, 16, 16]


@pytest.mark.parametrize(
    "key, stays", [("restarts=5", False), ("min_nodes=16", False), ("min_nodes=15", True), ("spare_nodes=1", True)]
)
def test_a_scheduler_is_asked_to_keep_a_job_without_a_node_where_it_can_go_on(key, stays):
    slurm, pbs = (render(load_site(name, [key]), MANY) for name in ("slurm_generic", "pbs_generic"))
    assert ("\n#SBATCH --no-kill\n" in slurm) == ("\n#PBS -W tolerate_node_failures=all\n" in pbs) == stays


def test_a_job_without_a_key_that_its_site_requires_is_refused():
    site = load_site("slurm_generic", ["requires=[queue, account]", "queue=gpu"])
    with pytest.raises(UserError, match=r"a job must have account; give --set account=\.\.\., or write it"):
        render(site, ONE)
    assert render(site.model_copy(update={"account": "a1"}), ONE)


def test_a_secret_is_handed_to_ranks_of_torch():
    """mpirun and podman-hpc must be told, by its name alone; the job keeper makes it."""
    box = "container={runtime: podman_hpc, image: i, binds: [/p]}"
    for site, keys, word in (
        ("slurm_v100", ("comm=auto", *BY_MPIRUN), " -x PATH -x SUMMIT_TRAIN_SECRET "),  # torch where Horovod is missing
        ("slurm_generic", ("comm=torch", box), " --env SUMMIT_TRAIN_SECRET "),
    ):
        profile = load_site(site, keys)
        assert render(profile, ONE).count("SECRET") == render(profile, ONE).count(word) == 1
        assert facts(profile, ONE).has_secret
    horovod = load_site("slurm_v100", ("comm=horovod", *BY_MPIRUN))
    assert "SECRET" not in render(horovod, ONE) and not facts(horovod, ONE).has_secret


@pytest.mark.parametrize("comm", ["horovod", "torch"])
@pytest.mark.parametrize("site", SITES)
def test_a_back_end_that_is_named_reaches_all_ranks(site, comm):
    """srun and jsrun hand on the script's environment; mpirun has to be told."""
    named, plain = (load_site(site, [f"comm={name}", ACCOUNT]) for name in (comm, "auto"))
    script = render(named, ONE)
    assert f"\nexport SUMMIT_TRAIN_COMM={comm} # comm: {comm} in the site profile\n" in script
    assert (" -x SUMMIT_TRAIN_COMM -- " in script) == (" -x PATH " in script) == (named.launcher == "mpirun")
    assert "SUMMIT_TRAIN_COMM" not in render(plain, ONE)


if __name__ == "__main__":
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, text in map(_golden, CASES):
        (GOLDEN / name).write_text(text)
