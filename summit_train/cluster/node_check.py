"""Find slow nodes before the first step: every rank measures what a step needs, and the nodes are compared.

The ranks of all nodes measure at the same time, so those of a node share it as they do in training. A node is as fast
as its slowest rank. It is slow where that is below 0.8 of the median of the nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from summit_train.cluster.probe import Check
from summit_train.core.comm import World
from summit_train.core.comm.launch import node_name
from summit_train.core.errors import RunFailed
from summit_train.core.files import regular
from summit_train.core.result import say, warn
from summit_train.core.run_folder import CHECK_NODES, name_bad_nodes, spares
from summit_train.core.text import counted, listed, with_unit
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.packed.read import staged_folder
from summit_train.training.timer import idle_mark

LEAST = 0.8  # of the median
# The best of some turns counts, as other work may disturb one. A turn is longer than the pauses of a processor or a
# process that is throttled: they slow every turn down.
_TURNS = 4
_TURN_S = 0.25
_MOST_S = 4.0  # of one measure
_COPIED_BYTES = 128 << 20  # beyond all caches
_EXCHANGED_BYTES = 4 << 20
_READ_BYTES = 16 << 20  # of a turn
_BLOCK_BYTES = 1 << 20  # of one read
MEASURES = {
    "products": ("matrix products", "multiply-adds/s"),
    "memory": ("copying memory", "B/s"),
    "data": ("reading the data", "B/s"),
    "network": ("exchanging with other nodes", "B/s"),
}
Rates = dict[str, float]  # by the key of MEASURES, without what was not measured


@dataclass(frozen=True)
class SlowNode:
    """A node that is slow in a measure. median: of all `nodes` nodes."""

    node: str
    measure: str
    rate: float
    median: float
    nodes: int

    def __str__(self) -> str:
        name, unit = MEASURES[self.measure]
        rate = with_unit(self.rate, unit)
        typical = with_unit(self.median, unit)
        return f"slow in {name}: {rate}, {self.rate / self.median:.2f} of the median of {self.nodes} nodes, {typical}"


def check_nodes(world: World, device: torch.device, train: Dataset, run_path: Path, watchdog: Watchdog) -> None:
    """Check the nodes where the job asks for it, and say which are slow. Collective.

    Raises AgreedError where the job has as many nodes to spare: they are in job/bad_nodes then.
    """
    if not world.from_first(lambda: CHECK_NODES in os.environ):
        return
    began = time.monotonic()
    rates = measure_nodes(world, device, watchdog, train)

    def act() -> None:
        slow = slow_nodes(rates)
        say(f"{nodes_text(rates)}; checked in {time.monotonic() - began:.1f} s")
        for one in slow:
            warn(f"{one.node} is {one}")
        reasons = {one.node: "; ".join(str(other) for other in slow if other.node == one.node) for one in slow}
        left = spares(run_path).replaceable
        if 0 < len(reasons) <= left and (named := name_bad_nodes(run_path, reasons)):
            raise RunFailed(f"job/bad_nodes now names {listed(named)}: the next start takes spare nodes instead")
        if reasons:
            has = f"the job has {counted(left, 'spare node')}"
            warn(f"the run continues with {counted(len(reasons), 'slow node')}; {has}")

    world.from_first(act)


def check_speeds(world: World, device: torch.device) -> list[Check]:
    """Check the nodes for the doctor, who knows no training set; return the findings on rank 0. Collective."""
    rates = measure_nodes(world, device, Watchdog(world, None))
    fix = "have it repaired; with check_nodes and spare_nodes in the site profile, jobs leave it out"
    slow = [Check(f"speed of {one.node}", "warn", str(one), fix) for one in slow_nodes(rates)]
    return [Check("speeds", "ok", nodes_text(rates)), *slow] if rates else []


def measure_nodes(
    world: World, device: torch.device, watchdog: Watchdog, train: Dataset | None = None
) -> dict[str, Rates]:
    """Measure on all ranks; return each node's rates on rank 0, {} elsewhere. Without `train` no data are read."""
    node = node_name(os.environ, world.host)
    rates = Rates()
    nodes = world.broadcast(world.gather(node)) or []
    measures: dict[str, Callable[[], float | None]] = {
        "products": lambda: _products(device),
        "memory": lambda: _memory(device),
        "data": lambda: None if train is None else read_rate(files_of(train, world.rank, world.size)),
        "network": lambda: _network(world, device, nodes),
    }
    for key, measure in measures.items():
        watchdog.at(f"checking the nodes: {MEASURES[key][0]}", waits=True)
        world.barrier()
        if (rate := measure()) is not None:
            rates[key] = rate
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return by_node(world.gather((node, rates)) or [])


def by_node(ranks: Iterable[tuple[str, Rates]]) -> dict[str, Rates]:
    """Return the rates of each node: those of its slowest rank in each."""
    nodes: dict[str, Rates] = {}
    for node, rates in ranks:
        own = nodes.setdefault(node, {})
        own.update({key: min(rate, own.get(key, rate)) for key, rate in rates.items()})
    return nodes


def slow_nodes(nodes: Mapping[str, Rates]) -> list[SlowNode]:
    """Return the nodes that are below LEAST of the median, by measure."""
    found = []
    for key in MEASURES:
        rates = {node: own[key] for node, own in nodes.items() if key in own}
        middle = median(rates.values()) if rates else 0.0
        found += [
            SlowNode(node, key, rate, middle, len(rates)) for node, rate in rates.items() if rate < LEAST * middle
        ]
    return found


def nodes_text(nodes: Mapping[str, Rates]) -> str:
    """Return one line: the medians of all measures, and what was not measured."""
    known = {key: [own[key] for own in nodes.values() if key in own] for key in MEASURES}
    parts = [
        f"{name} {with_unit(median(known[key]), unit) if known[key] else 'not measured'}"
        for key, (name, unit) in MEASURES.items()
    ]
    return f"{counted(len(nodes), 'node')}, the median of each one's slowest rank: {', '.join(parts)}"


def _products(device: torch.device) -> float:
    """Return multiply-adds/s, on a GPU those of its units for half precision."""
    side, dtype = (512, torch.float32) if device.type == "cpu" else (8192, torch.half)
    left = torch.ones(side, side, dtype=dtype, device=device) / side
    out = torch.empty_like(left)
    return best_rate(lambda: (torch.mm(left, left, out=out), idle_mark(device)), side**3)


def _memory(device: torch.device) -> float:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_rate(lambda: (target.copy_(source), idle_mark(device)), _COPIED_BYTES)


def best_rate(once: Callable[[], object], amount: float) -> float:
    """Return the amount a second of the best turn, after a first call that does not count; each call does `amount`."""
    once()
    rates = list[float]()
    began = time.perf_counter()
    while not rates or (len(rates) < _TURNS and time.perf_counter() - began < _MOST_S):
        calls = 0
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < _TURN_S:
            once()
            calls += 1
        rates.append(calls * amount / seconds)
    return max(rates)


def files_of(train: Dataset, rank: int, ranks: int) -> Iterator[tuple[Path, float]]:
    """Yield this rank's part of the set's files, of which no other rank reads much; a folder's one by one.

    With each comes the part of it to skip: several ranks may share a large one.
    """
    manifest = train.manifest
    stage = train.data.stage
    shards = list[Path]()
    root = Path()
    if manifest.is_packed:
        copy = None if stage in (None, "auto") else staged_folder(stage, manifest.source)
        folder = copy if copy is not None and (copy / PACK_FILE).is_file() else Path(manifest.source)
        shards = sorted(folder.glob("*.tar"))
    else:
        root = Path(located_root(train.data.root, manifest))
    count = len(shards) or len(manifest)
    first, part = divmod(rank * count / ranks, 1)
    for index in range(int(first), -(-(rank + 1) * count // ranks)):
        path = shards[index] if shards else root / manifest.path(index)
        with suppress(OSError):  # as below
            if path.is_dir():
                yield from ((file, 0.0) for file in sorted(path.iterdir()))
            else:
                yield path, part if index == first else 0.0


def read_rate(files: Iterable[tuple[Path, float]]) -> float | None:
    """Read files, past the system's cache where it can; return B/s of the best turn, None for too few bytes."""
    buffer = bytearray(_BLOCK_BYTES)
    rates = list[float]()
    total = 0
    began = start = now = time.perf_counter()
    read = 0
    for path, skipped in files:
        # What cannot be read is named by the loader, or replaced, as data.on_bad_clip says.
        with suppress(OSError), open(path, "rb", buffering=0, opener=regular) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(int(skipped * os.fstat(file.fileno()).st_size))
            while len(rates) < _TURNS and now - began < _MOST_S and (count := file.readinto(buffer)):
                read += count
                total += count
                now = time.perf_counter()
                if read >= _READ_BYTES:
                    rates.append(read / (now - start))
                    start = now
                    read = 0
        if len(rates) == _TURNS or now - began >= _MOST_S:
            return max(rates, default=total / (now - began))
    return max(rates, default=None)


def _network(world: World, device: torch.device, nodes: Sequence[str]) -> float | None:
    """Return B/s in each direction between this rank and its partners, the best of them."""
    if world.backend == "horovod":
        device = torch.device("cpu")
    tensor = torch.zeros(_EXCHANGED_BYTES // 4, device=device)
    world.sum(tensor[:1], "check_nodes")

    def turn(partner: int) -> tuple[float, float]:
        """Return the rate, and seconds that both partners know."""
        calls = 0
        start = time.perf_counter()
        while True:
            tensor[0] = time.perf_counter() - start
            theirs = world.exchange(tensor, partner)
            calls += 1
            shared = max(tensor[0].item(), theirs[0].item())  # both know both, and end with the same exchange
            if shared >= _TURN_S:
                return calls * tensor.nbytes / (time.perf_counter() - start), shared

    rates = []
    for partners in pairings(nodes):
        world.barrier()
        if (partner := partners.get(world.rank)) is not None:
            world.exchange(tensor, partner)  # opens the connection
            seconds = 0.0
            for _ in range(_TURNS):
                if seconds < _MOST_S / 2:
                    rate, more = turn(partner)
                    rates.append(rate)
                    seconds += more
    return max(rates, default=None)


def pairings(nodes: Sequence[str]) -> list[dict[int, int]]:
    """Return, for some rounds, each rank's partner on another node, given the node of each rank.

    The nodes are a ring, in which each meets the one before it and the one after it in different rounds: a slow node's
    partner has a fast one in another round. A rank without a counterpart has no partner.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    ring = list(ranks.values())
    edges = list(pairwise([*ring, *ring[:1]] if len(ring) > 2 else ring))
    even = edges[: len(edges) - len(edges) % 2] if len(ring) > 2 else edges
    rounds = [even[::2], even[1::2], edges[len(even) :]]
    pairs = [[pair for edge in edges for pair in zip(*edge, strict=False)] for edges in rounds if edges]
    return [dict(pair for one, other in of for pair in ((one, other), (other, one))) for of in pairs]
