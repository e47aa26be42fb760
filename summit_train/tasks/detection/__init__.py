"""The boxes of the objects in each frame: from the list and the network to measures, a report and a stream."""

from summit_train.tasks.task import Option, Task

TASK = Task(
    name="detection",
    about="the boxes and classes of the objects in each frame",
    title="detector",
    kinds={"detection": "map"},
    parts={
        "keys": "tasks.detection.keys:DetectorSpec",
        "problems": "tasks.detection.keys:problems",
        "network": "tasks.detection.rfcn:build_rfcn",
        "annotation": "tasks.detection.boxes:Boxes",
        "importers": "tasks.detection.importers:KINDS",
        "motion": "tasks.detection.moving_objects:MovingObjects",
        "loss": "tasks.detection.loss:build_loss",
        "scorer": "tasks.detection.scoring:DetectionScorer",
        "measures": "tasks.detection.detections:MEASURES",
        "report": "tasks.detection.section:read_section",
        "watcher": "tasks.detection.stream:BoxFinder",
        "latency": "tasks.detection.latency:measure_frames",
    },
    section="detector",
    whole_frames=True,
    motion=("boxes", "for detection: moving shapes with their boxes and tracks"),
    option=Option("score", "S", float, 1, "0 to 1", "detectors: lowest score shown [0.5]"),
)
