"""A past-only network on a live video, frame by frame."""
