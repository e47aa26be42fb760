"""The plan of every run of a sweep, on a site's nodes or without a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from summit_train.cluster.estimate import Estimate, check_ranks, estimate
from summit_train.cluster.job import JobError
from summit_train.cluster.site import Site, SiteError, walltime_text
from summit_train.plan import Plan, PlanError, make_plan
from summit_train.spec import Spec
from summit_train.sweep.grid import Sweep, SweepRun
from summit_train.text import NONE, duration, show, text_table


@dataclass(frozen=True)
class PlannedRun:
    """A run with its numbers. nodes and cost are None without a site."""

    name: str
    spec: Spec
    nodes: int | None
    plan: Plan
    cost: Estimate | None


def plan_runs(
    sweep: Sweep, site: Site | None, count_clips: Callable[[Spec], int], walltime: int | None
) -> list[PlannedRun]:
    """Return the plan of every run on the site's nodes; without a site, with one rank for each virtual GPU.

    count_clips: spec -> number of training clips. walltime: minutes of a job, by default what the run needs.
    Raises PlanError, which begins with the run's name, where a run fits neither the site nor its clips.
    """
    counted: dict[str, int] = {}
    planned = []
    for run in sweep.runs:
        train = run.spec.data.train
        try:
            if train not in counted:
                counted[train] = count_clips(run.spec)
            planned.append(_plan(run, site, counted[train], walltime))
        except (PlanError, SiteError, JobError) as error:
            raise PlanError(f"{run.name}: {error}") from error
    return planned


def planned_table(planned: Sequence[PlannedRun]) -> str:
    """Return the plans as a table for people."""
    return text_table([_cells(run) for run in planned])


def planned_values(sweep: Sweep, planned: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the plans as one JSON object. node_hours: of all runs; None where one of them is unknown."""
    runs = [
        {"name": run.name, "run": str(run.spec.run_path), "nodes": run.nodes}
        | run.plan.values()
        | ({"site": run.cost.values()} if run.cost else {})
        for run in planned
    ]
    hours = [run.cost.node_hours for run in planned if run.cost and run.cost.node_hours is not None]
    total = sum(hours) if len(hours) == len(planned) else None
    return {"sweep": sweep.name, "at_once": sweep.at_once, "node_hours": total, "runs": runs}


def _plan(run: SweepRun, site: Site | None, num_clips: int, walltime: int | None) -> PlannedRun:
    spec, nodes, cost = run.spec, run.nodes, None
    if site is None:
        plan = make_plan(spec, spec.scale.gpus or 1, num_clips)
    elif site.scheduler == "local":
        plan, nodes = make_plan(spec, _ranks_here(site, spec), num_clips), 1
    elif nodes is None:
        raise PlanError("the sweep does not say on how many nodes it runs; give nodes: N, of all runs or of this one")
    else:
        plan = make_plan(spec, check_ranks(site, spec, nodes), num_clips)
        cost = estimate(site, spec, plan, nodes, walltime)
    return PlannedRun(run.name, spec, nodes, plan, cost)


def _ranks_here(site: Site, spec: Spec) -> int:
    """Return the largest number of ranks, at most the site's, that divides the virtual GPUs."""
    gpus = spec.scale.gpus
    return site.ranks if gpus is None else max(n for n in range(1, site.ranks + 1) if gpus % n == 0)


def _cells(run: PlannedRun) -> dict[str, str]:
    plan, cost = run.plan, run.cost
    hours, node_hours = (cost.hours, cost.node_hours) if cost else (None, None)
    return {
        "run": run.name,
        "nodes": show(run.nodes),
        "ranks": show(plan.ranks),
        "virtual GPUs": show(plan.virtual_gpus),
        "accumulation": show(plan.accumulation),
        "batch": show(plan.global_batch),
        "frames": show(plan.frames_per_batch),
        "steps": show(plan.total_steps),
        "peak LR": show(plan.peak_lr),
        "time": NONE if hours is None else duration(hours * 3600),
        "node-hours": NONE if node_hours is None else f"{node_hours:,.1f}",
        "walltime": (f"{cost.jobs} x " if cost.jobs > 1 else "") + walltime_text(cost.walltime_minutes)
        if cost
        else NONE,
    }
