"""`summit-train completion`: bash completes commands, options, choices and files by the script that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from summit_train.__main__ import _COMMANDS
from tests.worlds import ROOT, Say, refused

_COMPLETE = """
source completion.bash
complete -p summit-train >/dev/null
for line in "$@"; do
    IFS='|' read -ra COMP_WORDS <<<"summit-train|$line"
    [[ -z $line || $line == *'|' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _shtab_summit_train summit-train "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" 2>/dev/null
    echo "${COMPREPLY[*]}"
done
"""


def _completed(folder: Path, lines: Sequence[str]) -> list[set[str]]:
    """Return what bash offers for the last word of each line; words are divided by |."""
    done = subprocess.run(["bash", "-c", _COMPLETE, "bash", *lines], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_choices_and_files(say: Say, tmp_path: Path) -> None:
    status, script, err = say("completion", "bash")
    assert (status, err) == (0, "")
    (tmp_path / "completion.bash").write_text(script)
    (tmp_path / "mine.yaml").touch()
    expected = {
        "pl": {"plan"},
        "": {*_COMMANDS},
        "data|sp": {"split"},
        "bench|lo": {"loader"},
        "data|import|u": {"ucf101"},
        "data|pack|--kind|": {"bytes", "jpeg", "video"},
        "plan|--cl": {"--clips"},
        "plan|mi": {"mine.yaml"},
        "train|mine.yaml|--hos": {"--hosts"},
        "submit|mine.yaml|--site|mi": {"mine.yaml"},
        "completion|": {"bash", "zsh", "fish"},
    }
    assert dict(zip(expected, _completed(tmp_path, list(expected)), strict=True)) == expected


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef summit-train"), ("fish", "complete -c summit-train")])
def test_the_scripts_of_other_shells_have_every_command(say: Say, shell: str, line: str) -> None:
    status, script, _ = say("completion", shell)
    assert status == 0 and line in script
    assert [command for command in _COMMANDS if command not in script] == []


def test_shtab_is_needed_for_this_alone(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    right = "completion needs shtab; try pip install 'summit_train[completion]'"
    assert refused(say("completion", "bash")) == right
    assert say("completion", "csh")[0] == 2
    assert say("schema")[0] == 0


def test_the_lines_of_the_page_install_the_extra_and_make_the_folders(tmp_path: Path) -> None:
    """With stand-ins for pip and the program, in a home without folders."""
    (lines,) = re.findall(r"```\n([^`]*summit-train completion bash[^`]*)```", (ROOT / "docs/install.md").read_text())
    (tmp_path / "summit_train-1-py3-none-any.whl").touch()
    program = f'pip() {{ echo "$*"; }}\nsummit-train() {{ echo "$2"; }}\n{lines}'
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", program], cwd=tmp_path, env=home, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "install summit_train-1-py3-none-any.whl[completion]\n"), done.stderr
    assert (tmp_path / ".local/share/bash-completion/completions/summit-train").read_text() == "bash\n"
    assert (tmp_path / ".config/fish/completions/summit-train.fish").read_text() == "fish\n"
