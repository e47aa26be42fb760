"""The processor as its system names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core import processor

X86 = "processor\t: 0\ncpu family\t: 6\nmodel name\t: A B 1\nflags\t\t: sse2 avx2\ncpu MHz\t\t: 1\nmodel name\t: C\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 2300MHz\n"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [(X86, "A B 1", {"sse2", "avx2"}), (POWER, "POWER9, altivec supported", set())],
    ids=["x86", "power"],
)
def test_name_and_flags(monkeypatch: pytest.MonkeyPatch, text: str, name: str, flags: set[str]) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (processor.name(), processor.flags()) == (name, flags)
    before = processor.digest("a")
    monkeypatch.setattr(Path, "read_text", lambda path: text.replace("2300", "2400").replace("MHz\t\t: 1", "MHz: 2"))
    assert processor.digest("a") == before != processor.digest("b")
    monkeypatch.setattr(Path, "read_text", lambda path: text.replace("avx2", "").replace("9", "10"))
    assert processor.digest("a") != before
