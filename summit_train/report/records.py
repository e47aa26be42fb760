"""Read a run folder, also one that a killed or running job left behind: each file when it is first needed."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from pydantic import ValidationError

from summit_train.core.errors import UserError
from summit_train.core.files import read_file
from summit_train.core.run_log import METRICS_FILE, Replay, number
from summit_train.core.text import from_json
from summit_train.evaluation.measures import Measures, measures_of
from summit_train.report import results
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import parse_mapping

Result = TypeVar("Result", bound=results.Checked)

RUN_FILES = ("spec.yaml", "plan.json", METRICS_FILE, "eval.json", "environment.json")
RUN_MARKS = ("spec.yaml", METRICS_FILE)  # of a run folder


class RunRecord:
    """The contents of a run folder, also of one that a killed or running job left behind.

    label: the run's name. missing: names of absent files.
    """

    def __init__(self, directory: str | Path) -> None:
        """Raises UserError if the folder has neither a spec.yaml nor a metrics.jsonl."""
        self.path = Path(directory)
        _check_is_run(self.path)
        self.missing = [name for name in RUN_FILES if not (self.path / name).exists()]
        self._problems: list[str] = []
        self.spec_text = self._text("spec.yaml")
        self.spec: dict[str, Any] = {}
        try:
            self.spec = parse_mapping(self.spec_text, "spec.yaml").values if self.spec_text else {}
        except UserError as error:
            self._problems.append(f"{error}; shown as it is")
        self.label = str(self.spec.get("name") or os.path.basename(os.path.realpath(self.path)))

    @cached_property
    def notes(self) -> list[str]:
        """List what could not be read, of all files; what reads more of the folder adds its own."""
        for part in ("environment", "clips_per_class", "final", "others", "best", "baseline", "observed"):
            getattr(self, part)
        return [*sorted(self._problems), *self.log.problems]

    @cached_property
    def log(self) -> Replay:
        return Replay.of(self.path)

    @cached_property
    def _plan(self) -> dict[str, Any]:
        return self._json("plan.json")

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json without clips_per_class."""
        return {key: value for key, value in self._plan.items() if key != "clips_per_class"}

    @cached_property
    def clips_per_class(self) -> results.ClipsPerClass | None:
        return self._parsed(results.ClipsPerClass, self._plan.get("clips_per_class"), "plan.json: clips_per_class")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @cached_property
    def measures(self) -> Measures:
        """Those of the run's loss, and the user's own."""
        kind = str(self.setting("loss", "kind"))
        kind = str(self.setting("loss", "like")) if is_foreign(kind) else kind
        parts = [one for one in self.setting("evaluate", "measures") or [] if isinstance(one, dict)]
        own = [str(one.get("kind")).rpartition(":")[2] for one in parts]
        return measures_of(kind, number(self.setting("model", "num_classes")), own)

    @cached_property
    def final(self) -> results.FinalEval | None:
        """The run's own evaluation, eval.json."""
        return self._result("eval.json")

    @cached_property
    def others(self) -> dict[str, results.FinalEval]:
        """The evaluations in `evals`, by other keys or of other checkpoints, by name."""
        names = sorted(file.parent.name for file in self.path.glob("evals/*/eval.json"))
        found = {name: self._result(f"evals/{name}/eval.json") for name in names}
        return {name: result for name, result in found.items() if result is not None}

    @cached_property
    def best(self) -> results.BestCheckpoint | None:
        """The checkpoint that checkpoint.keep_best keeps."""
        return self._parsed(results.BestCheckpoint, self._json("checkpoints/best.json"), "checkpoints/best.json")

    @cached_property
    def baseline(self) -> results.Baseline | None:
        found = self._parsed(results.Baseline, self._json(results.BASELINE_FILE), results.BASELINE_FILE)
        if found is not None and self.final is not None and found.videos != self.final.videos:
            self._problems.append(f"{results.BASELINE_FILE}: is of {found.videos:,} other videos, left out")
            return None
        return found

    @cached_property
    def observed(self) -> results.Observed | None:
        return self._parsed(results.Observed, self._json(results.OBSERVED_FILE), results.OBSERVED_FILE)

    @cached_property
    def steps_per_epoch(self) -> float | None:
        """The plan's value, else that of the records: epoch e begins with step e * steps_per_epoch + 1."""
        planned = number(self.plan.get("steps_per_epoch")) or 0
        recorded = next(((s.step - 1) / s.epoch for s in self.log.steps if s.epoch > 0 and s.step > 1), None)
        return planned if planned > 0 else recorded

    @cached_property
    def clips_per_second(self) -> float | None:
        """The median over the steps, which start-up and restarts do not change."""
        rates = [step.clips_per_second for step in self.log.steps if math.isfinite(step.clips_per_second)]
        return median(rates) if rates else None

    @cached_property
    def data_wait_share(self) -> float | None:
        """The wait for data, in percent of the time of the steps."""
        timed = [one for one in self.log.steps if math.isfinite(one.step_s) and math.isfinite(one.data_wait_s)]
        total = sum(step.step_s for step in timed)
        return 100 * sum(step.data_wait_s for step in timed) / total if total > 0 else None

    @property
    def is_done(self) -> bool:
        """True if the final evaluation covers the last step: `eval` during training writes eval.json, too."""
        total = number(self.plan.get("total_steps")) if self.log.early_stop is None else self.log.early_stop.step
        scored = [score.step for score in self.final.checkpoints if score.step is not None] if self.final else []
        return total is not None and bool(scored) and max(scored) >= total

    def setting(self, section: str, key: str) -> Any:
        values = self.spec.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def settings(self) -> Iterator[tuple[str, str | int | float]]:
        """Yield the spec's dotted keys with values that CSV and JSON have; others as text, null as "null"."""
        open_sections = [("", self.spec)]
        while open_sections:
            prefix, section = open_sections.pop(0)
            for key, value in section.items():
                if isinstance(value, dict) and value:
                    open_sections.append((f"{prefix}{key}.", value))
                elif isinstance(value, str | int) or number(value) is not None:
                    yield f"{prefix}{key}", value
                elif isinstance(value, list):
                    yield f"{prefix}{key}", ", ".join(one if isinstance(one, str) else json.dumps(one) for one in value)
                else:
                    yield f"{prefix}{key}", "null" if value is None else "none"

    def _parsed(self, kind: type[Result], values: object, name: str) -> Result | None:
        try:
            return kind.model_validate(values) if values else None
        except ValidationError as error:
            self._problems.append(f"{name}: has wrong values, left out ({_reason(error)})")
            return None

    def _result(self, name: str) -> results.FinalEval | None:
        found = self._parsed(results.FinalEval, self._json(name), name)
        main = f"{self.measures.main.key}_mean"
        # null: the videos say nothing about the measure
        if found is not None and found.of(main) is None and (found.model_extra or {}).get(main, "") is not None:
            self._problems.append(f"{name}: has wrong values, left out (no {main!r})")
            return None
        return found

    def _text(self, name: str) -> str:
        try:
            return read_file(self.path / name).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self._problems.append(f"{name}: cannot be read ({error.strerror})")
            return ""

    def _json(self, name: str) -> dict[str, Any]:
        text = self._text(name)
        try:
            value = from_json(text) if text else {}
            why = "" if isinstance(value, dict) else "not a JSON object"
        except ValueError as error:
            why = str(error)
        if why:
            self._problems.append(f"{name}: unreadable, left out ({why})")
        return {} if why else value


def read_runs(directories: Sequence[str | Path]) -> list[RunRecord]:
    """Read each directory once and make the labels unique. Raises UserError for a directory that is not a run."""
    paths: dict[str, Path] = {}
    for directory in directories:
        paths.setdefault(os.path.realpath(directory), Path(directory))
    runs = [RunRecord(path) for path in paths.values()]
    for run, label in zip(runs, unique_labels([run.label for run in runs], list(paths.values())), strict=True):
        run.label = label
    return runs


def unique_labels(labels: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the labels of runs, with the path at those that several runs have."""
    number_of = Counter(labels)
    named = zip(labels, paths, strict=True)
    return [label if number_of[label] == 1 else f"{label} ({path})" for label, path in named]


def _check_is_run(path: Path) -> None:
    """Raise UserError for what is not a run folder, with what would be right."""
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise UserError(f"{path}: {what}; give a run folder, run_dir/name of its spec")
    runs = [one for one in (path, *sorted(path.iterdir())) if any((one / name).is_file() for name in RUN_MARKS)]
    if path not in runs:
        hint = f"give the runs within it: {' '.join(map(str, runs[:8]))}" if runs else "give run_dir/name of a spec"
        raise UserError(f"{path}: not a run, it has neither spec.yaml nor metrics.jsonl; {hint}")


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"no {key!r}" if first["type"] == "missing" else f"{key}: {first['msg']}"
