"""Jobs whose ranks run in an image: the words of each runtime, what cannot be, and a script that runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from summit_train.cluster.job import KEEPER, Job, facts, render
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import write_keeper
from summit_train.core.errors import UserError
from summit_train.core.files import write_json
from tests.standins import Standins
from tests.worlds import PATIENCE_S

BINDS = "container.binds=[/proj, '/nvme/$USER:/fast']"
OPTION = "container.options=[{option: --gpu, why: the node's driver}]"
STAGED = Job("run", (Path("/proj/run"),), 1, 60, Path("/proj"), "/venv/bin/python", stage=(Path("/proj/packed"),))
WORDS = {
    "apptainer": r"""
    apptainer exec --bind /proj:/proj --bind /nvme/"$USER":/fast --gpu '/proj/it'"'"'s $(mine).sif' \
    python -m summit_train train "$run/job/spec.yaml" "data.stage='{staged}'" """,
    "podman_hpc": r"""
    podman-hpc run --rm --net=host --ipc=host --workdir "$PWD" --volume /proj:/proj --volume /nvme/"$USER":/fast \
    --env 'SLURM_*' --env 'FLUX_*' --env 'PBS_*' --env 'LSB_*' --env 'JSM_*' --env 'PALS_*' --env 'PMI*' \
    --env 'OMPI_*' --env 'MASTER_*' --env SUMMIT_TRAIN_FAILURE --env SUMMIT_TRAIN_SECRET --env OMP_NUM_THREADS \
    --env NCCL_DEBUG --gpu '/proj/it'"'"'s $(mine).sif' \
    python -m summit_train train "$run/job/spec.yaml" "data.stage='{staged}'" """,
    "pyxis": r"""
    --container-image='/proj/it'"'"'s $(mine).sif' --container-workdir="$PWD" \
    --container-mounts=/proj:/proj,/nvme/"$USER":/fast --gpu \
    python -m summit_train train "$run/job/spec.yaml" "data.stage='{staged}'" """,
    "edf": r"""
    --environment='/proj/it'"'"'s $(mine).sif' --gpu env --chdir="$PWD" \
    python -m summit_train train "$run/job/spec.yaml" "data.stage='{staged}'" """,
}


def _script(runtime: str, *more: str, site: str = "slurm_generic", job: Job = STAGED) -> str:
    binds = "container.binds=[]" if runtime == "edf" else BINDS
    image = "container.image=/proj/it's $(mine).sif"
    return render(load_site(site, [f"container.runtime={runtime}", image, binds, OPTION, *more]), job)


@pytest.mark.parametrize("runtime", WORDS)
def test_a_container_changes_nothing_but_what_starts_the_program(runtime):
    plain = render(load_site("slurm_generic"), STAGED).split(" -- \\\n")
    *inside, program = _script(runtime).split(" -- \\\n")
    assert "\n# --gpu: the node's driver\n" in inside[0]
    assert [inside[0].replace("# --gpu: the node's driver\n", ""), *inside[1:]] == plain[:-1]
    assert program.replace("\\\n", "").split() == WORDS[runtime].replace("\\\n", "").split()


def test_bash_and_shellcheck_take_the_scripts(tmp_path):
    files = []
    for runtime in WORDS:
        files.append(tmp_path / f"{runtime}.sh")
        files[-1].write_text(_script(runtime))
        assert subprocess.run(["bash", "-n", str(files[-1])], capture_output=True).stderr == b""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--exclude=SC2016", *files], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("runtime", "words", "message"),
    [
        (
            "pyxis",
            ["launcher=mpirun", "launcher_options=[]"],
            "container.runtime: pyxis must be used with launcher srun",
        ),
        ("edf", ["launcher=mpirun", "launcher_options=[]"], "container.runtime: edf must be used with launcher srun"),
        ("edf", ["container.binds=[/proj]"], "container.binds: must be empty with edf; mount the folders in the"),
        (
            "apptainer",
            ["container.binds=[]"],
            "container.binds: must be the folders of runs and data, got none; try binds: [/path/to/project]",
        ),
        ("docker", [], "container.runtime: 'docker' is not a choice"),
        ("apptainer", ["container.binds=[relative]"], "must be an absolute path without spaces"),
        ("apptainer", ["container.python=python; touch x"], "container.python: must be a name or an absolute path"),
        ("apptainer", ["container.options=[{option: '--x $(y)', why: w}]"], "must be an option without quotes"),
    ],
)
def test_containers_that_cannot_be(runtime, words, message):
    with pytest.raises(UserError) as caught:
        _script(runtime, *words)
    assert message in str(caught.value)


_APPTAINER = """#!/bin/sh
echo "$@" >>'{calls}'
while [ "$1" != '{image}' ]; do shift; done
shift 2 # the image and its python
exec '{trainer}' "$@"
"""


def test_a_script_enters_the_image_for_every_rank(tmp_path):
    """A stand-in enters it; bash, the launcher's stand-in and the trainer's are those of the other scripts."""
    standins, run, image = Standins(tmp_path / "standins"), tmp_path / "run", tmp_path / "my image.sif"
    (run / "job").mkdir(parents=True)
    trainer = standins.program("trainer", tmp_path / "trainer")
    calls = tmp_path / "calls"
    apptainer = standins.bin / "apptainer"
    apptainer.write_text(_APPTAINER.format(calls=calls, image=image, trainer=trainer))
    apptainer.chmod(0o755)
    box = ["container.runtime=apptainer", f"container.image={image}", f"container.binds=[{tmp_path}]"]
    box += ["container.python=/opt/venv/bin/python"]
    # The keeper starts by an interpreter that has no summit_train, from one file.
    site = load_site("local", [*box, f"host_python={sys._base_executable}"])  # type: ignore[attr-defined]
    job = Job("run", (run,), 1, 60, tmp_path, "/nowhere/python")
    write_json(run / "job/job.json", asdict(facts(site, job)))
    write_keeper(run / "job" / KEEPER)
    script = render(site, job)
    done = subprocess.run(
        ["bash", "-c", script], env=standins.environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [call["words"] for call in standins.calls("trainer")] == [
        ["-m", "summit_train", "train", f"{run}/job/spec.yaml", "--ranks", "2"]
    ]
    assert calls.read_text() == (
        f"exec --bind {tmp_path}:{tmp_path} {image} /opt/venv/bin/python -m summit_train train {run}/job/spec.yaml "
        "--ranks 2\n"
    )
