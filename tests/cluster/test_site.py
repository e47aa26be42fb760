"""Site profiles: the shipped ones, a person's own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.cluster.site import load_site, load_spec_on, parse_walltime, walltime_text
from summit_train.core.errors import UserError
from summit_train.spec.source import shipped, to_yaml

SITES = (
    "alps", "aurora", "el_capitan", "flux_generic", "frontier", "local", "lsf_generic", "pbs_generic", "perlmutter",
    "polaris", "slurm_generic", "slurm_v100", "summit",
)  # fmt: skip
MINE = """
name: mine
scheduler: slurm
launcher: srun
gpus_per_node: 8
cores_per_node: 60
"""


def _mine(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE + more)
    return path


def test_the_shipped_sites() -> None:
    assert tuple(sorted(path.stem for path in shipped("configs/sites").glob("*.yaml"))) == SITES
    assert [load_site(name).name for name in SITES] == list(SITES)


def test_summit_is_as_its_guide_says() -> None:
    site = load_site("summit")
    assert (site.scheduler, site.launcher, site.ranks, site.cores_per_rank) == ("lsf", "jsrun", 6, 7)
    hours = {nodes: (site.walltime_cap(nodes) or 0) / 60 for nodes in (1, 45, 46, 91, 92, 921, 922, 4608)}
    assert hours == {1: 2, 45: 2, 46: 6, 91: 6, 92: 12, 921: 12, 922: 24, 4608: 24}
    with pytest.raises(UserError, match="summit: a job must have at most 4,608 nodes, got 4609"):
        site.walltime_cap(4609)


def test_a_profile_of_ones_own_may_extend_a_shipped_one(tmp_path: Path) -> None:
    # YAML 1.1 reads 2:30 as the number 150, which is what 2 h 30 min are in minutes.
    site = load_site(_mine(tmp_path, "default_walltime: 2:30\n"))
    assert (site.name, site.ranks, site.cores_per_rank, site.default_walltime) == ("mine", 8, 7, 150)
    assert site.walltime_cap(10_000) is None
    path = tmp_path / "ours.yaml"
    path.write_text(f"name: ours\nextends: {shipped('configs/sites')}/slurm_generic.yaml\nqueue: gpu\n")
    site = load_site(path, ["account=abc123", "environment.NCCL_DEBUG.value=INFO"])
    assert (site.queue, site.account, site.launcher) == ("gpu", "abc123", "srun")
    values = [site.environment[name].value for name in ("NCCL_DEBUG", "OMP_NUM_THREADS")]
    assert values == ["INFO", "1"]


def test_keys_that_do_not_fit_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mine: launcher: must be srun or mpirun with slurm, got jsrun"):
        load_site(_mine(tmp_path), ["launcher=jsrun"])
    with pytest.raises(UserError, match="mine: ranks_per_node: must be given where gpus_per_node is 0"):
        load_site(_mine(tmp_path), ["gpus_per_node=0"])
    assert load_site(_mine(tmp_path), ["gpus_per_node=0", "ranks_per_node=2"]).ranks == 2
    for key, idle in (("spare_nodes", "0"), ("min_nodes", "null")):
        with pytest.raises(UserError, match=f"summit: {key}: must be {idle} with jsrun on lsf"):
            load_site("summit", [f"{key}=1"])
    with pytest.raises(UserError, match="mine: exclude_slow: must be false without spare_nodes; set spare_nodes to 1"):
        load_site(_mine(tmp_path), ["exclude_slow=true"])
    with pytest.raises(UserError, match="scheduler: must be one of slurm, lsf, pbs, flux, local, got 'pbz'"):
        load_site(_mine(tmp_path), ["scheduler=pbz"])
    with pytest.raises(UserError, match="summit: gpus_flag: must be null, as lsf has one way to ask for GPUs"):
        load_site("summit", ["gpus_flag=--gres=gpu:{gpus}"])


def test_lists_are_added_to_and_a_replaced_one_is_said_with_what_is_lost(tmp_path: Path) -> None:
    path, generic = tmp_path / "ours.yaml", shipped("configs/sites") / "slurm_generic.yaml"
    text = f"name: ours\nextends: {generic}\nenvironment: {{A: {{value: b, why: c}}}}\nlauncher_options:\n  - "
    path.write_text(
        text + "{option: --mpi=pmix, why: how srun and MPI find each other; both have to be built with PMIx}"
    )
    assert load_site(path).notes == ()
    more = "directives:\n  - {option: --constraint=gpu, why: nodes with GPUs}\nnotes: [drained on Tuesdays]\n"
    path.write_text(f"{text.rpartition('launcher')[0]}+{more}")
    site = load_site(path)
    assert [line.option for line in site.directives] == ["--exclusive", "--mem=0", "--constraint=gpu"]
    assert site.notes == ("drained on Tuesdays",)
    assert [line.option for line in load_site(path, ["+directives=[{option: -v, why: w}]"]).directives][2:] == [
        "--constraint=gpu",
        "-v",
    ]
    with pytest.raises(UserError, match=r"override '\+queue=\[a\]': .* must be a list that is added to a list"):
        load_site(path, ["queue=gpu", "+queue=[a]"])
    path.write_text(f"{text.rpartition('launcher')[0]}{more}")
    over = f"replaces the list of {generic}:10, and leaves out --exclusive, --mem=0; +directives would add to it"
    assert load_site(path).notes == ("drained on Tuesdays", f"{path}:4: directives: {over}")
    (tmp_path / "above.yaml").write_text("extends: ours.yaml\n+modules: [a]\n")
    site = load_site(tmp_path / "above.yaml")
    assert site.modules == ("a",) and len(site.notes) == 2


def test_a_site_has_words_for_the_spec_below_those_of_the_users_file(tmp_path: Path) -> None:
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


def test_a_site_that_was_written_down_reads_back(tmp_path: Path) -> None:
    """As a sweep keeps it: with the variable that `comm` sets, and with what it said of its lists."""
    site = load_site(_mine(tmp_path, "comm: torch\nspec: {seed: 3}\nnotes: [a]\nrequires: [account]\n"))
    (tmp_path / "saved.yaml").write_text(to_yaml(site.model_dump(mode="json")))
    assert load_site(tmp_path / "saved.yaml") == site


def test_what_ranks_of_this_machine_do_not_read_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    for more in ("", "bind: true", "launcher_options: [{option: -v, why: w}]", "launcher: mpirun\nbind: true"):
        (tmp_path / "ours.yaml").write_text(f"extends: {shipped('configs/sites') / 'local.yaml'}\nname: ours\n{more}\n")
        said += load_site(tmp_path / "ours.yaml").notes
    nothing = "ours: bind and launcher_options do nothing with launcher ranks; set launcher: mpirun to use them"
    assert said == [nothing, nothing]


def test_walltimes_are_hours_and_minutes() -> None:
    for text, minutes in (("0:30", 30), ("2:00", 120), ("24:00", 1440), ("100:59", 6059), ("0000:01", 1)):
        assert parse_walltime(text) == parse_walltime(walltime_text(minutes)) == minutes
    for text, minutes in (
        ("24:00:00", 1440), ("1:30:00", 90), ("11:59:59", 719), ("1-12:00:00", 2160), ("2-00:30", 2910),
        ("0-1:00:59", 60),
    ):  # fmt: skip
        assert parse_walltime(text) == minutes
    for wrong in ("2", "2:0", "2:60", "1:00:60", "1:0:00", "-1:00", "1-12", "2h", "", " 2:00", "2:00\n", 60, 1.5, None):
        with pytest.raises(ValueError, match="must be hours and minutes, such as 2:00, or H:MM:SS or D-HH:MM:SS"):
            parse_walltime(wrong)


def test_a_walltime_needs_no_quotes_and_reads_back_as_it_is_written(tmp_path: Path) -> None:
    caps = "[{nodes: 4, walltime: 24:00:00}, {nodes: 8, walltime: 1-12:00:00}]"
    site = load_site(_mine(tmp_path, f"default_walltime: 2:00:00\nwalltime_caps: {caps}\n"))
    assert (site.default_walltime, [cap.walltime for cap in site.walltime_caps]) == (120, [1440, 2160])
    assert load_site(_mine(tmp_path), ["default_walltime=1:30:00"]).default_walltime == 90
    (tmp_path / "site.yaml").write_text(to_yaml(site.model_dump(mode="json")))  # as a sweep keeps its site
    assert load_site(tmp_path / "site.yaml") == site


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("zzz: 4\n", "mine.yaml:7: zzz: unknown key; valid: name, scheduler, "),
        ("queu: gpu\n", "mine.yaml:7: queu: unknown key; did you mean queue?"),
        ("environment: {A: {valu: x}}\n", "environment.A.valu: unknown key; did you mean value?"),
        ("environment: {A: {value: x}}\n", "environment.A.why: is missing and has no default"),
        ("environment: {A-B: {value: x, why: y}}\n", "must be a variable's name, got 'A-B'"),
        ('environment: {A: {value: "a\\nb", why: y}}\n', "must be one line of text"),
        ("account: a b\n", "account: must be one word of letters, digits and .@:+,=/_-, got 'a b'"),
        ("account: -x\n", "account: must be one word"),
        ("account: $(id)\n", "account: must be one word"),
        ("queue: a#b\n", "queue: must be one word"),
        ("modules: [a;b]\n", "modules.0: must be one word"),
        ('directives: [{option: "--mem=0\\n#SBATCH -x", why: w}]\n', "an option of the scheduler"),
        ("directives: [{option: mem=0, why: w}]\n", "an option of the scheduler, such as --mem=0, got 'mem=0'"),
        ("directives: [{option: --mem=0}]\n", "directives.0.why: is missing"),
        (
            "directives: [{option: --mail-type=END,FAIL, why: w}]\n",
            "directives.0.FAIL: unknown key; within { } a comma ends a value, so quote one that has a comma: "
            'option: "--mail-type=END,FAIL"',
        ),
        ("directives:\n  - option: --x\n    fail:\n    why: w\n", "fail: unknown key; valid: option, why"),
        ("launcher_options: [{option: --mpi=$(id), why: w}]\n", "an option without quotes"),
        ("launcher_options: [{option: -x; id, why: w}]\n", "an option without quotes"),
        ("node_local: tmp\n", "an absolute path without spaces"),
        ("node_local: /tmp/a b\n", "an absolute path without spaces"),
        ("node_local: /tmp/$(id)\n", "an absolute path without spaces"),
        ("default_walltime: 0:00\n", "greater than or equal to 1"),
        (
            "default_walltime: two\n",
            "must be hours and minutes, such as 2:00, or H:MM:SS or D-HH:MM:SS, got 'two'",
        ),
        (
            "default_walltime: 60\n",
            "mine.yaml:7: default_walltime: must be hours and minutes, such as 2:00, or H:MM:SS",
        ),
        ("walltime_caps: [{nodes: 8, walltime: 90}]\n", "walltime_caps.0.walltime: must be hours and minutes, such as"),
        ("comm: gloo\n", "mine.yaml:7: comm: 'gloo' is not a choice; valid: horovod, torch, auto"),
        ("launcher: jsrun\n", "the key 'launcher' is given twice"),
        ("+launcher: [jsrun]\n", "the key 'launcher' is given twice"),
        ("requires: [partition]\n", "mine.yaml:7: requires.0: 'partition' is not a choice; valid: account, queue"),
        (
            "gpus_flag: --gres=gpu:4\n",
            "mine.yaml:7: gpus_flag: must be an option such as --gres=gpu:{gpus}, got",
        ),
        ("gpus_flag: --gres=gpu:{gpus};id\n", "must be an option such as --gres=gpu:{gpus}"),
        ("spec:\n  seed: 1\n  precision: bf17\n", "mine.yaml:9: precision: 'bf17' is not a choice; did you mean bf16?"),
        ("spec: {data.stag: auto}\n", "mine.yaml:7: data.stag: unknown key; did you mean stage?"),
        (
            "spec: {data: {stage: auto}}\n",
            "mine.yaml:7: spec.data: must be a value, got a section; write data.stage: auto",
        ),
        ("spec: {seed.x: 1}\n", "mine.yaml:7: seed is a value, not a section"),
        ("walltime_caps: [{nodes: 8, walltime: 1:00}, {nodes: 4, walltime: 2:00}]\n", "must rise, got [8, 4]"),
    ],
)
def test_mistakes_have_their_line_and_what_would_be_right(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_site(_mine(tmp_path, more))
    assert message in str(error.value)
    assert "mine" in str(error.value)


def test_a_back_end_that_is_named_becomes_a_variable_of_the_ranks(tmp_path: Path) -> None:
    plain = load_site(_mine(tmp_path))
    assert plain.comm == "auto" and "SUMMIT_TRAIN_COMM" not in plain.environment
    site = load_site(_mine(tmp_path, "environment: {A: {value: b, why: c}}\ncomm: torch\n"))
    values = {name: setting.value for name, setting in site.environment.items()}
    assert values == {"A": "b", "SUMMIT_TRAIN_COMM": "torch"}
    both = "environment: {SUMMIT_TRAIN_COMM: {value: horovod, why: c}}\ncomm: torch\n"
    with pytest.raises(UserError, match="mine: comm: torch sets SUMMIT_TRAIN_COMM, which environment sets too"):
        load_site(_mine(tmp_path, both))


def test_what_ranks_must_do_about_slow_nodes_becomes_variables(tmp_path: Path) -> None:
    def told(*keys: str) -> dict[str, str]:
        return {name: setting.value for name, setting in load_site(_mine(tmp_path), keys).environment.items()}

    assert told() == {}
    assert told("check_nodes=true") == {"SUMMIT_TRAIN_CHECK_NODES": "1"}
    both = {"SUMMIT_TRAIN_CHECK_NODES": "1", "SUMMIT_TRAIN_EXCLUDE_SLOW": "1"}
    assert told("check_nodes=true", "exclude_slow=true", "spare_nodes=2") == both
    own = "environment: {SUMMIT_TRAIN_CHECK_NODES: {value: '0', why: c}}\ncheck_nodes: true\n"
    with pytest.raises(UserError, match="mine: check_nodes: true sets SUMMIT_TRAIN_CHECK_NODES, which"):
        load_site(_mine(tmp_path, own))


def test_an_unknown_site_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError, match=f"site 'nosuch' not found; shipped: {', '.join(SITES)}; or give the path"):
        load_site("nosuch")
    with pytest.raises(UserError, match=r"site 'perlmuter' not found; did you mean perlmutter\? shipped: alps, "):
        load_site("perlmuter")
    with pytest.raises(UserError, match=r"nowhere/site.yaml: cannot be read"):
        load_site("nowhere/site.yaml")


@pytest.mark.parametrize("name", ["ib_cluster", str(shipped("configs/machines") / "summit.yaml")])
def test_a_machine_file_is_not_taken_for_a_site(name: str) -> None:
    right = "--site takes a site profile, such as slurm_generic"
    with pytest.raises(UserError, match=f"^{name} is a machine file; {right}$"):
        load_site(name)
