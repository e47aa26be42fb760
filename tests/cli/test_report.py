from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from summit_train.cli.report import add_arguments, run
from summit_train.core.errors import UserError


def arguments(*argv: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in argv])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny"
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text("name: tiny\n")
    (path / "eval.json").write_text(json.dumps({"top1_mean": 50.0, "checkpoints": []}))
    return path


def test_the_page_goes_into_the_first_run_and_its_path_is_printed(run_dir, capsys):
    assert run(arguments(run_dir)) == 0
    out = run_dir / "report.html"
    assert capsys.readouterr().out == f"{out}\n" and "50.00 %" in out.read_text()


def test_out_names_another_file(run_dir, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert run(arguments(run_dir, "--out", out)) == 0
    assert out.is_file() and not (run_dir / "report.html").exists()


def test_what_is_no_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        run(arguments(tmp_path))


def test_where_no_page_can_be_written_is_the_users_mistake(run_dir):
    with pytest.raises(UserError, match=r"spec\.yaml.*--out FILE\.html"):
        run(arguments(run_dir, "--out", run_dir / "spec.yaml" / "page.html"))


def test_a_run_directory_is_required(capsys):
    with pytest.raises(SystemExit) as stopped:
        arguments()
    assert stopped.value.code == 2 and "RUN_DIR" in capsys.readouterr().err
