from __future__ import annotations

from tests.run_directories import run_records, write_run

__all__ = ["run_records", "write_run"]
