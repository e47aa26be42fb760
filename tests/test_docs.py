"""README.md, docs/ and papers/ against what there is: links, files, commands and options, specs, keys of a sweep."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from pydantic_core import PydanticUndefined

import summit_train
from summit_train.__main__ import _COMMANDS, _parser, main
from summit_train.cluster.site import load_site
from summit_train.spec import load_spec
from summit_train.spec.source import shipped_names
from summit_train.sweep.grid import SweepFile, load_sweep
from tests.scale import WHAT

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "summit_train"
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))  # of the site
OUTSIDE = sorted((ROOT / "papers").glob("*.md"))
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in [README, *PAGES, *OUTSIDE]}
ALL = "\n".join(TEXTS.values())

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
# Command lines in blocks, with or without a launcher in front; continued lines are one.
LINES = [
    (page, line)
    for page, text in TEXTS.items()
    for _, block in _FENCE.findall(text)
    for line in re.findall(r"^[^#\n]*?(summit-train .*)", block.replace("\\\n", ""), re.M)
]


def _prose(page: str) -> str:
    """Return the page without its blocks of code."""
    return _FENCE.sub("", TEXTS[page])


def _anchors(page: str) -> set[str]:
    """Return what GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)", _prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links(page: str) -> list[tuple[str, str]]:
    """Return (page or file that a relative link leads to, anchor or nothing), both from the repository's root."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", _prose(page)):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            found.append((str(file.resolve().relative_to(ROOT)), anchor))
    return found


def test_the_changelog_begins_with_this_version() -> None:
    first = re.findall(r"^## (.*)$", TEXTS["docs/changelog.md"], re.M)[0]
    assert re.fullmatch(rf"{re.escape(summit_train.__version__)}, \d{{4}}-\d\d-\d\d", first)


def test_the_reader_of_links_sees_them() -> None:
    assert ("docs/demo.svg", "") in _links("README.md")
    assert ("docs/design.md", "packages") in _links("docs/contributing.md")
    assert "which-pytorch-supports-v100s" in _anchors("docs/install.md")


def test_every_link_leads_somewhere() -> None:
    for page in TEXTS:
        for path, anchor in _links(page):
            assert (ROOT / path).is_file(), f"{page}: {path}"
            assert not anchor or anchor in _anchors(path), f"{page}: {path}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = {"README.md"}, ["README.md"]
    while left:
        new = {path for path, _ in _links(left.pop()) if path in TEXTS} - reached
        reached |= new
        left += new
    outside = {str(page.relative_to(ROOT)) for page in OUTSIDE}
    assert reached == set(TEXTS) - outside - {"docs/index.md"}  # the site's own list of pages
    assert outside == set(re.findall(r"`(papers/\w+\.md)`", TEXTS["docs/papers.md"]))


def test_every_file_and_every_module_that_is_named_exists() -> None:
    files = set(re.findall(r"`((?:tests|configs|jobs|docs|bench|papers)/[\w./-]+)`", ALL))
    assert [path for path in files if not (ROOT / path).exists()] == []
    modules = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|sh))`", ALL))
    assert [path for path in modules if not any((top / path).is_file() for top in (ROOT, PACKAGE))] == []
    shipped = set(re.findall(r"shipped:([\w/]+\w)", ALL)) - {"NAME", "sites/NAME"}
    assert len(shipped) > 20 and shipped <= set(shipped_names())
    assert len(re.findall(r"`tests/[\w./-]+`", TEXTS["docs/guarantees.md"])) >= 20


def test_the_tree_of_the_house_is_the_packages() -> None:
    block = next(block for _, block in _FENCE.findall(TEXTS["docs/design.md"]) if block.startswith("summit_train/"))
    found, folder = set(), PACKAGE
    for indent, name in re.findall(r"^( +)([\w.]+/?)", block, re.M):
        folder = PACKAGE if len(indent) == 2 else folder
        assert (folder / name).exists(), name
        found.add(name.rstrip("/"))
        folder = PACKAGE / name if len(indent) == 2 and name.endswith("/") else folder
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert folders <= found


def test_the_index_has_every_page() -> None:
    named = re.findall(r"^([a-z][\w/]*)$", TEXTS["docs/index.md"], re.M)
    pages = [str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES]
    assert sorted([*named, "index"]) == sorted(pages)


def test_the_readme_is_an_overview_and_names_code_to_read_and_every_command() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 130
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| \w", text, re.M)
    assert len(rows) == 6 and all((PACKAGE / row).is_file() for row in rows)
    assert set(re.findall(r"`summit-train ([\w-]+)`", "".join(re.findall(r"^\| .*", text, re.M)))) == set(_COMMANDS)


def test_the_picture_is_small_and_draws_what_it_says() -> None:
    picture = ROOT / "docs" / "demo.svg"
    assert picture.stat().st_size < 8_000
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()]
    assert tags.count("polyline") == 2 and tags.count("circle") == 12


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "setup"} <= set(re.findall(r"(?:^|`)make ([a-z-]+)", ALL, re.M)) <= targets


def test_every_command_that_is_named_exists_and_has_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for words in set(re.findall(r"summit-train (data [a-z]+|[a-z-]+)", ALL)):
        with pytest.raises(SystemExit) as ended:
            main([*words.split(), "--help"])
        assert ended.value.code == 0, words
    assert len(LINES) > 60 and len([page for page, _ in LINES if "clusters" in page]) > 15
    assert {line.split()[1] for _, line in LINES} == set(_COMMANDS)


# Lines of blocks; those of `bench` also where they are quoted in a sentence, over the end of a line too.
@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_every_line_is_taken(command: str) -> None:
    parser, _ = _parser([command])
    quoted = [("a sentence", line) for line in re.findall(r"`(summit-train bench [^`]*--[^`]*)`", ALL)]
    for page, line in [*LINES, *quoted]:
        words = shlex.split(line.split(" > ")[0].split(" && ")[0], comments=True)
        if words[1] != command:
            continue
        _, left = parser.parse_known_args(["1" if word in ("N", "X") else word for word in words[1:]])
        assert all("=" in word and not word.startswith("-") for word in left), f"{page}: {line}"
        assert not any(word.startswith("configs/") for word in words), f"{page}: {line}: a shipped file has a name"


def test_every_measurement_of_limits_that_is_named_exists() -> None:
    named = re.findall(r"python -m tests\.scale (\w+)(?: [\d,]+)?", ALL)
    assert {"ranks", "accumulation", "films", "lists"} <= set(named) <= set(WHAT)


def test_the_published_figures_of_video_detection_have_the_gain_that_the_paper_names() -> None:
    """ "especially on the fast moving objects, where TSM increases mAP by 4.6%"; each row has all figures."""
    rows = [line.strip("|").split("|") for line in TEXTS["docs/detection.md"].splitlines() if line.count("|") == 7]
    figures = {(row[0], row[-1]): list(map(float, row[1:5])) for row in rows[2:]}
    assert len(figures) == 6
    table = "TSM, Table 9"
    gain = figures["Online TSM, ResNet-101", table][3] - figures["R-FCN, ResNet-101", table][3]
    assert gain == pytest.approx(4.6)


def _example(page: str) -> str:
    """Return the first block of YAML on a page."""
    return next(block for language, block in _FENCE.findall(TEXTS[page]) if language == "yaml")


def test_the_examples_are_specs(tmp_path: Path) -> None:
    for page, name in (("README.md", "kinetics"), ("docs/detection.md", "moving")):
        (tmp_path / "spec.yaml").write_text(_example(page))
        assert load_spec(tmp_path / "spec.yaml").name == name
    (tmp_path / "spec.yaml").write_text(_example("docs/first_project.md"))
    spec = load_spec(tmp_path / "spec.yaml")
    assert (spec.name, spec.model.freeze_bn, spec.data.crop) == ("videos", "all_but_first", 112)
    assert spec.model.backbone == "mobilenet_v2" and f"'{spec.model.pretrained}')" in TEXTS["docs/first_project.md"]


def test_the_flow_stream_extends_the_rgb_run(tmp_path: Path) -> None:
    (tmp_path / "rgb.yaml").write_text(_example("README.md"))
    (tmp_path / "flow.yaml").write_text(_example("docs/two_streams.md"))
    rgb, flow = (load_spec(tmp_path / f"{name}.yaml") for name in ("rgb", "flow"))
    assert (flow.data.modality, flow.model.pretrained, flow.optimizer.first_lr_factor) == ("flow", "runs/rgb", 5)
    assert flow.schedule == rgb.schedule


def test_the_page_on_detection_shows_the_spec_whose_figures_it_gives(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(_example("docs/detection.md"))
    own = {"name": True, "run_dir": True, "data": {"train", "val", "workers"}}
    page, shipped = map(load_spec, (tmp_path / "spec.yaml", ROOT / "configs/motion/boxes_tsm.yaml"))
    assert page.model_dump(exclude=own) == shipped.model_dump(exclude=own)


def test_the_sweeps_example_is_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(_example("README.md"))
    (tmp_path / "sweep.yaml").write_text(_example("docs/sweeps.md"))
    runs = load_sweep(tmp_path / "sweep.yaml").runs
    assert [run.nodes for run in runs] == [2, 4, 2, 4, 2, 4, 2, 4, 1]
    assert [run.spec.optimizer.lr_scaling for run in runs] == ["linear"] * 4 + ["sqrt"] * 4 + ["linear"]
    assert all(run.spec.schedule.epochs == 50 for run in runs)


def test_the_example_of_folds_is_a_sweep(tmp_path: Path) -> None:
    _, folds = (block for language, block in _FENCE.findall(TEXTS["docs/sweeps.md"]) if language == "yaml")
    (tmp_path / "mine.yaml").write_text(_example("README.md"))
    (tmp_path / "folds.yaml").write_text(folds)
    runs = load_sweep(tmp_path / "folds.yaml").runs
    assert len(runs) == 3 * 2 * 5 and runs[0].name in TEXTS["docs/sweeps.md"]


def test_the_rows_of_how_do_i_are_commands_and_keys(tmp_path: Path) -> None:
    rows = re.findall(r"^\|[^|]*\|`([^`]*)`([^|]*)\|", TEXTS["docs/how_do_i.md"].split("## Glossary")[0], re.M)
    assert len(rows) >= 30
    base = {
        "name": "t",
        "extends": "shipped:tsm_finetune",
        "model": {"num_classes": 3, "pretrained": "w.pth"},
        "data": {"train": "a", "val": "b"},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    for text, condition in rows:
        if text.startswith("summit-train "):
            words = shlex.split(text)[1:]
            _, left = _parser(words[:1])[0].parse_known_args(words)
            assert all("=" in word and not word.startswith("-") for word in left), text
        elif "site profile" in condition:
            profile = f"{_example('docs/clusters/sites.md')}comm: torch\nlauncher_options: []\n{text}\n"
            (tmp_path / "site.yaml").write_text(profile)
            assert load_site(tmp_path / "site.yaml").container is not None
        elif re.match(r"\w+: ", text):
            (tmp_path / "spec.yaml").write_text(f"extends: base.yaml\n{text}\n")
            load_spec(tmp_path / "spec.yaml")


def test_the_table_of_a_sweeps_keys_has_every_key_with_its_default() -> None:
    shown = {}
    for line in re.findall(r"^\|`.*", TEXTS["docs/sweeps.md"], re.M):
        name, default = (re.findall(r"`([^`]*)`", part) for part in line.split("|")[1:3])
        shown[name[0]] = yaml.safe_load(default[0]) if default else PydanticUndefined
    fields = {name: field.default for name, field in SweepFile.model_fields.items()}
    assert shown == {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def test_the_citation_names_the_papers_that_are_implemented() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    papers = cited["references"]
    assert [paper["authors"][0]["family-names"] for paper in papers] == ["Lin", "Lin", "Cong", "You"]
    assert all({"type", "title", "year"} <= paper.keys() and {"doi", "url"} & paper.keys() for paper in papers)
