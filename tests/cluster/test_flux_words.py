"""The Flux scripts as Flux's own command line reads them (flux-python): directives, and the words of flux run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_job import CASES, script
from tests.worlds import ROOT

FOLDER = ROOT / "build/flux"  # where tests/install.sh puts it
FLUX = [case for case in CASES if case.startswith(("el_capitan", "flux_generic"))]
pytestmark = pytest.mark.skipif(
    not (FOLDER / "flux").is_dir() and importlib.util.find_spec("flux") is None,
    reason="needs flux-python in build/flux; `make test` installs it",
)


def _read(*words: object) -> dict[str, Any]:
    """The job specification."""
    command = [sys.executable, str(ROOT / "tests/flux_words.py"), *map(str, words)]
    environ = os.environ | {"PYTHONPATH": f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _batch(folder: Path, text: str) -> dict[str, Any]:
    """What the directives of a script ask for."""
    (folder / "job.sh").write_text(text)
    return _read("batch", folder / "job.sh")


def _launch(text: str, hosts: list[str]) -> list[str]:
    """The words of flux run in a script, as bash makes them and the job keeper fills them."""
    line = text[text.index("    flux run ") : text.rindex(" -- ")]
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    values = {"hosts": ",".join(hosts), "nodes": len(hosts), "ranks": 4 * len(hosts)}
    flux, run, *words = (word.format(**values) for word in done.stdout.splitlines())
    assert (flux, run) == ("flux", "run")
    return words


def test_the_directives_ask_for_the_job(tmp_path):
    system = (spec := _batch(tmp_path, script("el_capitan-many")))["attributes"]["system"]
    (node,) = spec["resources"]
    assert (node["type"], node["count"], node["exclusive"]) == ("node", 16, True)
    assert (system["duration"], system["job"]["name"], system["thp"]) == (33 * 60, "O_Neil_sons", "always")
    assert system["shell"]["options"]["signal"] == {"signum": 12, "timeleft": 300}
    (spare,) = _batch(tmp_path, script("flux_generic-spare"))["resources"]
    assert spare["count"] == 18


@pytest.mark.parametrize("case", FLUX)
def test_flux_run_starts_the_ranks_on_the_hosts(case):
    nodes = 1 if case.endswith("one") else 16
    hosts = [f"n{number}" for number in range(1, nodes + 1)]
    spec = _read("run", *_launch(script(case), hosts), "python", "-m", "summit_train")
    (node,) = spec["resources"]
    (slot,) = node["with"]
    assert (node["count"], node["exclusive"], slot["count"]) == (nodes, True, 4)
    assert spec["tasks"][0]["command"] == ["python", "-m", "summit_train"]
    options = spec["attributes"]["system"]["shell"]["options"]
    affinity = (options["exit-on-error"], options["cpu-affinity"], options["gpu-affinity"])
    assert affinity == (1, "per-task", "off")
    assert spec["attributes"]["system"]["constraints"] == {"hostlist": [",".join(hosts)]}


def test_what_flux_does_not_know_is_refused(tmp_path):
    """Else the tests above would prove nothing."""
    text = script("flux_generic-one")
    for old, new in (("--exclusive", "--exclusively"), ("# whole nodes", "true"), ("@300s", "@300x")):
        with pytest.raises(AssertionError):
            _batch(tmp_path, text.replace(old, new, 1))
