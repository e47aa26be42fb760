"""Latency and throughput of networks as they run in evaluation, measured in turn; the TSM paper's tables beside them.

Source of the protocol: Lin et al., TSM (journal version), sections 5.3.5 and 5.4: passes with one clip after a warm-up,
and throughput with 16 clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from summit_train.bench.benches import evaluated_network
from summit_train.bench.measure import in_turn, pair_ratios, spread
from summit_train.bench.steps import Place
from summit_train.models.network import count_network
from summit_train.models.precision import mixed_precision
from summit_train.scaling.published_tsm import Row, Table
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from summit_train.training.environment import environment
from summit_train.training.stopwatch import Mark

ROUNDS = 5  # turns of each network

Rounds = list[list[float]]  # seconds of each pass, by turn


@dataclass(frozen=True)
class Passes:
    """How long to measure: `repeats` passes with one clip and as many with `batch` clips, each after `warm_up` passes.

    seconds: most time of one network's timed passes at one batch, about. A warm-up ends after a quarter of it, and at
    least one pass is timed.
    """

    batch: int
    warm_up: int
    repeats: int
    seconds: float


@dataclass(frozen=True)
class Entry:
    """What one row measures: a network, or several of an ensemble, which run one after the other.

    published: the row of the paper that it stands beside. specs: empty where this version has no such network.
    """

    label: str
    specs: tuple[Spec, ...]
    published: Row | None = None

    def count_values(self) -> dict[str, Any]:
        """Return what is known without measuring; None where the network does not exist here."""
        first, counts = next(iter(self.specs), None), [count_network(spec) for spec in self.specs]
        return {
            "label": self.label,
            "arch": first and first.model.arch,
            "backbone": first and first.model.backbone,
            "frames": sum(spec.data.num_frames for spec in self.specs) or None,
            "crop": first and first.data.crop,
            "precision": first and first.precision,
            "parameters": sum(count.parameters for count in counts) or None,
            "multiply_adds": sum(count.multiply_adds for count in counts) or None,
            "published": self.published and asdict(self.published),
        }


class LatencyBench:
    """The networks of an entry on their random clips."""

    def __init__(self, entry: Entry, device: torch.device) -> None:
        self._device, self._precision = device, entry.specs[0].precision
        self._networks = [evaluated_network(spec, device) for spec in entry.specs]

    def passes(self, clips: int, most: int, seconds: float) -> list[float]:
        """Return the seconds of each of `most` passes of `clips` clips; of fewer, and one at least, after `seconds`."""
        times: list[float] = []
        with torch.inference_mode(), mixed_precision(self._precision, self._device):
            while not times or (len(times) < most and sum(times) < seconds):
                start = Mark(self._device)
                for network, batch in self._networks:
                    network(batch[:clips])
                times.append(start.seconds_to(Mark(self._device)))
        return times


def measure_rounds(benches: Sequence[LatencyBench], clips: int, settings: Passes) -> list[Rounds]:
    """Measure all benches in turn; return the seconds of each pass by bench and turn.

    Each bench has the same number of turns: up to ROUNDS, fewer where the time is over. A turn begins with a pass that
    is not counted, as the caches hold another network's weights.
    """
    for bench in benches:
        bench.passes(clips, settings.warm_up, settings.seconds / 4)
    rounds = min(ROUNDS, settings.repeats)
    found: list[Rounds] = [[] for _ in benches]

    def turn(i: int) -> list[float]:
        passes = settings.repeats // rounds + (len(found[i]) < settings.repeats % rounds)
        benches[i].passes(clips, 1, 0)
        return benches[i].passes(clips, passes, settings.seconds / rounds)

    spent = 0.0
    for taken, (i, times) in enumerate(in_turn({i: partial(turn, i) for i in range(len(benches))}, rounds), 1):
        found[i].append(times)
        spent += sum(times)
        if taken % len(benches) == 0 and spent > settings.seconds * len(benches):
            break
    return found


def measure_latency(
    entries: Sequence[Entry], settings: Passes, place: Place, table: Table | None, *, timed: bool
) -> dict[str, Any]:
    """Measure the entries that have a network, in turn; return the JSON values of all. Without `timed` only count."""
    here = [entry for entry in entries if entry.specs]
    times = iter(_timed_rows(here, settings, place) if timed and here else ())
    return {
        "bench": "latency",
        "environment": environment(place.world, place.device, [place.world.host]),
        "settings": asdict(settings) | {"clips": "random"},
        "timed": timed,
        "table": table and {"number": table.number, "title": table.title, "setting": table.setting},
        "data_sets": list(table.data_sets) if table else [],
        "relative_to": here[0].label if here else None,
        "rows": [entry.count_values() | ((next(times, _UNTIMED)) if entry.specs else _UNTIMED) for entry in entries],
    }


def entries_of_table(table: Table, words: Sequence[str]) -> list[Entry]:
    """Return an entry for each row of a table, its networks with the overrides `words`.

    Raises SpecError for a wrong override.
    """
    base = shipped("configs/kinetics") / "tsm_r50_8f.yaml"
    return [
        Entry(row.label, tuple(load_spec(base, [*network, *words]) for network in _networks(row)), row)
        for row in table.rows
    ]


def _networks(row: Row) -> list[list[str]]:
    return [] if row.network is None else row.network.words()


def _timed_rows(entries: Sequence[Entry], settings: Passes, place: Place) -> list[dict[str, Any]]:
    place.tell(f"building the networks: {'; '.join(entry.label for entry in entries)}")
    benches = [LatencyBench(entry, place.device) for entry in entries]
    found = {}
    for clips in dict.fromkeys((1, settings.batch)):
        place.tell(f"batch {clips}, the networks in turn")
        found[clips] = measure_rounds(benches, clips, settings)
    single, many = found[1], found[settings.batch]
    return [timed_values(*rounds, single[0], settings.batch) for rounds in zip(single, many, strict=True)]


def timed_values(single: Rounds, many: Rounds, first: Rounds, batch: int) -> dict[str, Any]:
    """Return latency and throughput of a row from the passes of one clip, of `batch`, and of the first row's network.

    `relative_latency` is over the first row's: the ratio of the medians of each turn, which were side by side.
    """
    milliseconds = spread([1000 * seconds for turn in single for seconds in turn])
    rates = spread([batch / seconds for turn in many for seconds in turn])
    medians, firsts = ([median(turn) for turn in rounds] for rounds in (single, first))
    return {f"{name}_ms": milliseconds[name] for name in ("median", "min", "max")} | {
        "passes": sum(map(len, single)),
        "turns": len(single),
        "relative_latency": spread(pair_ratios(medians, firsts)),
        "clips_per_second": rates["median"],
        "clips_per_second_spread": rates,
        "throughput_passes": sum(map(len, many)),
    }


_UNTIMED: dict[str, Any] = dict.fromkeys(timed_values([[1.0]], [[1.0]], [[1.0]], 1))
