"""The results in a run folder besides its log, checked: eval.json, best.json, observed.json, clips of each class."""

from __future__ import annotations

from pathlib import Path
from statistics import stdev
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from summit_train.core.errors import UserError
from summit_train.core.files import read_file
from summit_train.core.run_log import number
from summit_train.core.text import from_json, mean_std
from summit_train.evaluation.measures import Measure, interval

OBSERVED_FILE = "observed.json"  # of `eval --observed`; optional
BASELINE_FILE = "baseline/baseline.json"  # of `baseline`; optional


class Checked(BaseModel):
    """A JSON object of a run. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True)


class WithMeasures(Checked):
    """An object with measures (evaluation.measures) under their keys."""

    model_config = ConfigDict(extra="allow")

    def of(self, key: str) -> float | None:
        return number((self.model_extra or {}).get(key))


class CheckpointScore(WithMeasures):
    """The measures of one checkpoint in the final evaluation."""

    path: str
    step: int | None = None


class CheckpointScores(WithMeasures):
    """The measures of the last checkpoints, with mean and standard deviation (n - 1), KEY_mean and KEY_std."""

    checkpoints: tuple[CheckpointScore, ...] = ()

    @model_validator(mode="after")
    def _deviate(self) -> CheckpointScores:
        """Compute the deviations again: in files of older versions they are the population's, of one checkpoint 0."""
        for name in (extra := self.model_extra or {}):
            if name.endswith("_std"):
                scores = (score.of(name.removesuffix("_std")) for score in self.checkpoints)
                if known := [score for score in scores if score is not None]:
                    extra[name] = stdev(known) if len(known) > 1 else None
        return self

    def best(self, key: str) -> float | None:
        """Return the highest of a measure over the checkpoints."""
        return max((value for score in self.checkpoints if (value := score.of(key)) is not None), default=None)

    def text(self, measure: Measure) -> str:
        """Return `73.81 ± 0.05 %`."""
        return mean_std(self.of(f"{measure.key}_mean"), self.of(f"{measure.key}_std"), measure.unit)


class FinalEval(CheckpointScores):
    """eval.json. mode: clips, or stream: of all frames. ema: of the averages of the weights. overrides: of the spec."""

    videos: int | None = None
    mode: str = "clips"
    clips: int | None = None
    crops: int | str | None = None
    ema: CheckpointScores | None = None
    classes_left_out: tuple[str, ...] = ()
    overrides: dict[str, Any] = Field(default={})

    def interval(self, main: Measure) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean top-1 over the videos; None of another measure."""
        top1 = self.of("top1_mean")
        if main.key != "top1" or top1 is None or not 0 <= top1 <= 100 or not self.videos or self.videos < 0:
            return None
        return interval(top1, self.videos)


class BestCheckpoint(Checked):
    """checkpoints/best.json. value: of the measure in the validation after `step`, in percent."""

    step: int
    measure: str
    value: float


class Baseline(Checked):
    """baseline.json: top-1 of logistic regression on frozen features, and its 95 % interval, in percent.

    weights: of the network; None: random.
    """

    top1: float
    top1_interval: tuple[float, float]
    features: int
    videos: int
    weights: str | None


class ObservedPoint(WithMeasures):
    """Accuracies when this fraction of each video is seen."""

    fraction: float


class Observed(Checked):
    """observed.json: early recognition. observed: by a clip of `frames` frames. anytime: by a stream, where it can."""

    name: str
    frames: int | None = None
    videos: int | None = None
    crops: int | str | None = None
    observed: tuple[ObservedPoint, ...]
    anytime: tuple[ObservedPoint, ...] = ()


class ClipsPerClass(Checked):
    """Class name -> number of clips, of the training and the validation set."""

    train: dict[str, int]
    val: dict[str, int]

    def sides(self) -> dict[str, dict[str, int]]:
        """Return 'training' and 'validation' -> the number of clips of every class of either."""
        names = dict.fromkeys((*self.train, *self.val))
        sides = {"training": self.train, "validation": self.val}
        return {side: {name: counts.get(name, 0) for name in names} for side, counts in sides.items()}


def read_observed(run_path: Path) -> Observed:
    """Read a run's curves. Raises UserError where there are none."""
    path = run_path / OBSERVED_FILE
    try:
        return Observed.model_validate(from_json(read_file(path)))
    except OSError as error:
        why = f"{path}: {error.strerror}; `summit-train eval SPEC --observed` writes it into its run folder"
        raise UserError(why) from error
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path}: is not what `summit-train eval SPEC --observed` writes") from error
