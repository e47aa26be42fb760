"""What a cluster is like, typed as a spec is: YAML -> frozen Site. A person's own profile is a file anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

import summit_train
from summit_train.source import SpecError, read_tree
from summit_train.typed import Section, validated

LAUNCHERS = {"slurm": ("srun", "mpirun"), "lsf": ("jsrun", "mpirun"), "local": ("mpirun",)}


class SiteError(ValueError):
    """A mistake in a site profile, or a wish that the site does not fulfil."""


def parse_walltime(value: Any) -> Any:
    """H:MM as minutes. A plain number is minutes already, as in YAML 1.1 `2:00` is the number 120."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,4}):([0-5]\d)", value)):
        return 60 * int(match.group(1)) + int(match.group(2))
    if isinstance(value, str):
        raise ValueError("hours and minutes are wanted, such as 2:00")
    return value


def walltime_text(minutes: int) -> str:
    """Minutes as H:MM, which both schedulers read; Slurm wants seconds behind."""
    return f"{minutes // 60}:{minutes % 60:02}"


def _one_line(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("one line of text is wanted")
    return text


def _matching(pattern: str, wanted: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{wanted} is wanted")
        return text

    return AfterValidator(check)


Minutes = Annotated[int, BeforeValidator(parse_walltime), Field(ge=1)]
Count = Annotated[int, Field(ge=1)]
Line = Annotated[str, AfterValidator(_one_line)]
# Directives are read by the scheduler and not by a shell: what stands in them has no character that either would read.
Word = Annotated[str, _matching(r"[\w.@:+,=][\w.@:+,=/-]*", "one word of letters, digits and .@:+,=/_-")]
Directive = Annotated[str, _matching(r"-[\w-][^\n#'\\$`;&|<>]*", "an option of the scheduler, such as --mem=0,")]
Flag = Annotated[str, _matching(r"-[\w-][\w .:,=+/@%-]*", "an option without quotes, such as --mpi=pmix,")]
NodePath = Annotated[str, _matching(r"[/$][\w./${}:@+-]*", "an absolute path without spaces; $NAMES are the node's")]
VariableName = Annotated[str, _matching(r"[A-Za-z_]\w*", "a variable's name")]


class DirectiveLine(Section):
    """An option of the scheduler, and why it is there: the reason is printed above it into the job script."""

    option: Directive
    why: Line


class LauncherOption(Section):
    """An option of the launcher, and why it is there."""

    option: Flag
    why: Line


class Variable(Section):
    """The value of an environment variable, taken as it is, and why it is set."""

    value: Line
    why: Line


class Cap(Section):
    """Jobs of up to `nodes` nodes may take `walltime`."""

    nodes: Count
    walltime: Minutes


class Speed(Section):
    """Clips a second of one GPU in training, and where the figure is from. For any other network nothing is said."""

    arch: Literal["tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1"]
    backbone: str = "resnet50"
    num_frames: Count
    crop: Count = 224
    nodes: Count
    clips_per_second: Annotated[float, Field(gt=0)]
    source: Line


class Site(Section):
    """One cluster, or a part of it."""

    name: Word
    scheduler: Literal["slurm", "lsf", "local"]
    launcher: Literal["srun", "mpirun", "jsrun"]
    gpus_per_node: Annotated[int, Field(ge=0)]
    ranks_per_node: Count | None = Field(default=None, description="null: one a GPU.")
    cores_per_node: Count = Field(description="Cores that jobs may use; shared out evenly to the ranks.")
    bind: bool = Field(default=True, description="Tie each rank and its loader workers to its share of the cores.")
    walltime_caps: tuple[Cap, ...] = ()
    default_walltime: Minutes = 60
    warning_seconds: Count = Field(default=300, description="The warning signal comes so long before the end.")
    account: Word | None = None
    queue: Word | None = Field(default=None, description="Slurm's partition, LSF's queue.")
    directives: tuple[DirectiveLine, ...] = ()
    launcher_options: tuple[LauncherOption, ...] = ()
    modules: tuple[Word, ...] = ()
    environment: dict[VariableName, Variable] = Field(default={})
    setup: tuple[Line, ...] = Field(default=(), description="Lines of bash, run as they are after the modules.")
    node_local: NodePath | None = Field(default=None, description="Folder on each node's own disk, for staging.")
    speeds: tuple[Speed, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of one node."""
        return self.ranks_per_node or self.gpus_per_node

    @property
    def cores_per_rank(self) -> int:
        """Cores that a rank and its loader workers share."""
        return max(1, self.cores_per_node // self.ranks)

    def walltime_cap(self, nodes: int) -> int | None:
        """The longest walltime of a job of so many nodes, in minutes; None where the site has no caps.

        Raises SiteError for more nodes than the site gives to a job.
        """
        for cap in self.walltime_caps:
            if nodes <= cap.nodes:
                return cap.walltime
        if self.walltime_caps:
            most = self.walltime_caps[-1].nodes
            raise SiteError(f"{self.name}: a job has at most {most} nodes, {nodes} are asked for")
        return None


def shipped(folder: str) -> Path:
    """A folder of the checkout that the package is installed from: configs or jobs, which pip does not copy."""
    path = Path(summit_train.__file__).resolve().parents[1] / folder
    if not path.is_dir():
        raise SiteError(f"there is no {path}: job scripts need the checkout; install it with `pip install -e CHECKOUT`")
    return path


def load_site(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Site:
    """The shipped profile of that name, or the file at that path, with `key=value` overrides.

    Raises SiteError; one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    try:
        site = validated(Site, read_tree(_profile(str(name_or_path)), overrides))
    except SpecError as error:
        raise SiteError(str(error)) from error
    _check(site)
    return site


def _profile(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    folder = shipped("configs/sites")
    path = folder / f"{name_or_path}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise SiteError(f"there is no site {name_or_path!r}; shipped: {names}; or give the path of a profile")
    return path


def _check(site: Site) -> None:
    """Keys that are right one by one and impossible together."""
    if site.launcher not in LAUNCHERS[site.scheduler]:
        choices = ", ".join(LAUNCHERS[site.scheduler])
        raise SiteError(f"{site.name}: launcher: {site.launcher} is none of {site.scheduler}; valid: {choices}")
    if site.ranks == 0:
        raise SiteError(f"{site.name}: ranks_per_node: wanted where gpus_per_node is 0")
    nodes = [cap.nodes for cap in site.walltime_caps]
    if nodes != sorted(set(nodes)):
        raise SiteError(f"{site.name}: walltime_caps: rising numbers of nodes are wanted, got {nodes}")
