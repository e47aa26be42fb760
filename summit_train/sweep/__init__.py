"""A sweep: many runs from one file, planned, started and followed."""
