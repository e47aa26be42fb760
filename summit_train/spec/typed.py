"""The types of keys, their marks, and the validation of a section, which names every mistake at its line."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict
from pydantic_core import PydanticKnownError, ValidationError, core_schema

from summit_train.core.errors import UserError
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import KeyPath, Tree

Fraction = Annotated[float, Field(ge=0, le=1)]
# Upper limits beyond any real use. Below them what is computed from a setting fits float32 and int64, and loops end.
MOST = 1_000_000
Positive = Annotated[float, Field(gt=0, le=1e30)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
Count = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Extent = Annotated[int, Field(ge=1, le=4096)]  # of a clip; non-local blocks relate every two of its pixels


class Scope(Flag):
    """A mark in the type of a key: what changes if the key's value changes.

    A key without a mark has its section's, or EXPERIMENT if the section has none. Every section's mark contains
    TRAINING, so a key whose mark was forgotten is compared.
    """

    RUN = 0
    """How the run proceeds: its speed, its files, when it is ended."""
    TRAINING = auto()
    """The trained weights. A checkpoint with another value is refused."""
    SCORES = auto()
    """The scores of given weights."""
    PRECISE_BN = auto()
    """The scores, but only if evaluate.precise_bn reads training batches."""
    PLACE = auto()
    """Where data are. Nodes may have their own copies, so ranks need not agree."""
    EXPERIMENT = TRAINING | SCORES


OWN = "one of your own"
BUILT_IN = "a built-in one"


@dataclass(frozen=True)
class ReadWith:
    """A mark in the type of a key that is read only with one value of another key; else it must have its default.

    key: the other key, of the same section or with its full path. A list counts as its first item. value: a word, OWN
    or BUILT_IN. hint: the end of the message.
    """

    key: str
    value: str
    hint: str = ""

    def reads(self, word: str) -> bool:
        if self.value in (OWN, BUILT_IN):
            return is_foreign(word) == (self.value == OWN)
        return word == self.value

    @property
    def reader(self) -> str:
        """Name what reads the key, as the end of a message."""
        who = self.value if self.value in (OWN, BUILT_IN) else f"{self.key} {self.value}"
        return f"only {who} reads it" + (f"; {self.hint}" if self.hint else "")


def expand(path: str) -> str:
    """Expand ~ and $NAME. Raises ValueError for a variable that is not set, which would silently name another place."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+|\{\w+\})", expanded)
    if unset:
        raise ValueError(f"the environment variable {unset.group()} is not set")
    if not expanded or "\0" in expanded:
        raise ValueError("the path must not be empty")
    return expanded


def folder_name(name: str) -> str:
    """Return a name that becomes a folder: one path component, whatever other characters it has."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        right = "1 to 200 bytes without '/' and control characters, and not '.' or '..'"
        raise ValueError(f"the name becomes a folder: must be {right}")
    return name


PathText = Annotated[str, AfterValidator(expand)]
FolderName = Annotated[str, AfterValidator(folder_name)]
# For tuples below a validator: once that has seen a value, strict mode refuses a YAML list as a tuple.
LAX = Strict(strict=False)
CLASSIFYING = ReadWith("task", "classification")


class Section(BaseModel):
    """A section of keys: frozen, no unknown keys, no text for a number. A text below a key describes it.

    removed: keys of earlier versions, with what to do instead.
    """

    removed: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Named:
    """A text that is one of the names, or names a callable; `~` and $NAME in the path of a file are expanded."""

    names: tuple[str, ...] = ()

    def _read(self, word: str) -> str:
        if not word.isprintable():
            raise ValueError("must be without control characters")
        place, _, name = word.rpartition(":")
        is_file = place.endswith(".py")
        is_callable = name.isidentifier() and (is_file or all(part.isidentifier() for part in place.split(".")))
        if word not in self.names and not is_callable:
            choices = (*self.names, "package.module:callable", "FILE.py:callable")
            raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{choice}'" for choice in choices)})
        return f"{expand(place)}:{name}" if is_file else word

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        own = {"type": "string", "pattern": r".:\w+$"}
        return {"anyOf": [{"enum": list(self.names)}, own]} if self.names else own


class OwnSpec(Section):
    """A callable of your own."""

    kind: Annotated[str, Named()]
    """package.module:callable or FILE.py:callable; its code runs."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments: of a class when it is made, of a function in each call."""

    def __hash__(self) -> int:
        return hash(self.kind)  # options cannot be hashed


def by_name(section: type[OwnSpec]) -> BeforeValidator:
    """Accept the name of a callable without options in place of its section."""
    expand_name = lambda given: {"kind": given} if isinstance(given, str) else given  # noqa: E731
    return BeforeValidator(expand_name, json_schema_input_type=str | section)


Own = Annotated[OwnSpec, by_name(OwnSpec)]


SectionType = TypeVar("SectionType", bound=Section)


def validated(model: type[SectionType], tree: Tree) -> SectionType:
    """Return the values of `tree` as a `model`.

    Raises UserError; its message has one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    try:
        # Through JSON, as strict mode then takes a YAML list for a tuple and still no string for a number.
        return model.model_validate_json(json.dumps(_without_removed(model, tree.values), default=str))
    except ValidationError as error:
        raise UserError(*(_line(model, tree, details) for details in error.errors())) from None


def _without_removed(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without removed keys that are null, as the files of earlier versions have them."""
    kept = dict[str, Any]()
    for key, value in values.items():
        if value is None and key in section.removed:
            continue
        below = section_in(section.model_fields[key].annotation) if key in section.model_fields else None
        kept[key] = value if below is None or not isinstance(value, dict) else _without_removed(below, value)
    return kept


def _line(model: type[Section], tree: Tree, details: Any) -> str:
    path: KeyPath = tuple(str(part) for part in details["loc"] if not str(part).startswith(("function-", "tuple[")))
    kind = details["type"]
    given = details["input"]
    if kind == "extra_forbidden":
        section = _section_of(model, path)
        message = section.removed.get(path[-1]) or (
            f"unknown key; {_cut_off(tree, path) or _choices(path[-1], list(section.model_fields))}"
        )
    elif kind == "missing":
        message = "is missing and has no default"
    elif kind == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+|False)", details["ctx"]["expected"])
        message = f"{given!r} is not a choice; {_choices(str(given), [a or b.lower() for a, b in choices])}"
    elif kind == "model_type":
        message = f"must be a section of keys, got {given!r}"
    else:
        message = f"{details['msg'].removeprefix('Value error, ')}, got {given!r}"
    return f"{tree.place(path)}: {'.'.join(path)}: {message}"


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a type is, or the first one that it may hold, such as the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def _section_of(model: type[Section], path: KeyPath) -> type[Section]:
    """Return the section that a key is in."""
    section = model
    for key in path[:-1]:
        if key in section.model_fields:  # else it is an item's number, or its name
            section = section_in(section.model_fields[key].annotation) or section
    return section


def _cut_off(tree: Tree, path: KeyPath) -> str:
    """Return advice where the key is the end of a value with a comma, in one line within { }; else ""."""
    section: Any = tree.values
    for part in path[:-1]:
        section = section[int(part)] if isinstance(section, list) else section.get(part, section)
    keys = list(section)
    start = next((key for key in reversed(keys[: keys.index(path[-1])]) if section[key] is not None), None)
    if section[path[-1]] is not None or start is None or tree.place((*path[:-1], start)) != tree.place(path):
        return ""
    return f'within {{ }} a comma ends a value, so quote one that has a comma: {start}: "{section[start]},{path[-1]}"'


def _choices(given: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, choices, 1)
    return (f"did you mean {near[0]}? " if near else "") + f"valid: {', '.join(choices)}"
