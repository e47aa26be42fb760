"""The report of finished and unfinished runs: records of runs, tables, figures, one HTML page.

This package needs no torch; `records` and `tables` need no matplotlib either.
"""
