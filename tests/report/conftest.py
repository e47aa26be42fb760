from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from tests.run_directories import write_run as write_run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not drawn, which takes most of a page's time: for tests of what stands around them."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, content, **_: content.write(b"<svg/>"))
