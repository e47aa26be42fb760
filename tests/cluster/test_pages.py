"""docs/clusters/*.md against what there is: site profiles and their keys. Commands and links: tests/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticUndefined

from summit_train.cluster.job import Job, render
from summit_train.cluster.site import Site, load_site

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/clusters").glob("*.md"))
BLOCKS = [
    (page.stem, language, block)
    for page in PAGES
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
]
PROFILES = [(page, block) for page, language, block in BLOCKS if language == "yaml"]


@pytest.mark.parametrize(("page", "profile"), PROFILES)
def test_every_profile_is_one(page: str, profile: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(profile.replace("/path/to/summit_train", str(ROOT)))
    site = load_site(path)
    assert site.name in ("ours", "workstation") and site.ranks == 4


def test_the_whole_profile_on_the_page_renders(tmp_path: Path) -> None:
    (profile,) = (block for page, block in PROFILES if page == "sites")
    path = tmp_path / "site.yaml"
    path.write_text(profile)
    job = Job("t", (tmp_path / "runs/t",), 2, 60)
    script = render(load_site(path), job)
    for option in ("gpus-per-node=4", "cpus-per-task=16", "account=abc123", "partition=gpu", "exclusive", "mem=0"):
        assert f"\n#SBATCH --{option}\n" in script
    assert "\n    --mpi=pmix # " in script and "\nexport OMP_NUM_THREADS=1 # " in script
    gres = "directives=[{option: --gres=gpu:4, why: how this Slurm counts GPUs}]"
    script = render(load_site(path, ["gpus_per_node=0", "ranks_per_node=4", gres]), job)
    assert "\n#SBATCH --gres=gpu:4\n" in script and "--gpus-per-node" not in script
    assert "\n#SBATCH --ntasks-per-node=4\n" in script


def test_the_table_of_keys_has_every_key_with_its_default() -> None:
    found = {}
    for line in re.findall(r"^\| `.*", (ROOT / "docs/clusters/sites.md").read_text(), re.M):
        names, default = (re.findall(r"`([^`]*)`", part) for part in line.split("|")[1:3])
        found |= {name: yaml.safe_load(default[0]) if default else PydanticUndefined for name in names}
    fields = {name: field.default for name, field in Site.model_fields.items()}
    assert found == {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
