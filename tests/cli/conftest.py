from __future__ import annotations

from functools import partial

import pytest

from tests.worlds import Say, main_said


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `summit-train ...` in this process: (status, stdout, stderr)."""
    return partial(main_said, capsys)
