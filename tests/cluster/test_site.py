"""Site profiles: the shipped ones, a person's own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.cluster.site import Site, load_site, load_spec_on, parse_walltime, walltime_text
from summit_train.core.errors import UserError
from summit_train.spec.source import shipped, to_yaml

SITES = (
    "alps", "aurora", "el_capitan", "flux_generic", "frontier", "local", "lsf_generic", "lsf_jsrun", "pbs_generic",
    "perlmutter", "polaris", "slurm_generic", "slurm_v100", "summit",
)  # fmt: skip
MINE = """
name: mine
scheduler: slurm
launcher: srun
gpus_per_node: 8
cores_per_node: 60
"""
GENERIC = shipped("configs/sites") / "slurm_generic.yaml"


def _mine(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE + more)
    return path


def _variables(site: Site) -> dict[str, str]:
    return {name: setting.value for name, setting in site.environment.items()}


def test_the_shipped_sites():
    assert tuple(sorted(path.stem for path in shipped("configs/sites").glob("*.yaml"))) == SITES
    assert [load_site(name).name for name in SITES] == list(SITES)


def test_summit_is_as_its_guide_says():
    site = load_site("summit")
    assert (site.scheduler, site.launcher, site.ranks, site.cores_per_rank) == ("lsf", "jsrun", 6, 7)
    hours = {nodes: (site.walltime_cap(nodes) or 0) / 60 for nodes in (1, 45, 46, 91, 92, 921, 922, 4608)}
    assert hours == {1: 2, 45: 2, 46: 6, 91: 6, 92: 12, 921: 12, 922: 24, 4608: 24}
    with pytest.raises(UserError, match="summit: a job must have at most 4,608 nodes, got 4609"):
        site.walltime_cap(4609)


def test_a_profile_of_ones_own_may_extend_a_shipped_one(tmp_path):
    # YAML 1.1 reads 2:30 as the number 150, which is what 2 h 30 min are in minutes.
    site = load_site(_mine(tmp_path, "default_walltime: 2:30\n"), ["ranks_per_node=4"])
    assert (site.name, site.ranks, site.cores_per_rank, site.default_walltime) == ("mine", 4, 15, 150)
    assert site.walltime_cap(10_000) is None and load_site(_mine(tmp_path)).ranks == 8
    path = tmp_path / "ours.yaml"
    path.write_text(f"name: ours\nextends: {GENERIC}\nqueue: gpu\n")
    site = load_site(path, ["account=abc123", "environment.NCCL_DEBUG.value=INFO"])
    assert (site.queue, site.account, site.launcher) == ("gpu", "abc123", "srun")
    assert _variables(site).items() >= {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}.items()


def test_lists_are_added_to_and_a_replaced_one_is_noted_with_what_is_lost(tmp_path):
    path = tmp_path / "ours.yaml"
    text = f"name: ours\nextends: {GENERIC}\nenvironment: {{A: {{value: b, why: c}}}}\n"
    same = "{option: --mpi=pmix, why: how srun and MPI find each other; both have to be built with PMIx}"
    path.write_text(f"{text}launcher_options:\n  - {same}\n")
    assert load_site(path).notes == ()
    more = "directives:\n  - {option: --constraint=gpu, why: nodes with GPUs}\nnotes: [drained on Tuesdays]\n"
    path.write_text(f"{text}+{more}")
    site = load_site(path, ["+directives=[{option: -v, why: w}]"])
    assert [line.option for line in site.directives] == ["--exclusive", "--mem=0", "--constraint=gpu", "-v"]
    assert site.notes == ("drained on Tuesdays",)
    path.write_text(f"{text}{more}")
    over = f"replaces the list of {GENERIC}:10, and leaves out --exclusive, --mem=0; +directives would add to it"
    assert load_site(path).notes == ("drained on Tuesdays", f"{path}:4: directives: {over}")
    (tmp_path / "above.yaml").write_text("extends: ours.yaml\n+modules: [a]\n")
    site = load_site(tmp_path / "above.yaml")
    assert site.modules == ("a",) and len(site.notes) == 2


def test_a_sites_spec_keys_go_below_those_of_the_users_file(tmp_path):
    site = load_site(_mine(tmp_path, "spec: {precision: bf16, data.workers: 9, data.stage: auto, seed: 3}\n"))
    needed = "name: a\nmodel: {arch: tsm, num_classes: 4}\n"
    (tmp_path / "base.yaml").write_text(f"{needed}data: {{train: t, val: v, workers: 2}}\n")
    (tmp_path / "own.yaml").write_text("extends: base.yaml\n")
    spec, taken = load_spec_on(site, tmp_path / "own.yaml", ["seed=5"])
    assert (spec.precision, spec.data.workers, spec.data.stage, spec.seed) == ("bf16", 2, "auto", 5)
    assert taken == {"precision": "bf16", "data.stage": "auto"}
    assert load_spec_on(site, tmp_path / "own.yaml", [])[1] == taken | {"seed": 3}
    wrong = load_site(_mine(tmp_path, "spec: {evaluate.last_checkpoints: 9}\n"))
    with pytest.raises(UserError, match=r"^mine: spec: evaluate.last_checkpoints: must be at most checkpoint.keep, 5"):
        load_spec_on(wrong, tmp_path / "own.yaml", [])


def test_a_site_that_was_written_down_reads_back(tmp_path):
    """As a sweep keeps it; walltimes need no quotes."""
    caps = "walltime_caps: [{nodes: 4, walltime: 24:00:00}, {nodes: 8, walltime: 1-12:00:00}]\n"
    more = "comm: torch\nspec: {seed: 3}\nnotes: [a]\nrequires: [account]\ndefault_walltime: 2:00:00\n"
    site = load_site(_mine(tmp_path, caps + more))
    assert (site.default_walltime, [cap.walltime for cap in site.walltime_caps]) == (120, [1440, 2160])
    (tmp_path / "saved.yaml").write_text(to_yaml(site.model_dump(mode="json")))
    assert load_site(tmp_path / "saved.yaml") == site
    assert load_site(_mine(tmp_path), ["default_walltime=1:30:00"]).default_walltime == 90


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ("", False),
        ("bind: true", True),
        ("launcher_options: [{option: -v, why: w}]", True),
        ("launcher: mpirun\nbind: true", False),
    ],
)
def test_what_ranks_of_this_machine_do_not_read_is_noted(tmp_path, more, is_noted):
    path = tmp_path / "ours.yaml"
    path.write_text(f"extends: {GENERIC.with_name('local.yaml')}\nname: ours\n{more}\n")
    nothing = "ours: bind and launcher_options do nothing with launcher ranks; set launcher: mpirun to use them"
    assert load_site(path).notes == (nothing,) * is_noted


def test_walltimes_are_hours_and_minutes():
    for text, minutes in (("0:30", 30), ("2:00", 120), ("24:00", 1440), ("100:59", 6059), ("0000:01", 1)):
        assert parse_walltime(text) == parse_walltime(walltime_text(minutes)) == minutes
    for text, minutes in (("11:59:59", 719), ("1-12:00:00", 2160), ("2-00:30", 2910), ("0-1:00:59", 60)):
        assert parse_walltime(text) == minutes
    for wrong in ("2", "2:0", "2:60", "1:00:60", "1:0:00", "-1:00", "1-12", "2h", "", " 2:00", "2:00\n", 60, 1.5, None):
        with pytest.raises(ValueError, match="must be hours and minutes, such as 2:00, or H:MM:SS or D-HH:MM:SS"):
            parse_walltime(wrong)


def test_keys_of_the_site_become_variables_of_the_ranks(tmp_path):
    both = {"SUMMIT_TRAIN_CHECK_NODES": "1", "SUMMIT_TRAIN_EXCLUDE_SLOW": "1"}
    for keys, variables in (
        ([], {}),
        (["comm=torch", "environment={A: {value: b, why: c}}"], {"A": "b", "SUMMIT_TRAIN_COMM": "torch"}),
        (["check_nodes=true"], {"SUMMIT_TRAIN_CHECK_NODES": "1"}),
        (["check_nodes=true", "exclude_slow=true", "spare_nodes=2"], both),
    ):
        assert _variables(load_site(_mine(tmp_path), keys)) == variables


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("zzz: 4\n", "mine.yaml:7: zzz: unknown key; valid: name, scheduler, "),
        ("queu: gpu\n", "mine.yaml:7: queu: unknown key; did you mean queue?"),
        ("directives: [{option: --mail-type=END,FAIL, why: w}]\n",
         "directives.0.FAIL: unknown key; within { } a comma ends a value, so quote one that has a comma: option: "
         '"--mail-type=END,FAIL"'),
        ("directives:\n  - option: --x\n    fail:\n    why: w\n", "fail: unknown key; valid: option, why"),
        ("default_walltime: 60\n", "mine.yaml:7: default_walltime: must be hours and minutes, such as 2:00"),
        ("comm: gloo\n", "mine.yaml:7: comm: 'gloo' is not a choice; valid: horovod, torch, auto"),
        ("launcher: jsrun\n", "the key 'launcher' is given twice"),
        ("+launcher: [jsrun]\n", "the key 'launcher' is given twice"),
        ("requires: [partition]\n", "mine.yaml:7: requires.0: 'partition' is not a choice; valid: account, queue"),
        ("spec:\n  seed: 1\n  precision: bf17\n", "mine.yaml:9: precision: 'bf17' is not a choice; did you mean bf16?"),
        ("spec: {data.stag: auto}\n", "mine.yaml:7: data.stag: unknown key; did you mean stage?"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_has_its_line(tmp_path, more, message):
    """The golden refusals have those of values."""
    with pytest.raises(UserError) as error:
        load_site(_mine(tmp_path, more))
    assert message in str(error.value)
