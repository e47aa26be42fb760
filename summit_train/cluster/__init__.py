"""Site profiles, job scripts, the batch system, and the launcher's environment variables."""
