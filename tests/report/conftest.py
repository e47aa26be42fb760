from __future__ import annotations

import pytest

from summit_train.report import figures
from tests.run_directories import run_records, write_run

__all__ = ["run_records", "write_run"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not drawn, which takes most of a page's time: for tests of what stands around them."""
    monkeypatch.setattr(figures, "image", lambda figure: b"<svg/>")
