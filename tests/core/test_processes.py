"""What a process knows of itself."""

from __future__ import annotations

import os

from summit_train.core.processes import seconds_alive


def test_a_process_is_older_than_its_child() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, repr(seconds_alive()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 <= float(os.read(reader, 100)) < seconds_alive()
