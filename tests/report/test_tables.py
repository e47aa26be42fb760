from __future__ import annotations

import json

from summit_train.core.text import show
from summit_train.report.records import RunRecord
from summit_train.report.results import ClipsPerClass
from summit_train.report.tables import (
    class_rows,
    differences_of,
    machine_of,
    notes_of,
    remarks_of,
    rows,
    start_rows,
    summary_row,
)


def test_the_summary_without_a_final_evaluation_and_before_the_start(write_run):
    run = RunRecord(write_run(leave_out=("eval.json",)))
    assert summary_row(run)["top1"] == "97.00 % (epoch 4)"
    assert notes_of(run) == ["eval.json is missing: there was no final evaluation"]
    row = summary_row(RunRecord(write_run("new", leave_out=("metrics.jsonl", "eval.json", "plan.json"))))
    assert {row["scale"], row["global_batch"], row["top1"], row["top5"], row["clips_per_second"], row["seconds"]} == {
        "—"
    }
    assert row["epochs"] == "— of 4"


def test_uneven_shares_have_the_mean_accumulation(write_run, run_records):
    lines = [line | {"ranks": 3} if line["kind"] == "start" else line for line in run_records()]
    assert summary_row(RunRecord(write_run(lines=lines)))["scale"] == "3 × 1.33 = 4"


def test_a_run_that_was_killed_and_resumed_says_so(write_run, run_records):
    lines = [line for line in run_records() if line["step"] <= 25]
    lines[4]["skipped"] = 1
    next(line for line in lines if (line["kind"], line["step"]) == ("step", 20))["bad_clips"] = 3
    lines.append({"kind": "start", "step": 20, "ranks": 1, "time": "noon"})
    run = RunRecord(write_run(lines=lines))
    assert summary_row(run)["scale"] == "2 × 2 then 1 × 4 = 4" and summary_row(run)["epochs"] == "2 of 4"
    assert notes_of(run) == [
        "Unfinished: 20 of 40 steps are done",
        "1 step without an update, the gradient was not finite: 4",
        "3 times a clip could not be read and another took its place: see bad_clips.jsonl",
        "Resumed once; 5 steps done again",
    ]
    assert start_rows(run) == [("2023-11-14 22:13:20 UTC", "0", "2", "—", "0"), ("noon", "20", "1", "—", "5")]


def test_the_time_to_the_first_step_counts_from_the_process(write_run):
    start = {"kind": "start", "step": 0, "ranks": 2, "startup_s": 12.5}
    step = {"kind": "step", "epoch": 0, "loss": 1.0, "top1": 0.0, "lr": 0.1, "step_s": 1.0, "data_wait_s": 0.0}
    times = [(start, 1000.0), (step | {"step": 1}, 1007.5), (step | {"step": 2}, 1009.0), (start | {"step": 2}, 2000.0)]
    run = RunRecord(write_run(lines=[line | {"time": time} for line, time in times]))
    assert [row[3] for row in start_rows(run)] == ["20 s", "—"]


def test_a_mean_over_too_few_checkpoints_and_the_best_are_remarked(write_run):
    path = write_run()
    validated = "Validation during training: last 97.00 % (epoch 4), best 97.00 % (epoch 4)"
    sure = "95 % interval of top-1: 89.30 to 99.14 %"
    assert remarks_of(RunRecord(path)) == [sure, validated]
    with open(path / "spec.yaml", "a") as spec:
        spec.write("evaluate: {last_checkpoints: 3}\n")
    (path / "checkpoints").mkdir()
    (path / "checkpoints/best.json").write_text('{"step": 2000, "measure": "top1", "value": 71.256}')
    final = json.loads((path / "eval.json").read_text()) | {"top1_macro_mean": 71.256}
    (path / "eval.json").write_text(json.dumps(final))
    assert remarks_of(RunRecord(path)) == [
        sure,
        "macro top-1, the mean over the classes: 71.26 %",
        "The mean is over 2 checkpoints, fewer than evaluate.last_checkpoints, 3",
        validated,
        "Best checkpoint: step 2,000, top1 71.26 % in the validation during training",
    ]


def test_where_a_line_of_checkpoints_began_is_noted(write_run, run_records):
    """The run's own result has checkpoints 30 and 40: if a line began at 30, one of them is of the one before."""
    for step, earlier in ((20, []), (30, ["from the experiment before step 30"])):
        lines = [line for line in run_records() if line["step"] <= step]
        lines.append({"kind": "more_epochs", "step": step, "from": 3, "to": 4})
        run = RunRecord(write_run(f"longer_{step}", lines=lines))
        since = f"4 epochs instead of 3 since step {step} (--more-epochs); only checkpoints after it are in the mean"
        assert since in notes_of(run) and run.final is not None
        assert run.log.evals and remarks_of(run)[1:] == earlier  # no validation is of the new line
        assert differences_of(run.final, run) == (earlier[0] if earlier else "—")


def test_an_older_run_that_became_another_experiment_is_noted(write_run, run_records):
    lines = [line for line in run_records() if line["step"] <= 30]
    lines.append({"kind": "start", "step": 30, "ranks": 2, "forced": ["seed: the checkpoint has 0, this run 1"]})
    run = RunRecord(write_run("forced", lines=lines))
    since = "Another experiment since step 30; only its checkpoints are in the mean"
    assert f"{since}: seed: the checkpoint has 0, this run 1" in notes_of(run)
    assert run.final is not None and differences_of(run.final, run) == "from the experiment before step 30"


def test_nested_values_become_dotted_rows():
    nested = {"torch": {"version": "2.13.0", "threads": 2}, "gpus": [], "mpi": None, "ok": True, "lr": 1 / 3}
    assert rows(nested) == [
        ("torch.version", "2.13.0"),
        ("torch.threads", "2"),
        ("gpus", ""),
        ("mpi", "—"),
        ("ok", "yes"),
        ("lr", "0.333333"),
    ]


def test_the_machine_for_the_captions():
    laptop = {"hosts": {"box": 2}, "device": "cpu", "processor": "Fast CPU", "cores": 2, "torch": "2.13"}
    assert machine_of(laptop) == "box, Fast CPU, 2 cores"
    summit = {"hosts": {f"node{i}": 6 for i in range(256)}, "device": "Tesla V100", "processor": "POWER9"}
    assert machine_of(summit) == "256 hosts, Tesla V100"
    assert machine_of({}) == ""
    assert rows(summit)[0] == ("hosts", show([f"node{i} 6" for i in range(256)]))


def test_clips_of_few_classes_are_a_row_each(write_run):
    counts = {"train": {"jump": 1200, "run": 3}, "val": {"run": 2, "swim": 4}}
    run = RunRecord(write_run(clips_per_class=counts))
    assert run.clips_per_class is not None and "clips_per_class" not in run.plan
    assert class_rows(run.clips_per_class) == [
        ("jump", "1,200", "0"), ("run", "3", "2"), ("swim", "0", "4"), ("all 3 classes", "1,203", "6"),
    ]  # fmt: skip
    many = ClipsPerClass(train={str(i): i for i in range(31)}, val={"0": 7})
    assert class_rows(many) == [("all 31 classes", "465", "7")]
    assert notes_of(run) == ["Classes without training clips: swim", "Classes without validation clips: jump"]


def test_validation_clips_that_were_trained_on_are_noted(write_run):
    run = RunRecord(write_run())
    assert not any("trained on" in note for note in notes_of(run))
    for number, clips in ((1, "1 validation clip"), (1200, "1,200 validation clips")):
        run.plan["shared_clips"] = number
        assert f"{clips} also trained on: the accuracy is too high" in notes_of(run)
    run.plan["shared_groups"] = 2
    assert "2 validation groups also trained on: the accuracy is too high" in notes_of(run)


def test_averages_and_a_batch_that_grew_are_noted(write_run, run_records):
    """Averages after steps 10 and 20; the run goes on from step 10, so the second one is made again."""
    lines = run_records()
    ends = {10: 0.5, 20: 0.25}
    lines += [{"kind": "average", "step": step, "epoch": 0, "seconds": s, "bytes": 2e6} for step, s in ends.items()]
    lines += [{"kind": "start", "step": 10, "ranks": 2}, {"kind": "average", "step": 20, "seconds": 1.5, "bytes": 2e6}]
    keys = {"accuracy": 10.0, "best": 20.0}
    for epoch, clips in ((1, 2), (2, 4), (3, 4), (4, 1000)):
        lines.append({"kind": "batch", "epoch": epoch, "clips_per_gpu": clips, "global_batch": 4 * clips, **keys})
    run = RunRecord(write_run(lines=lines))
    assert [(one.step, one.seconds) for one in run.log.averages] == [(10, 0.5), (20, 1.5)]
    share = f"{100 * 2 / run.log.seconds:.1f} % of the recorded time"
    notes = notes_of(run)
    assert f"2 averages of the learners' networks: 2.0 s, {share}, 4.0 MB from each rank" in notes
    assert "The batch of a learner began with 2 clips and grew to 4 after epoch 2, 1,000 after epoch 4" in notes
