"""What bench/gpu/speed.py measures, in order: what decides a default first, then the table, then what takes long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rows import Row

NETWORKS = ("tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1")
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")  # fast ones first
COMPILE_S = 75.0  # must be left for a group that compiles a step, 45 s were seen elsewhere for a ResNet-50
DECIDING, TABLE = 7, 3  # turns

Entry = tuple[str, str]  # network, execution


@dataclass(frozen=True)
class Group:
    """Rows that take turns. pairs: whose ratios are asked for.

    decides: goals of speed are checked on its ratios. agree: the logits of all rows are compared with the first's.
    """

    title: str
    rows: tuple[Row, ...]
    pairs: tuple[tuple[Row, Row], ...]
    repeats: int = TABLE
    needs_s: float = 3.0
    decides: bool = False
    agree: bool = False


def agenda(*, small: bool = False) -> list[Group]:
    """Return all groups by priority. small: tiny batches, one turn, and in the table bf16 alone."""
    groups = [*deciding(small), *table(small), *rest(small)]
    if not small:
        return groups
    kept = {g.title: g for g in groups if "bf16" in g.title or "(table)" not in g.title}  # tiny batches coincide
    return [replace(g, repeats=1, needs_s=1.0) for g in kept.values()]


def deciding(small: bool) -> list[Group]:
    """Return what decides a default: the shift's form, memory format, graphs, compilation; and the goals of speed."""
    goals = [("tsm", "accelerated"), ("tsn", "accelerated"), ("images", "accelerated")]
    forms = [("tsm", "plain"), ("tsm", "official"), ("tsm", "weights_last")]
    graphs = [("tsm", "accelerated"), ("tsm", "plain"), ("tsm", "graph")]
    both = [("tsm", "accelerated"), ("tsm", "compiled")]
    return [
        group("train", "bf16", 16, [*goals, *forms], small, "forms", decides=True),
        group("train", "fp16", 16, goals, small, "forms", decides=True),
        *(group("inference", "bf16", batch, graphs, small, "graphs", agree=True) for batch in (1, 4)),
        group("train", "bf16", 16, both, small, "tsm compiled", needs_s=COMPILE_S),
        group("inference", "bf16", 4, both, small, "tsm compiled", needs_s=COMPILE_S / 2, agree=True),
    ]


def table(small: bool) -> list[Group]:
    """Return the table of networks by precision and batch: the middle batches first."""
    entries = [(network, "accelerated") for network in NETWORKS]
    middle = [(mode, precision, batch) for precision in PRECISIONS for mode, batch in (("train", 16), ("inference", 8))]
    outer = [("train", 8), ("train", 32), ("inference", 1), ("inference", 32)]
    settings = [*middle, *((mode, precision, batch) for precision in PRECISIONS for mode, batch in outer)]
    return [group(*setting, entries, small, "table") for setting in settings]


def rest(small: bool) -> list[Group]:
    """Return graphs of a pass with gradients, and what else is compiled."""
    graphs = [("tsm", "accelerated"), ("tsm", "graph")]
    groups = [group("pass", "bf16", batch, graphs, small, "graphs") for batch in (1, 8)]
    for network, precision in (("tsm", "fp16"), ("i3d_3x3x3", "bf16"), ("i3d_3x1x1", "bf16"), ("tsn", "bf16")):
        both = [(network, "accelerated"), (network, "compiled")]
        groups += (
            [] if small else [group("train", precision, 16, both, small, f"{network} compiled", needs_s=COMPILE_S)]
        )
    return groups


def group(
    mode: str, precision: str, batch: int, entries: Sequence[Entry], small: bool, about: str, **options: float
) -> Group:
    """Return a group. Its ratios are of each entry over the first; of TSM over TSN, and of images over TSM."""
    clips = max(1 if mode == "inference" else 2, batch // 8) if small else batch
    rows = [Row(network, mode, precision, clips, execution) for network, execution in entries]
    first = rows[0]
    pairs = [(first, row) if row.network == "tsn" else (row, first) for row in rows[1:]]
    options = {"repeats": TABLE if about == "table" else DECIDING} | options
    return Group(f"{mode} {precision} batch {clips} ({about})", tuple(rows), tuple(pairs), **options)  # type: ignore[arg-type]
