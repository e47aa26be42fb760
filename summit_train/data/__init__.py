"""Videos: which, when, which frames, which pixels."""
