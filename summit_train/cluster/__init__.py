"""What the machine around the run says of itself, and the batch system that jobs are handed to."""
