"""`summit-train configs`: the specs, presets, sweeps, sites and machines that ship with the package."""

from __future__ import annotations

import argparse
import re
import textwrap
from itertools import takewhile
from typing import NamedTuple

from summit_train.core.result import Result, TextTable
from summit_train.core.text import NONE
from summit_train.spec.source import SHIPPED, locate, shipped_names

# kind -> its heading, in the order of the list
_KINDS = {
    "spec": "Specs, for SPEC in every command, and for `extends`:",
    "preset": "Presets, for `extends`, on top of a spec:",
    "sweep": "Sweeps, for `summit-train sweep`:",
    "site": "Sites, for --site NAME:",
    "machine": "Machines, for `simulate --machine NAME`:",
    "base": "Bases, shared by the specs of a folder:",
}


class ShippedFile(NamedTuple):
    """A shipped file by the comment that opens it. what: its first sentence; a dash for what it does not say."""

    name: str
    kind: str
    what: str
    accuracy: str
    cost: str
    source: str

    @classmethod
    def read(cls, name: str) -> ShippedFile:
        text = locate(SHIPPED + name).read_text(encoding="utf-8")
        opening = "\n".join(line[2:] for line in takewhile(lambda line: line.startswith("#"), text.splitlines()))
        folder = name.rpartition("/")[0]
        kind = "spec" if re.search("^name:", text, re.M) else "base" if folder else "preset"
        if folder in ("sites", "machines", "sweeps"):
            kind = folder.removesuffix("s")
        what = re.split(r"(?<!et al)\.(?:\s|$)", " ".join(opening.split()))[0]
        clauses = []
        for field in ("Expect", "Cost", "Source"):  # up to a stop, comma, colon, or bracket that holds no year
            found = re.search(rf"^{field}:\s+(.*(?:\n(?!\w+:).*)*)", opening, re.M)
            words = " ".join(found[1].split()) if found else NONE
            clauses.append(re.split(r"(?<!et al)[.,:;](?:\s|$)| \((?!\d{4}\))", words)[0])
        return cls(SHIPPED + name, kind, what, *clauses)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "list only files with this word in name or description; shipped:NAME: print that file"
    parser.add_argument("word", metavar="WORD", nargs="?", default="", help=about)


def run(args: argparse.Namespace) -> Result:
    if args.word.startswith(SHIPPED):
        content = locate(args.word).read_text(encoding="utf-8")
        file = ShippedFile.read(args.word[len(SHIPPED) :])
        return Result(content.splitlines(), values={"configs": [file._asdict() | {"text": content}]})
    files = map(ShippedFile.read, shipped_names())
    found = [file for file in files if args.word.lower() in f"{file.name[len(SHIPPED) :]} {file.what}".lower()]
    if not found:
        locate(SHIPPED + args.word)  # raises UserError, with the nearest names
    text: list[str] = []
    for kind, title in _KINDS.items():
        if of_kind := [file for file in found if file.kind == kind]:
            rows = [{"": f.name, "accuracy": f.accuracy, "cost": f.cost, "source": f.source} for f in of_kind]
            head, *lines = str(TextTable.of_records(rows)).splitlines()
            text += ["", title, head] if head else ["", title]
            for file, line in zip(of_kind, lines, strict=True):
                text += [line, *textwrap.wrap(file.what, 120, initial_indent="    ", subsequent_indent="    ")]
    return Result(text[1:], values={"configs": [file._asdict() for file in found]})
