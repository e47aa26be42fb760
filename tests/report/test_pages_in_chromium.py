"""A report, an index and a sheet of clips as Chromium shows them: narrow and wide, light and dark.

Skipped without Chromium, which the tests bring as root on Debian; there, in CI, it must be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from summit_train.__main__ import main
from tests.chromium import Chromium, missing, running_chromium

pytestmark = pytest.mark.nightly
NARROW, WIDE = 390, 1400
WHITE, BLACK = "rgb(255, 255, 255)", "rgb(20, 20, 20)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    if (lacking := missing()) is None:
        with running_chromium() as browser:
            yield browser
    elif os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(lacking)
    else:
        pytest.skip(lacking)


@pytest.fixture(scope="module")
def pages(trained_run: Path, motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a real run, its comparison with a copy, the index of its folder, a sheet that lacks a clip."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("report", "comparison", "index", "sheet")}
    assert main(["report", str(trained_run), "--out", str(found["report"])]) == 0
    shutil.copytree(trained_run, folder / "runs/other")
    assert main(["report", str(trained_run), str(folder / "runs/other"), "--out", str(found["comparison"])]) == 0
    assert main(["report", "--index", str(trained_run.parent), "--out", str(found["index"])]) == 0
    (folder / "list.csv").write_text((motion_set / "train.csv").read_text() + f"{'long' * 20}.mp4,0,8\n")
    words = ["data", "show", str(folder / "list.csv"), "--root", str(motion_set), "--spec", str(trained_run)]
    assert main([*words, "--clips", "8", "--out", str(found["sheet"])]) == 0
    return found


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("name", ["report", "comparison", "index", "sheet"])
def test_a_page_fits_its_window_and_lacks_nothing(
    chromium: Chromium, pages: dict[str, Path], name: str, width: int
) -> None:
    for dark, background in ((False, WHITE), (True, BLACK)):
        view = chromium.look(pages[name], width, dark=dark)
        assert (view.complaints, view.requests, view.overflow, view.clipped) == ([], [], 0, 0)
        assert view.pictures and 0 not in view.pictures and view.background == background


def test_films_play_where_motion_is_wanted(chromium: Chromium, pages: dict[str, Path], tmp_path: Path) -> None:
    for name, films in (("sheet", 7), ("report", pages["report"].read_text().count('class="film"'))):  # two of a class
        assert films > 3 and chromium.look(pages[name], WIDE).playing == films
        assert chromium.look(pages[name], WIDE, still=True).playing == 0
        ticked = tmp_path / "ticked.html"
        ticked.write_text(pages[name].read_text().replace('id="still"', 'id="still" checked'))
        view = chromium.look(ticked, NARROW)
        assert (view.playing, view.overflow) == (0, 0)


def test_the_browser_sees_what_is_wrong(chromium: Chromium, tmp_path: Path) -> None:
    """A page that is too wide, with a picture that is none, one from elsewhere, and a script that fails."""
    page = tmp_path / "wrong.html"
    page.write_text(
        '<div style="width: 500px">wide</div><img src="data:image/png;base64,AAAA"><img src="http://127.0.0.1:1/a.png">'
        "<script>nothing()</script>"
    )
    view = chromium.look(page, NARROW)
    assert view.overflow > 100 and view.pictures == [0, 0] and view.requests == ["http://127.0.0.1:1/a.png"]
    assert any("nothing is not defined" in one for one in view.complaints)
    page.write_text("""<meta http-equiv="Content-Security-Policy" content="default-src 'none'"><img src="a.png">""")
    assert any("Content Security Policy" in one for one in chromium.look(page, WIDE).complaints)


def test_a_stuck_browser_says_so_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[subprocess.Popen[bytes]](), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    monkeypatch.setattr("tests.chromium._PATIENCE_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("tests.chromium._PROGRAMS", ("nowhere", "stuck"))
    (tmp_path / "stuck").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "stuck").chmod(0o755)
    assert missing() is None
    with pytest.raises(AssertionError, match="does not answer"), running_chromium() as browser:
        browser.look(tmp_path / "page.html", NARROW)
    assert [one.returncode for one in started] == [-signal.SIGKILL]
