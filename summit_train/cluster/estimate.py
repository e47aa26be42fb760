"""Estimate the cost of a run on a site: hours, node-hours, walltime, number of jobs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from summit_train.cluster.job import Job
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.cluster.site import Site, Speed, walltime_text
from summit_train.core.errors import UserError
from summit_train.core.text import counted, duration
from summit_train.plan import Plan, evaluations
from summit_train.scaling.failures import daly_interval
from summit_train.scaling.machines import Failures
from summit_train.spec import Spec

# The walltime adds to the time of training and evaluation: checkpoints and slow nodes (margin), and in each job the
# start of Python on all nodes and the last checkpoint (minutes).
_MARGIN = 1.2
_MINUTES_A_JOB = 15
_MINUTES_A_DAY = 24 * 60


@dataclass(frozen=True)
class Estimate:
    """The cost of a run.

    hours, node_hours: of training alone; None where the speed of this network is unknown. evaluation_hours: of the
    validations and the final evaluation; None where the speed or the number of videos is unknown.
    jobs: number of jobs of walltime_minutes each, one after the other; the last may requeue itself max_requeues times.
    most_node_hours: upper limit of all that. cost, most_cost: price, of a node-hour, times what training and evaluation
    take, None where unknown, and times the limit.
    """

    nodes: int
    ranks: int
    clips_per_second: float | None
    source: str | None
    hours: float | None
    evaluation_hours: float | None
    walltime_minutes: int
    warning_seconds: int
    jobs: int
    price: float | None
    max_requeues: int
    scheduler: str
    spare_nodes: int

    @property
    def node_hours(self) -> float | None:
        return None if self.hours is None else self.nodes * self.hours

    @property
    def most_node_hours(self) -> float:
        return (self.nodes + self.spare_nodes) * (self.jobs + self.max_requeues) * self.walltime_minutes / 60

    @property
    def cost(self) -> float | None:
        if self.price is None or self.hours is None:
            return None
        return self.price * (self.nodes + self.spare_nodes) * (self.hours + (self.evaluation_hours or 0))

    def values(self) -> dict[str, Any]:
        most = None if self.price is None else self.price * self.most_node_hours
        hours = {"node_hours": self.node_hours, "most_node_hours": self.most_node_hours}
        return asdict(self) | hours | {"cost": self.cost, "most_cost": most}

    def rows(self) -> list[tuple[str, str]]:
        rows = [("training", "unknown: no measurement of this network; give --speed, clips a second of one rank")]
        if self.hours is not None:
            speed = f"{self.clips_per_second:g} clips/s a rank ({self.source})"
            time = walltime_text(math.ceil(self.hours * 60))
            rows = [("training", f"{time}, {self.node_hours:,.1f} node-hours at {speed}")]
            if self.evaluation_hours is None:
                rows.append(("evaluation", "not counted: the number of videos in data.val is unknown"))
            else:
                time = walltime_text(math.ceil(self.evaluation_hours * 60))
                rows.append(("evaluation", f"{time}, final and validations"))
        jobs = "one job" if self.jobs == 1 else f"a chain of {self.jobs} jobs"
        jobs = f"{jobs} of {walltime_text(self.walltime_minutes)}"
        nodes = self.nodes + self.spare_nodes
        known = f"{jobs}: {nodes * self.jobs * self.walltime_minutes / 60:,.1f} node-hours;"
        if self.hours is None:
            known = f"at least {jobs}; node-hours unknown without a speed,"
        known += f" at most {self.most_node_hours:,.1f} with {counted(self.max_requeues, 'requeue')}"
        if self.hours is None:
            known += " (another bound: max_requeues, or --speed)"
        has_queue = SCHEDULERS[self.scheduler].command is not None  # this machine has no walltime
        if has_queue:
            rows.append(("walltime", known))
            if (useful := 60 * self.walltime_minutes - self.warning_seconds) < 30 * self.walltime_minutes:
                rows.append(
                    ("warning", f"it comes after {useful} s, less than half of the walltime; try a longer --walltime")
                )
        if self.price is not None:
            counts = "training" if self.evaluation_hours is None else "training and evaluation"
            cost = "unknown without a speed" if self.cost is None else f"{self.cost:,.2f} for {counts}"
            most = f", at most {self.price * self.most_node_hours:,.2f}" if has_queue else ""
            rows.append(("price", f"{cost}{most}, at {self.price:g} a node-hour"))
        return rows


def check_ranks(site: Site, spec: Spec, nodes: int) -> int:
    """Return the number of ranks on `nodes` nodes.

    Raises UserError where scale.gpus is less, and where fewer nodes after a restart would change the batch.
    """
    if nodes < 1:
        raise UserError(f"--nodes must be 1 or more, got {nodes}")
    if (site.min_nodes or nodes) < nodes and spec.scale.gpus is None:
        fixed = f"scale.gpus={nodes * site.ranks}"
        raise UserError(f"scale.gpus must be set with min_nodes, or fewer nodes would change the batch; try {fixed}")
    ranks = nodes * site.ranks
    gpus = spec.scale.gpus
    if gpus is not None and ranks > gpus:
        most = gpus // site.ranks
        fitting = f"--nodes {most}" + " or fewer" * (most > 1)
        hint = f"try {fitting}" if most else "raise it or lower ranks_per_node"
        least = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')} of {site.name}"
        raise UserError(f"scale.gpus must be at least the {least}, got {gpus}; {hint}")
    return ranks


def save_often(site: Site, spec: Spec, plan: Plan) -> tuple[Spec, list[tuple[str, str]]]:
    """Return the spec with Daly's interval between checkpoints, and one row for people that says so.

    Both only where the site has a rate of failures and the spec does not name checkpoint.every_minutes.
    """
    saving = spec.checkpoint
    rates = Failures()
    if site.failure_gpu_hours is None or "every_minutes" in saving.model_fields_set:
        return spec, []
    mtbf_s = site.failure_gpu_hours * 3600 / plan.ranks
    slow = 0.0 if saving.background else plan.checkpoint_bytes / rates.write_bytes_per_second
    interval_s = daly_interval(plan.checkpoint_bytes / rates.copy_bytes_per_second + slow, mtbf_s)
    saving = saving.model_copy(update={"every_minutes": max(1.0, round(interval_s / 60, 1))})
    row = f"also every {saving.every_minutes:g} min, best for a failure every {duration(mtbf_s)} (failure_gpu_hours)"
    return spec.model_copy(update={"checkpoint": saving}), [("checkpoints", row)]


def scored_clips(spec: Spec, plan: Plan, videos: int) -> int:
    """Return the most clips that the validations and the final evaluation of `videos` videos read.

    Includes the clips of precise_bn. A stream counts as evaluate.clips clips.
    """
    in_training, networks, views = evaluations(spec)
    return videos * (in_training + networks * views) + networks * spec.evaluate.precise_bn * plan.global_batch


def estimate(
    site: Site,
    plan: Plan,
    walltime: int | None = None,
    speed: float | None = None,
    videos: int | None = None,
    *,
    price: float | None = None,
    max_requeues: int | None = None,
) -> Estimate:
    """Return the cost of `plan` on the nodes that its ranks fill.

    walltime: minutes asked for; by default what the run needs, or the site's default where that is unknown. A walltime
    above the site's cap becomes a chain of jobs. speed: clips a second of one rank, in place of the site's figure.
    videos: the number in a validation, None if unknown. A scored clip counts as much as a trained one: it is decoded
    alike, though it has no backward pass. price: of a node-hour, in any currency. max_requeues: of the last job, by
    default the site's, else twice the jobs and at least 3; where the time is unknown what a day has room for, 1 to 20.
    Raises UserError for more nodes than the site has and for an invalid speed, walltime, price or number of requeues.
    """
    if max_requeues is not None and max_requeues < 0:
        raise UserError(f"--max-requeues must be 0 or more, got {max_requeues}")
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"--price must be 0 or more and finite, got {price:g}")
    if speed is not None and not 0 < speed < math.inf:
        raise UserError(f"--speed must be above 0 and finite, got {speed:g}")
    spec = plan.spec
    nodes = plan.ranks // site.ranks
    rate = speed
    source = "--speed" if speed else None
    if speed is None and (measured := _measured(site, spec, nodes)) is not None:
        rate = measured.clips_per_second
        source = measured.source
    # The rank with most virtual GPUs takes longest.
    hours = plan.total_steps * plan.accumulation * plan.clips_per_gpu / rate / 3600 if rate else None
    scored = None if videos is None else scored_clips(spec, plan, videos)
    evaluation = scored / plan.ranks / rate / 3600 if rate and scored is not None else None
    minutes, jobs = _chain(site, nodes, walltime, None if hours is None else hours + (evaluation or 0))
    if max_requeues is None:
        in_a_day = min(Job.max_requeues, max(1, _MINUTES_A_DAY // minutes - jobs))
        by_time = in_a_day if hours is None else max(3, 2 * jobs)
        max_requeues = by_time if site.max_requeues is None else site.max_requeues
    return Estimate(
        nodes=nodes,
        ranks=plan.ranks,
        clips_per_second=rate,
        source=source,
        hours=hours,
        evaluation_hours=evaluation,
        walltime_minutes=minutes,
        warning_seconds=site.warning_seconds,
        jobs=jobs,
        price=price,
        max_requeues=max_requeues,
        scheduler=site.scheduler,
        spare_nodes=site.spare_nodes,
    )


def _measured(site: Site, spec: Spec, nodes: int) -> Speed | None:
    """Return the site's speed of this network at the next larger number of nodes, else at the largest."""
    model = spec.model
    data = spec.data
    if model.width != 1.0 or model.detector is not None:
        return None
    key = (model.arch, model.backbone, model.non_local, data.num_frames, data.crop)
    found = [s for s in site.speeds if (s.arch, s.backbone, s.non_local, s.num_frames, s.crop) == key]
    found.sort(key=lambda s: s.nodes)
    return next((s for s in found if s.nodes >= nodes), found[-1] if found else None)


def _chain(site: Site, nodes: int, walltime: int | None, hours: float | None) -> tuple[int, int]:
    """Return (minutes of a job, number of jobs)."""
    if walltime is not None and walltime < 1:
        raise UserError(f"--walltime must be at least a minute, got {walltime_text(walltime)}")
    cap = site.walltime_cap(nodes + site.spare_nodes) or math.inf
    work = None if hours is None else math.ceil(_MARGIN * hours * 60)
    if walltime is None:
        walltime = site.default_walltime if work is None else work + _MINUTES_A_JOB
    minutes = int(min(walltime, cap))
    if not site.is_here and 60 * minutes <= site.warning_seconds:
        least = walltime_text(2 * math.ceil(site.warning_seconds / 60))
        wrong = f"a job's walltime must be above warning_seconds of {site.name}, {site.warning_seconds} s"
        raise UserError(f"{wrong}, got {walltime_text(minutes)}; try --walltime {least} or more")
    jobs = math.ceil(walltime / minutes)
    if work is not None:
        jobs = max(jobs, math.ceil(work / max(minutes - _MINUTES_A_JOB, minutes / 2)))
    return minutes, jobs
