"""The metadata of the wheel, the recipes in jobs/packages and the Containerfile against setup.cfg."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from summit_train import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "jobs/packages"
(EASYCONFIG,) = (PACKAGES / "easybuild").glob("*.eb")
CONTAINERFILE = (ROOT / "jobs/Containerfile").read_text(encoding="utf-8")

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")


def _needs(text: str) -> dict[str, str]:
    """Return the lower bound of each requirement, and "" of one without. A release that is left out is not compared."""
    needs = (
        re.fullmatch(r"([\w-]+)\s*(?:>=([\d.]+))?(?:,!=[\d.]+)?", line) for line in text.split("\n") if line.strip()
    )
    return {need[1]: need[2] or "" for need in needs if need}


NEEDS = _needs(SETUP["options"]["install_requires"])
PYTHON = SETUP["options"]["python_requires"].removeprefix(">=")
SUMMARY = SETUP["metadata"]["description"]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_every_requirement_has_a_lower_bound_and_no_upper_one() -> None:
    lines = SETUP["options"]["install_requires"].split()
    assert len(NEEDS) == 10 and all(NEEDS.values()) and len(lines) == 2 * len(NEEDS), lines


def test_the_metadata_is_that_of_the_citation_and_names_no_licence_and_no_page() -> None:
    metadata = SETUP["metadata"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert metadata["author"] == citation["authors"][0]["name"] and metadata["name"] == citation["title"]
    assert metadata["keywords"].split(", ") == citation["keywords"]
    assert (
        not {"license", "license_files", "url", "project_urls"} & set(metadata)
        and "License" not in metadata["classifiers"]
    )
    assert "license" not in citation and not list(ROOT.glob("LICEN[CS]E*"))
    assert "The owner has not named a licence yet." in (ROOT / "README.md").read_text(encoding="utf-8")
    oldest = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])[0]
    assert oldest == PYTHON


def test_the_description_needs_no_checkout() -> None:
    name = SETUP["metadata"]["long_description"].removeprefix("file: ")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.startswith("# summit_train\n") and not re.search(r"\]\(|<\w+ |https?:", text)


def test_the_conda_recipe_has_the_requirements() -> None:
    recipe = yaml.safe_load((PACKAGES / "conda-forge/recipe.yaml").read_text(encoding="utf-8"))
    assert (recipe["context"], recipe["about"]) == (
        {"version": __version__, "python_min": PYTHON},
        {"summary": SUMMARY},
    )
    run = _needs("\n".join(line for line in recipe["requirements"]["run"] if "$" not in line))
    assert run.pop("__linux") == ""
    names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    assert {names.get(name, name): bound for name, bound in run.items()} == NEEDS
    (script,) = recipe["build"]["python"]["entry_points"]
    assert script == SETUP["options.entry_points"]["console_scripts"].strip()


def test_the_spack_recipe_has_the_requirements() -> None:
    (package,) = (
        node
        for node in ast.parse((PACKAGES / "spack/package.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert package.name == "PySummitTrain" and ast.get_docstring(package) == f"{SUMMARY}."
    calls = [node.value for node in package.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    named = [(ast.unparse(call.func), ast.literal_eval(call.args[0])) for call in calls]
    assert [word for name, word in named if name == "version"] == [__version__]
    found = dict(word.split(":")[0].split("@") for name, word in named if name == "depends_on")
    assert found.pop("python") == PYTHON and found.pop("py-setuptools") in (ROOT / "pyproject.toml").read_text()
    assert {name.removeprefix("py-"): bound for name, bound in found.items()} == NEEDS
    (url,) = (ast.literal_eval(node.value) for node in package.body if isinstance(node, ast.Assign))
    assert url.endswith(f"/summit_train-{__version__}.tar.gz")


def test_the_easyconfig_has_the_requirements() -> None:
    """The modules that bring several packages are named in comments there."""
    text = EASYCONFIG.read_text(encoding="utf-8")
    values = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    name, version, summary = (ast.literal_eval(values[key]) for key in ("name", "version", "description"))
    assert (name, version, summary) == ("summit_train", __version__, SUMMARY)
    toolchain = ast.literal_eval(values["toolchain"])
    assert EASYCONFIG.name == f"{name}-{version}-{toolchain['name']}-{toolchain['version']}.eb"
    modules = {module.lower(): release for module, release in ast.literal_eval(values["dependencies"])}
    (av,) = re.findall(r"\('av', '([\d.]+)'", text)
    assert _numbers(modules.pop("python")) >= _numbers(PYTHON)
    bundles = {"jinja2": "python-bundle-pypi", "rich": "python-bundle-pypi", "numpy": "scipy-bundle"}
    single = {"torch": modules.pop("pytorch"), "av": av, **modules}
    for package, bound in NEEDS.items():
        if package in bundles:
            assert re.search(rf"\('{bundles[package]}', .*# .*\b{package}\b", text, re.I), package
        else:
            assert _numbers(single[package]) >= _numbers(bound), package
    assert modules.keys() - NEEDS.keys() == set(bundles.values())


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", CONTAINERFILE, flags=re.M).replace("\\\n", "")
    return [(words[0], words[1]) for words in (line.split(maxsplit=1) for line in text.splitlines())]


def test_the_container_is_made_from_the_wheel_alone() -> None:
    found = _instructions()
    assert [words for name, words in found if name in ("COPY", "ADD")] == ["summit_train-*.whl /opt/wheel/"]
    runs = " ".join(words for name, words in found if name == "RUN")
    assert "make setup" not in runs and "[export]" in runs and "export" in SETUP["options.extras_require"]
    (pins,) = re.findall(r"/tmp/wheel/(summit_train/jobs/[\w.]+)", runs)
    assert (ROOT / pins).read_text().count("\ntorch==") == 1
    arguments = {words.partition("=")[0] for name, words in found if name == "ARG"}
    assert arguments == {"BASE", "HOROVOD", "TORCH"}
    page = (ROOT / "docs/clusters/sites.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--build-arg\s+(\w+)=", page)) == arguments


@pytest.mark.parametrize("torch", ["", "torch==2.9.0"])
def test_the_container_installs_the_torch_that_is_asked_for(torch: str, tmp_path: Path) -> None:
    """Run the lines that choose it, with a stand-in for pip."""
    (install,) = (words for name, words in _instructions() if name == "RUN" and "pip install" in words)
    pins = tmp_path / "constraints.txt"
    pins.write_text("av==18.1.0\ntorch==2.13.0\ntorchvision==1\n")
    lines = install[install.index("pins=") :].replace("/tmp/", f"{tmp_path}/").replace("/opt/", f"{tmp_path}/")
    lines = re.sub(r"pins=\S+", f"pins={pins}", lines)
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel/summit_train-1-py3-none-any.whl").touch()
    pip = 'pip() { echo "$*"; cat "$4"; }; '
    done = subprocess.run(
        ["sh", "-ec", pip + lines], env={"TORCH": torch, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert said[0].endswith(f" {torch or 'torch==2.13.0'}") and said[3].endswith(".whl[export]")
    assert said[1:3] == ["av==18.1.0", "torchvision==1"]
