"""Object detection in videos, frame by frame: targets, losses, boxes and their measures."""
