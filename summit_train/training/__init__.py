"""The run: step, loop, checkpoint, evaluation, watch."""
