"""A site profile: YAML -> frozen, typed Site. Profiles are shipped in configs/sites; any other path works too."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from summit_train.cluster.scheduler import Scheduler
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.core.errors import UserError
from summit_train.core.run_folder import CHECK_NODES, EXCLUDE_SLOW
from summit_train.core.text import counted
from summit_train.spec import ArchName, Spec, smallest_spec, spec_from_tree
from summit_train.spec.catalog import Backbone, NonLocal
from summit_train.spec.source import Tree, put, read_kind, read_tree
from summit_train.spec.typed import Count, NonNegative, Positive, Section, validated

COMM = "SUMMIT_TRAIN_COMM"  # names the back end to ranks


def parse_walltime(text: Any) -> int:
    """Return H:MM, H:MM:SS or D-HH:MM:SS as minutes, rounded down, so that no job asks for more. Raises ValueError."""
    found = isinstance(text, str) and re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d)(?::[0-5]\d)?", text)
    if not found:
        raise ValueError("must be hours and minutes, such as 2:00, or H:MM:SS or D-HH:MM:SS")
    days, hours, minutes = (int(part or 0) for part in found.groups())
    return 60 * (24 * days + hours) + minutes


def walltime_text(minutes: int) -> str:
    """Return minutes as H:MM, as LSF reads it. Slurm needs :00 after it."""
    return f"{minutes // 60}:{minutes % 60:02}"


def _check(is_right: Callable[[str], object], form: str) -> AfterValidator:
    def check(text: str) -> str:
        if not is_right(text):
            raise ValueError(f"must be {form}")
        return text

    return AfterValidator(check)


def _matching(pattern: str, form: str) -> AfterValidator:
    return _check(re.compile(pattern).fullmatch, form)


Minutes = Annotated[
    int, BeforeValidator(parse_walltime), Field(ge=1), PlainSerializer(walltime_text, return_type=str, when_used="json")
]
Line = Annotated[str, _check(lambda text: text.isprintable() and text.strip(), "one line of text")]
# The scheduler, not a shell, reads directives; a launcher's options are quoted for the shell where they need it.
Word = Annotated[str, _matching(r"[\w.@:+,=][\w.@:+,=/-]*", "one word of letters, digits and .@:+,=/_-")]
Program = Annotated[str, _matching(r"/?[\w.@:+,=][\w.@:+,=/-]*", "a name or an absolute path without spaces")]
Directive = Annotated[str, _matching(r"-[\w-][^\n#\\$`;]*", "an option of the scheduler, such as --mem=0")]
Flag = Annotated[str, _matching(r"-[\w-][\w .:,=+/@%^&|!~()\[\]<>*-]*", "an option without quotes, such as --mpi=pmix")]
NodePath = Annotated[str, _matching(r"[/$][\w./${}:@+-]*", "an absolute path without spaces; $NAMES are the node's")]
GpusFlag = Annotated[str, _matching(r"-[\w:,=-]+\{gpus\}[\w:,=-]*", "an option such as --gres=gpu:{gpus}")]
VariableName = Annotated[str, _matching(r"[A-Za-z_]\w*", "a variable's name")]


class DirectiveLine(Section):
    """An option of the scheduler, and the reason, which the job script shows above it."""

    option: Directive
    why: Line


class LauncherOption(Section):
    """An option of the launcher, and the reason."""

    option: Flag
    why: Line


class Container(Section):
    """The image that has the program, and what enters it. Everything else in the job script runs outside."""

    runtime: Literal["apptainer", "pyxis", "podman_hpc", "edf"]
    image: Line = Field(description="A file or a name; edf: the name or path of the environment's file.")
    python: Program = Field(default="python", description="The image's interpreter with summit_train.")
    binds: tuple[NodePath, ...] = Field(default=(), description="FOLDER or FOLDER:INSIDE, of specs, runs and data.")
    options: tuple[LauncherOption, ...] = ()

    @property
    def mounts(self) -> tuple[str, ...]:
        return tuple(bind if ":" in bind else f"{bind}:{bind}" for bind in self.binds)

    def gaps(self, folders: Mapping[str, str | Path | None]) -> list[str]:
        """Return a line for each folder that the image does not get, and for an image whose file is missing here."""
        inside = [os.path.expandvars(mount.split(":")[1]) for mount in self.mounts]
        inside += ["/tmp", "/var/tmp", os.path.expanduser("~")] if self.runtime == "apptainer" else []  # its defaults
        lines = []
        for what, folder in folders.items():
            there = [Path(os.path.expandvars(str(folder))).is_relative_to(path) for path in inside]
            if self.binds and folder is not None and not any(there):
                lines.append(f"container.binds lack {what} {folder}: ranks may not find it; add it there")
        if re.match(r"\.{0,2}/", self.image) and not Path(self.image).exists():
            lines.append(f"container.image: no file {self.image} on this machine; the nodes must have it")
        return lines

    def check(self, site: str, launcher: str, stage: bool | str) -> None:
        """Raise UserError where the launcher cannot enter the image or a copy of it, or nothing reads the binds."""
        if stage and self.runtime not in ("apptainer", "pyxis"):
            raise UserError(f"{site}: stage_environment: must be false with container.runtime {self.runtime}")
        if isinstance(stage, str):
            raise UserError(f"{site}: stage_environment: must be true or false with container, which names the image")
        if self.runtime in ("pyxis", "edf") and launcher != "srun":
            wrong = f"{self.runtime} must be used with launcher srun, got {launcher}"
            raise UserError(f"{site}: container.runtime: {wrong}")
        if bool(self.binds) == (self.runtime == "edf"):
            empty = "empty with edf; mount the folders in the environment's file"
            some = "the folders of runs and data, got none; try binds: [/path/to/project]"
            raise UserError(f"{site}: container.binds: must be {empty if self.binds else some}")


class Variable(Section):
    """The value of an environment variable, not expanded, and the reason."""

    value: Line
    why: Line


class Cap(Section):
    """Jobs of up to `nodes` nodes may take `walltime`."""

    nodes: Count
    walltime: Minutes


class Speed(Section):
    """Measured training speed of one network: clips a second of one GPU, and the source of the figure."""

    arch: ArchName
    backbone: Backbone | None = "resnet50"
    non_local: NonLocal = False
    num_frames: Count
    crop: Count = 224
    nodes: Count
    clips_per_second: Positive
    source: Line


class Site(Section):
    """One cluster, or a part of it."""

    name: Word
    scheduler: Annotated[str, _check(SCHEDULERS.__contains__, f"one of {', '.join(SCHEDULERS)}")]
    launcher: str = Field(description="One of the scheduler's.")
    comm: Literal["horovod", "torch", "auto"] = Field(default="auto", description="What carries the gradients.")
    gpus_per_node: Annotated[int, Field(ge=0)]
    gpus_flag: GpusFlag | None = Field(default=None, description="How GPUs are asked for; null: the scheduler's way.")
    ranks_per_node: Count | None = Field(default=None, description="null: one a GPU.")
    cores_per_node: Count = Field(description="Cores for jobs, divided evenly among the ranks.")
    bind: bool = Field(default=True, description="Bind each rank and its loader workers to its cores.")
    walltime_caps: tuple[Cap, ...] = ()
    default_walltime: Minutes = 60
    warning_seconds: Count = Field(default=300, description="Time of the warning signal before the walltime ends.")
    account: Word | None = None
    queue: Word | None = Field(default=None, description="Slurm's partition, LSF's queue.")
    chunk: Word | None = Field(default=None, description="PBS: a node's resources; null: its cores and GPUs.")
    spare_nodes: Annotated[int, Field(ge=0)] = Field(default=0, description="Nodes in place of those in bad_nodes.")
    check_nodes: bool = Field(default=False, description="Check the nodes before the first step.")
    exclude_slow: bool = Field(default=False, description="Put the node of a slow rank into bad_nodes.")
    min_nodes: Count | None = Field(default=None, description="The fewest nodes of a restart; null: all.")
    restarts: Annotated[int, Field(ge=0)] = Field(default=5, description="Restarts of the ranks within one job.")
    failure_gpu_hours: Positive | None = Field(default=None, description="Between two failures; null: unknown.")
    max_requeues: NonNegative | None = Field(default=None, description="Requeues of a job; null: from its time.")
    requires: tuple[Literal["account", "queue"], ...] = Field(default=(), description="Keys that a job must have.")
    directives: tuple[DirectiveLine, ...] = ()
    launcher_options: tuple[LauncherOption, ...] = ()
    template: Path | None = Field(default=None, description="Of the job script; null: the one that ships.")
    host_python: Program | None = Field(default=None, description="What starts a job's ranks; null: this Python.")
    container: Container | None = Field(default=None, description="null: the ranks run outside of containers.")
    modules: tuple[Word, ...] = ()
    environment: dict[VariableName, Variable] = Field(default={})
    setup: tuple[Line, ...] = Field(default=(), description="Lines of bash, run after the modules are loaded.")
    node_local: NodePath | None = Field(default=None, description="Folder on each node's own disk, for staging.")
    stage_environment: bool | NodePath = Field(
        default=False, description="true: ranks start from a copy on node_local; or FILE: of `env pack`."
    )
    speeds: tuple[Speed, ...] = ()
    spec: dict[str, Any] = Field(default={}, description="Spec keys, section.key: defaults below a user's own file.")
    notes: tuple[str, ...] = Field(default=(), description="Lines to print before a job: what people should know here.")

    @property
    def batch(self) -> Scheduler:
        return SCHEDULERS[self.scheduler]

    @property
    def is_here(self) -> bool:
        """Tell this machine, where jobs have no queue and no walltime, from a cluster."""
        return self.batch.command is None

    @property
    def defaults(self) -> Tree:
        """Return the site's defaults of spec keys, to lay a user's file over."""
        tree = Tree({}, {(): f"{self.name}: spec"})
        for key, value in self.spec.items():
            put(tree, key, value, f"{self.name}: spec")
        return tree

    @property
    def ranks(self) -> int:
        return self.ranks_per_node or self.gpus_per_node

    @property
    def cores_per_rank(self) -> int:
        return max(1, self.cores_per_node // self.ranks)

    def check_scheduler(self) -> None:
        """Raise UserError where the scheduler cannot be reached from this machine."""
        command = self.batch.command
        if command is not None and shutil.which(command) is None:
            raise UserError(f"{command} is not on PATH: submit on a machine of {self.name}, or use --dry-run")

    def walltime_cap(self, nodes: int) -> int | None:
        """Return the longest walltime of a job in minutes, None without caps. Raises UserError for too many nodes."""
        for cap in self.walltime_caps:
            if nodes <= cap.nodes:
                return cap.walltime
        if self.walltime_caps:
            most = self.walltime_caps[-1].nodes
            raise UserError(f"{self.name}: a job must have at most {counted(most, 'node')}, got {nodes}")
        return None


def load_site(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Site:
    """Read the shipped profile of that name, or the file at that path, with `key=value` overrides.

    Its notes have a line for each list of an extended profile that is replaced, as its options may be needed.
    Raises UserError with one line for each mistake: `file:line: key: what is wrong and what would be right`.
    """
    tree = read_kind("site", str(name_or_path), overrides)
    site = validated(Site, tree)
    if site.launcher not in site.batch.launchers:
        choices = " or ".join(site.batch.launchers)
        raise UserError(f"{site.name}: launcher: must be {choices} with {site.scheduler}, got {site.launcher}")
    if (site.spare_nodes or site.min_nodes) and site.launcher not in site.batch.can_spare:
        key, value = ("spare_nodes", 0) if site.spare_nodes else ("min_nodes", "null")
        raise UserError(f"{site.name}: {key}: must be {value} with {site.launcher} on {site.scheduler}")
    if site.exclude_slow and not site.spare_nodes:
        raise UserError(f"{site.name}: exclude_slow: must be false without spare_nodes; set spare_nodes to 1 or more")
    if site.container is not None:
        site.container.check(site.name, site.launcher, site.stage_environment)
    if site.stage_environment and site.node_local is None:
        raise UserError(f"{site.name}: stage_environment: must be false without node_local, the folder to copy it to")
    if site.gpus_flag is not None and site.batch.gpus_flag is None:
        raise UserError(f"{site.name}: gpus_flag: must be null, as {site.scheduler} has one way to ask for GPUs")
    if site.ranks == 0:
        raise UserError(f"{site.name}: ranks_per_node: must be given where gpus_per_node is 0")
    nodes = [cap.nodes for cap in site.walltime_caps]
    if nodes != sorted(set(nodes)):
        raise UserError(f"{site.name}: walltime_caps: the numbers of nodes must rise, got {nodes}")
    words = Tree(smallest_spec().model_dump(mode="json"), {(): tree.place(("spec",))})
    for key, value in site.spec.items():
        if isinstance(value, dict):
            keys = ", ".join(f"{key}.{name}: {one}" for name, one in value.items())
            raise UserError(f"{tree.place(('spec', key))}: spec.{key}: must be a value, got a section; write {keys}")
        put(words, key, value, tree.place(("spec", key)))
    validated(Spec, words)
    site = site.model_copy(update={"notes": (*site.notes, *tree.notes)})
    if site.template is not None:
        profile = Path(tree.place(("template",)).rpartition(":")[0])
        template = Path(os.path.abspath(profile.parent / site.template))
        if not template.is_file():
            raise UserError(f"{tree.place(('template',))}: template: must be a file, got {template}")
        site = site.model_copy(update={"template": template})
    if site.launcher == "ranks" and (site.bind or site.launcher_options):
        idle = "bind and launcher_options do nothing with launcher ranks; set launcher: mpirun to use them"
        site = site.model_copy(update={"notes": (*site.notes, f"{site.name}: {idle}")})
    return site.model_copy(update={"environment": {**site.environment, **_variables(site)}})


def _variables(site: Site) -> dict[str, Variable]:
    """Return the variables that keys of a site set for the ranks of its jobs. Raises UserError for a conflict."""
    settings: dict[str, tuple[str, str, str]] = {}  # by name: key, its value, the variable's
    settings |= {} if site.comm == "auto" else {COMM: ("comm", site.comm, site.comm)}
    settings |= {CHECK_NODES: ("check_nodes", "true", "1")} if site.check_nodes else {}
    settings |= {EXCLUDE_SLOW: ("exclude_slow", "true", "1")} if site.exclude_slow else {}
    variables = {}
    for name, (key, word, value) in settings.items():
        if name in site.environment and site.environment[name].value != value:
            raise UserError(f"{site.name}: {key}: {word} sets {name}, which environment sets too; remove one of them")
        variables[name] = Variable(value=value, why=f"{key}: {word} in the site profile")
    return variables


def load_spec_on(site: Site | None, path: str | Path, overrides: Sequence[str]) -> tuple[Spec, dict[str, Any]]:
    """Read a spec file over the site's own defaults; return the spec and, by key, the defaults that took effect.

    Raises UserError as load_spec does.
    """
    users = read_tree(path, overrides)
    tree = site.defaults if site else Tree({})
    tree.lay(users)
    defaults = site.spec if site else {}
    taken = {key: value for key, value in defaults.items() if tuple(key.split(".")) not in users.places}
    return spec_from_tree(tree), taken
