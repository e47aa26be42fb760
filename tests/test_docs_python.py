"""docs/python.md and docs/notebook.ipynb run, and find what `eval` found; the page has the public docstrings."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from summit_train import load
from summit_train.core.errors import UserError
from summit_train.data.manifest import read_manifest
from summit_train.inference.loaded import Loaded, Sample
from tests.worlds import environment

DOCS = Path(__file__).resolve().parents[1] / "docs"
needs_jupyter = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
    reason="needs nbclient and ipykernel; `make setup` installs both",
)


@pytest.fixture
def folder(trained_run: Path, motion_set: Path, tmp_path: Path) -> Path:
    """A folder as the pages assume: a run runs/mine, and a video."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").symlink_to(trained_run)
    (tmp_path / "clip.mp4").symlink_to(motion_set / read_manifest(motion_set / "val.csv").path(0))
    return tmp_path


def _top1(run: Path) -> str:
    return f"{json.loads((run / 'eval.json').read_text())['top1_last']:.2f} %"


def test_the_page_runs(folder: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(encoding="utf-8"), re.S | re.M)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    predicted, accuracy, _, shape = capsys.readouterr().out.splitlines()
    assert predicted.startswith("[{'label': ") and (accuracy, shape) == (_top1(trained_run), "torch.Size([2, 4])")
    assert len(names["wrong"]) == names["total"] - names["right"] and names["features"].shape[0] == 4


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(codes) == 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)


@needs_jupyter
@pytest.mark.nightly
def test_the_notebook_runs(folder: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert f"top-1 {_top1(trained_run)} of 11 videos" in text and "after 20 steps" in text
    assert len([output for output in outputs if "image/png" in output.get("data", ())]) == 4


@pytest.mark.nightly
def test_the_reference_page_shows_the_public_docstrings(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "conf.py", tmp_path / "docs")
    shutil.copytree(DOCS / "_static", tmp_path / "docs" / "_static")
    _, _, names = (DOCS / "python.md").read_text(encoding="utf-8").partition("\n## Public names\n")
    (tmp_path / "docs/index.md").write_text(f"# Public names\n{names}")
    words = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "text", "-d", "trees", "docs", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    shown, marks = (tmp_path / "out/index.txt").read_text(), str.maketrans("", "", '`"')
    public = [load, Sample, UserError, *(value for name, value in vars(Loaded).items() if not name.startswith("_"))]
    for one in public:
        first = (inspect.getdoc(one) or "").splitlines()[0]
        assert first and first.translate(marks) in " ".join(shown.translate(marks).split()), first
    for name in ("summit_train.load", "build_model", "accelerate", "predict", "features", "Sample"):
        assert f"{name}(" in shown or f"{name}\n" in shown, name
