"""The report of finished and unfinished runs: their records (metrics), tables, figures and one HTML page.

Nothing here imports torch, and `metrics` and `tables` not even matplotlib, so a script may read runs cheaply.
"""
