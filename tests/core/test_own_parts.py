"""A callable of the user's own: found, made from its options, and refused with one line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256
from summit_train.core.own_parts import OwnPart, digest_of

PARTS = """
class Adds:
    def __init__(self, more=1):
        self.more = more

    def __call__(self, number):
        return number + self.more

class Silent:
    pass

class Lazy:
    def __init__(self):
        import no_such_library

def multiply(number, by=2):
    return number * by
"""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    path = tmp_path / "parts.py"
    path.write_text(PARTS)
    return path


def _made(path: Path, name: str, **options: Any) -> Any:
    return OwnPart.open("some.key", f"{path}:{name}", options).make("number")


def test_a_class_is_made_once_and_a_function_gets_its_options_in_each_call(parts: Path) -> None:
    assert [_made(parts, "Adds")(3), _made(parts, "Adds", more=5)(3)] == [4, 8]
    assert [_made(parts, "multiply")(3), _made(parts, "multiply", by=5)(3)] == [6, 15]


def test_a_callable_is_called_at_once_by_the_names_of_its_arguments(parts: Path) -> None:
    """As a network, whose options have a key of their own."""
    assert OwnPart.open("some.key", f"{parts}:multiply", {"by": 5}).call(number=3) == 15
    assert OwnPart.open("some.key", f"{parts}:Adds", {}).call(more=4)(3) == 7
    message = r"^some\.options: .*multiply\(number, by=2\) must take number, some\.options: got .* argument 'bye'"
    with pytest.raises(UserError, match=message):
        OwnPart.open("some.key", f"{parts}:multiply", {"bye": 1}).call(number=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Adds", {"les": 1}, "Adds(more=1) must take les: got an unexpected keyword argument 'les'"),
        ("multiply", {"bye": 1}, "multiply(number, by=2) must take number, bye: got an unexpected keyword argument"),
        (
            "multiply",
            {"number": 1},
            "must take number, number: multiple values for argument 'number'",
        ),
        ("Silent", {}, "Silent must have a method __call__(number)"),
        ("Lazy", {}, "Lazy cannot be imported: No module named 'no_such_library'; install what is missing"),
        ("PARTS", {}, "parts.py must have a class or function PARTS, found none"),
    ],
)
def test_what_cannot_be_made_is_named(parts: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^some\.key: .*{re.escape(message)}"):
        _made(parts, name, **options)


def test_another_process_does_not_run_a_file_that_has_changed(parts: Path) -> None:
    """As loader workers that start later; the new file is another module."""
    part = OwnPart.open("some.key", f"{parts}:multiply", {})
    parts.write_text(PARTS.replace("by=2", "by=7"))
    with pytest.raises(UserError, match=r"multiply has changed since the run began; restore the file"):
        part.make("number")
    assert OwnPart.open("some.key", f"{parts}:multiply", {}).load()(3) == 21
    parts.write_text(PARTS)
    assert part.make("number")(3) == 6


def test_the_digest_of_a_package_is_of_the_files_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lib/__init__.py -> losses.py -> deep/util.py; other.py is imported by none of them."""
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "__init__.py": "from .losses import *\n",
        "losses.py": "def mine(number):\n    from own_lib.deep import util\n    return util.ONE + number\n",
        "deep/__init__.py": "",
        "deep/util.py": "from ..more import ONE\n",
        "more.py": "ONE = 1\n",
        "other.py": "TWO = 2\n",
    }
    library = tmp_path / "own_lib"
    (library / "deep").mkdir(parents=True)
    for name, text in files.items():
        (library / name).write_text(text)
    part = OwnPart.open("loss.kind", "own_lib:mine", {})
    assert part.make("number")(2) == 3
    for name, text in files.items():
        (library / name).write_text(f"{text}#")
        assert (digest_of("loss.kind", "own_lib:mine") == part.digest) == (name == "other.py"), name
        (library / name).write_text(text)
    (library / "losses.py").write_text("def mine(number):\n    return 0\n")
    with pytest.raises(UserError, match="own_lib:mine has changed since the run began"):
        part.make("number")


@pytest.mark.parametrize("name", ["own_alone:mine", "torch.nn:Linear"])
def test_the_digest_of_a_lone_module_is_that_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_alone.py").write_text("import torch\n")
    spec = importlib.util.find_spec(name.partition(":")[0])
    assert spec is not None and digest_of("loss.kind", name) == file_sha256(str(spec.origin))


def test_a_built_in_without_a_signature_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^loss\.kind: torch:sum is built in and has no signature; try a"):
        OwnPart.open("loss.kind", "torch:sum", {}).make("logits", "targets")
