"""A trained network for other runtimes."""
