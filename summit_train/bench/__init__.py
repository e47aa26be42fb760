"""Measurements of this machine: `summit-train bench`."""
