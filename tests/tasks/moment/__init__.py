"""When an event happens in a video: a third task. A test copies this folder into the package and adds its line."""

from summit_train.tasks.task import Task

TASK = Task(
    name="moment",
    about="the frame of an event",
    title="moment finder",
    kinds={"moment": "within"},
    parts={
        "keys": "tasks.moment.keys:MomentSpec",
        "problems": "tasks.moment.keys:problems",
        "annotation": "tasks.moment.events:Events",
        "loss": "tasks.moment.loss:build_loss",
        "scorer": "tasks.moment.scoring:MomentScorer",
        "measures": "tasks.moment.scoring:MEASURES",
        "report": "tasks.moment.section:read_section",
    },
    section="moment",
)
