"""Export recorded runs to a CSV, MLflow's database or W&B's offline runs. Only reads the run folders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import write_text
from summit_train.core.run_log import METRICS_FILE, EvalRecord, StepRecord, number
from summit_train.core.text import csv_text
from summit_train.report.records import RunRecord

Row = dict[str, float]
_MOST_METRICS = 1000  # of a request to MLflow
_MOST_PARAMS = 100


def history(run: RunRecord) -> list[Row]:
    """Return a row for each step with a record: step, time (seconds since 1970), step/loss, eval/top1, ...

    The names are those of the TensorBoard events. The last step also has the final evaluation, final/top1_mean, ...
    Runs from before version 0.2 have no times; all of theirs are that of their metrics.jsonl.
    """
    written = (run.path / METRICS_FILE).stat().st_mtime if run.log.records else 0.0
    found: dict[int, Row] = {}
    records: list[StepRecord | EvalRecord] = [*run.log.steps, *run.log.evals]
    for record in records:
        row = found.setdefault(record.step, {"step": record.step, "time": number(record.time) or written})
        row |= {f"{record.kind}/{name}": value for name, value in record.numbers().items()}
    if run.final:
        row = found.setdefault(run.log.last_step, {"step": run.log.last_step, "time": written})
        values = run.final.model_dump(exclude_unset=True)
        row |= {f"final/{name}": known for name, value in values.items() if (known := number(value)) is not None}
    return [found[step] for step in sorted(found)]


def write_csv(runs: Sequence[RunRecord], out: Path) -> list[str]:
    """Write OUT/RUN.csv for each run: a row for each recorded step, empty where a step has no such value."""
    names = [run.path.resolve().name for run in runs]
    written = list[str]()
    for run, name in zip(runs, names, strict=True):
        path = out / f"{name if names.count(name) == 1 else f'{name}_{_digest(run)}'}.csv"
        rows = history(run)
        columns = dict.fromkeys(column for row in rows for column in row)
        write_text(path, csv_text([columns, *([row.get(column, "") for column in columns] for row in rows)]))
        written.append(str(path))
    return written


def _digest(run: RunRecord) -> str:
    """Return an id of a run that also differs from that of a run started later in the same folder."""
    began = run.log.starts[0].time if run.log.starts else None
    return hashlib.sha256(f"{run.path.resolve()} {began}".encode("utf-8", "surrogateescape")).hexdigest()[:12]


def write_mlflow(runs: Sequence[RunRecord], out: Path) -> list[str]:
    """Add the runs to the database OUT/mlflow.db, in experiments named after the folders that hold the runs.

    A run that is there already is replaced: MLflow's parameters cannot change, and a resumed run repeats steps.
    """
    try:
        import alembic  # noqa: F401  (mlflow-skinny comes without both)
        import sqlalchemy  # noqa: F401
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise UserError(f"--to mlflow needs {error.name}: pip install 'summit_train[trackers]'") from error
    out.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    client = MlflowClient(uri, uri)
    artifacts = str((out / "artifacts").resolve())
    for run in runs:
        name = run.path.resolve().parent.name
        key = _digest(run)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
        for old in client.search_runs([experiment], f"tags.`summit_train.run` = '{key}'"):
            client.delete_run(old.info.run_id)
        rows = history(run)
        times = [round(1000 * row["time"]) for row in rows] or [0]
        tags = {"summit_train.run": key, "summit_train.folder": str(run.path.resolve())}
        run_id = client.create_run(experiment, times[0], tags, run.label).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in run.settings()]
        metrics = [
            Metric(name, value, time, round(row["step"]))
            for row, time in zip(rows, times, strict=False)
            for name, value in row.items()
            if name not in ("step", "time")
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        for first in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(run_id, metrics[first : first + _MOST_METRICS])
        client.set_terminated(run_id, "FINISHED" if run.is_done else "KILLED", times[-1])
    return [uri]


def write_wandb(runs: Sequence[RunRecord], out: Path) -> list[str]:
    """Write an offline run of W&B for each run, below OUT/wandb; `wandb sync` uploads it."""
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"--to wandb needs {error.name}: pip install 'summit_train[trackers]'") from error
    out.mkdir(parents=True, exist_ok=True)
    folders = []
    for run in runs:
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
        project = run.path.resolve().parent.name
        config = dict(run.settings())
        with wandb.init(
            mode="offline", dir=out, project=project, name=run.label, id=_digest(run), config=config, settings=quiet
        ) as logged:
            folders.append(str(Path(logged.dir).parent))
            for row in history(run):
                values = {name: value for name, value in row.items() if name not in ("step", "time")}
                logged.log(values | {"_timestamp": row["time"]}, step=round(row["step"]))
    wandb.teardown()  # W&B's own process writes the files, and returns from a run before it has
    return folders


Sink = Callable[[Sequence[RunRecord], Path], list[str]]
SINKS: dict[str, Sink] = {"csv": write_csv, "mlflow": write_mlflow, "wandb": write_wandb}
