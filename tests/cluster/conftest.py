from __future__ import annotations

from pathlib import Path

import pytest

from tests.standins import Standins


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standins:
    """Stand-ins for the commands of schedulers and launchers, first on PATH, in a folder whose name has a space."""
    found = Standins(tmp_path / "stand ins")
    for name in ("STANDINS", "PATH"):
        monkeypatch.setenv(name, found.environ[name])
    return found
