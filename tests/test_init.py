"""What `import summit_train` gives."""

from __future__ import annotations

import subprocess
import sys

import summit_train
from tests.worlds import environment


def test_the_import_loads_no_library() -> None:
    """The first call of `load` does. Python alone may import modules of its own here."""
    program = (
        "import sys; before = set(sys.modules); import summit_train\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))\n"
        "try: summit_train.load('nowhere')\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("['summit_train']\nCheckpointError True\n", "")


def test_the_public_names_are_there() -> None:
    assert summit_train.__all__ == ["load"] and callable(summit_train.load)
