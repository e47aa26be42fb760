"""The class of a clip, or its classes."""

from summit_train.tasks.task import Option, Task

TASK = Task(
    name="classification",
    about="the class of a clip",
    title="classifier",
    kinds={"softmax": "top1", "binary": "map"},
    parts={
        "loss": "training.loss:build_loss",
        "scorer": "evaluation.scoring:Scorer",
        "measures": "tasks.classification.measures:MEASURES",
        "watcher": "tasks.classification.stream:Labeller",
    },
    gives_labels=True,
    option=Option("window", "N", int, 10**9 - 1, "0 or more", "average N frames; 0: all [data.num_frames]"),
)
