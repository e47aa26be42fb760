"""The report of finished and unfinished runs: records (metrics), tables, figures, one HTML page.

This package needs no torch; `metrics` and `tables` need no matplotlib either.
"""
