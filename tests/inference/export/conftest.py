"""Exports that several tests share: the exporter takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summit_train.inference.export import export as module
from summit_train.inference.export.export import Export
from summit_train.inference.trained import open_trained
from tests.conftest import made_once


def run_export(trained: Path, out: Path, *overrides: str, said: list[str] | None = None, **options: Any) -> Any:
    """Export to `out`; return the description."""
    tell = (said if said is not None else []).append
    return Export(open_trained(trained, overrides), out, tell=tell, **options).run()


@pytest.fixture(scope="session")
def stream_file(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported stream of the trained run, with its description."""

    def make(folder: Path) -> None:
        run_export(trained_run, folder / "new/stream.onnx", stream=True)

    return made_once(tmp_path_factory, "exported", make) / "new/stream.onnx"


@pytest.fixture
def without_exporter(stream_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter gives the stream that it gave before."""
    monkeypatch.setattr(module, "exported", lambda *_, stream: stream_file.read_bytes())
