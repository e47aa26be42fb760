from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import SITE
from tests.standins import Standins


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standins:
    """Stand-ins for the commands of schedulers and launchers, first on PATH, in a folder whose name has a space."""
    found = Standins(tmp_path / "stand ins")
    for name in ("STANDINS", "PATH"):
        monkeypatch.setenv(name, found.environ[name])
    return found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the tests' Slurm."""
    path = tmp_path_factory.mktemp("site") / "two_nodes.yaml"
    path.write_text(SITE)
    return path
