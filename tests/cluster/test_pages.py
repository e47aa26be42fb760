"""docs/clusters/*.md against what there is: site profiles and their keys. Commands and links: tests/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticUndefined

from summit_train.cluster.job import Job, render
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.cluster.site import Site, load_site
from summit_train.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/clusters").glob("*.md"))
BLOCKS = [
    (page.stem, language, block)
    for page in PAGES
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
]
PROFILES = [(page, block) for page, language, block in BLOCKS if language == "yaml"]
OURS = next(profile for page, profile in PROFILES if page == "sites")
SITES = (ROOT / "docs/clusters/sites.md").read_text()
MAIL = re.findall(r"(Slurm|LSF|PBS) `(-[^`]*)`", (ROOT / "docs/clusters/submit.md").read_text().split("\n## Mail\n")[1])


@pytest.mark.parametrize(("page", "profile"), PROFILES)
def test_every_profile_is_one(page, profile, tmp_path):
    path = tmp_path / "site.yaml"
    (tmp_path / "ours.yaml").write_text(OURS)
    path.write_text(profile)
    (tmp_path / "ours.sh.j2").touch()
    site = load_site(path)
    assert site.name in ("ours", "ours_by_srun", "ours_debug", "workstation") and site.ranks == 4


@pytest.mark.parametrize(
    ("generic", "overrides", "options"),
    [
        ("slurm_generic", ["gpus_flag=--gres=gpu:{gpus}"],
         ["#SBATCH --gres=gpu:4", "#SBATCH --cpus-per-task=16", "#SBATCH --account=abc123", "#SBATCH --partition=gpu",
          "#SBATCH --exclusive", "#SBATCH --mem=0", "module load cuda"]),
        ("lsf_generic", [], ["#BSUB -P abc123", "#BSUB -q gpu"]),
        ("pbs_generic", ["chunk=ncpus=64:ngpus=4:mem=500gb"],
         ["#PBS -l select=2:ncpus=64:ngpus=4:mem=500gb", "#PBS -A abc123", "#PBS -q gpu"]),
        ("flux_generic", [], ["# flux: --nodes=2", "# flux: --bank=abc123", "# flux: --queue=gpu"]),
    ],
)  # fmt: skip
def test_the_profile_on_the_page_renders_on_each_scheduler(
    generic: str, overrides: list[str], options: list[str], tmp_path: Path
) -> None:
    assert generic in OURS and all(f"`{line.replace('=', ': ', 1)}`" in SITES for line in overrides)
    path = tmp_path / "site.yaml"
    path.write_text(OURS.replace("sites/slurm_generic", f"sites/{generic}"))
    script = render(load_site(path, overrides), Job("t", (tmp_path / "runs/t",), 2, 60))
    assert [option for option in options if f"\n{option}\n" not in script] == []
    assert "\nexport OMP_NUM_THREADS=1 # " in script


def test_a_profile_adds_to_the_lists_of_the_one_that_it_extends(tmp_path: Path) -> None:
    (debug,) = [profile for _, profile in PROFILES if "name: ours_debug" in profile]
    (tmp_path / "ours.yaml").write_text(OURS)
    (tmp_path / "debug.yaml").write_text(debug)
    site = load_site(tmp_path / "debug.yaml")
    assert [line.option for line in site.directives] == ["--exclusive", "--mem=0", "--qos=debug"]
    assert site.spec == {"precision": "bf16", "data.stage": "auto"} and site.notes == ()


@pytest.mark.parametrize(("scheduler", "options"), MAIL)
def test_the_options_for_mail_are_those_of_submit(scheduler: str, options: str) -> None:
    assert SCHEDULERS[scheduler.lower()].mail == options


def test_the_template_on_the_page_makes_a_script(tmp_path: Path) -> None:
    """Beside its profile; what it includes is what ships."""
    (profile,) = [profile for _, profile in PROFILES if "template: " in profile]
    (last,) = [block for _, _, block in BLOCKS if block.startswith("exec {{ keeper }}")]
    shipped = (ROOT / "jobs/slurm_srun.sh.j2").read_text()
    template = shipped[: shipped.index("exec ")] + last
    (tmp_path / "site.yaml").write_text(profile)
    with pytest.raises(UserError, match=r"site.yaml:3: template: must be a file, got .*/ours.sh.j2"):
        load_site(tmp_path / "site.yaml")
    (tmp_path / "ours.sh.j2").write_text(template)
    job = Job("t", (tmp_path / "runs/t",), 2, 60)
    script = render(load_site(tmp_path / "site.yaml"), job)
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=t\n") and "\nexport OMP_NUM_THREADS=1 # " in script
    assert template.replace(" --network=single_node_vni", "") == shipped != template
    assert "srun --nodes={nodes} --nodelist={hosts} --ntasks={ranks} --network=single_node_vni " in script
    assert script.endswith(' --mpi=pmix -- \\\n    "$python" -m summit_train train "$run/job/spec.yaml"\n')
    (tmp_path / "ours.sh.j2").write_text("{{ nobody }}")
    with pytest.raises(UserError, match=r"ours_by_srun: template: .*/ours.sh.j2: 'nobody' is undefined"):
        render(load_site(tmp_path / "site.yaml"), job)


def test_the_table_of_keys_has_every_key_with_its_default():
    found = {}
    table = SITES.split("\n## The keys\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\|`.*", table, re.M):
        names, default = (re.findall(r"`([^`]*)`", part) for part in line.split("|")[1:3])
        found |= {name: yaml.safe_load(default[0]) if default else PydanticUndefined for name in names}
    fields = {name: field.default for name, field in Site.model_fields.items()}
    assert found == {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
