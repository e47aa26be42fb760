"""A headless Chromium that opens pages from the disk, by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0
# After all pictures are decoded, which fails for one that cannot be.
_LOOK = """Promise.allSettled([...document.images].map(image => image.decode())).then(decoded => ({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  clipped: [...document.querySelectorAll(".wide")].filter(one => one.scrollWidth > one.clientWidth).length,
  pictures: [...document.images].map((image, i) => decoded[i].status == "fulfilled" ? image.naturalWidth : 0),
  playing: document.getAnimations().filter(one => one.playState == "running").length,
  background: getComputedStyle(document.body).backgroundColor,
  height: document.documentElement.scrollHeight,
}))"""


@dataclass(frozen=True)
class View:
    """What a page shows in a window. complaints: of its console. requests: for anything outside the file.

    overflow: pixels that it is wider than the window. clipped: how many tables do not fit. pictures: their widths, 0
    for one that cannot be decoded. playing: how many animations run.
    """

    complaints: list[str]
    requests: list[str]
    overflow: int
    clipped: int
    pictures: list[int]
    playing: int
    background: str
    height: int


class Chromium:
    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._rest, self._last, self._events = b"", 0, list[dict[str, Any]]()

    def look(
        self, page: Path, width: int, *, dark: bool = False, still: bool = False, picture: Path | None = None
    ) -> View:
        """Open a page in a new window of this width. still: motion is not wanted. picture: PNG of the whole page."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        wanted = {"color-scheme": "dark" if dark else "light", "reduced-motion": "reduce" if still else "no-preference"}
        features = [{"name": f"prefers-{name}", "value": value} for name, value in wanted.items()]
        self._call("Emulation.setEmulatedMedia", session, features=features)
        url = page.resolve().as_uri()
        self._events.clear()  # those of about:blank
        self._call("Page.navigate", session, url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        options = {"awaitPromise": True, "returnByValue": True}
        seen = self._call("Runtime.evaluate", session, expression=_LOOK, **options)["result"]["value"]
        if picture is not None:
            clip = {"x": 0, "y": 0, "width": width, "height": seen["height"], "scale": 1}
            shot = self._call("Page.captureScreenshot", session, captureBeyondViewport=True, clip=clip)
            picture.write_bytes(base64.b64decode(shot["data"]))
        self._call("Target.closeTarget", targetId=target)
        of = {name: [event["params"] for event in self._events if event["method"] == name] for name in _EVENTS}
        complaints = [json.dumps(one) for name in _EVENTS[:3] for one in of[name]]
        asked = [one["request"]["url"] for one in of[_EVENTS[3]]]
        return View(complaints, [one for one in asked if one != url and not one.startswith("data:")], **seen)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._last:
            self._events.append(answer)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], _PATIENCE_S)[0], "Chromium does not answer"
            content = os.read(self._read, 1 << 20)
            assert content, "Chromium has ended"
            self._rest += content
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


_EVENTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.requestWillBeSent")


def missing() -> str | None:
    """What this machine lacks for it, or None."""
    how = "as root on Debian `make test-all` installs it"
    return None if any(map(shutil.which, _PROGRAMS)) else f"no {', '.join(_PROGRAMS)}; {how}"


@contextmanager
def running_chromium() -> Iterator[Chromium]:
    (its_read, write), (read, its_write) = os.pipe(), os.pipe()
    # It reads from descriptor 3 and writes to 4.
    shell = f'exec "$@" 3<&{its_read} 4>&{its_write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        program = next(filter(shutil.which, _PROGRAMS))
        words = ["bash", "-c", shell, "bash", program, *_FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(words, pass_fds=(its_read, its_write), stderr=subprocess.DEVNULL)
        os.close(its_read)
        os.close(its_write)
        try:
            yield Chromium(write, read)
        finally:
            os.close(write)  # it ends
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # not raised, which would hide why it is stuck
                process.kill()
                process.wait()
            os.close(read)
