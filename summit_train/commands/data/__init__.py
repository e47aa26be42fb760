"""`summit-train data WHAT`: make, import, index and check data sets; one module a WHAT."""

from __future__ import annotations

import argparse
import errno

from summit_train.commands.data import import_, index, motion, pack, scan, split, stage, verify
from summit_train.data.manifest import ManifestError
from summit_train.errors import RunFailed

# WHAT -> (its module, what it does)
_PARTS = {
    "motion": (motion, "write the embedded data set: the class is the motion"),
    "import": (import_, "write a manifest from the files that a public data set comes with"),
    "index": (index, "decode every video and write a manifest of the whole ones"),
    "scan": (scan, "decode every clip of a manifest and list the bad ones for data.quarantine"),
    "split": (split, "cut a manifest into training and validation by groups"),
    "pack": (pack, "pack clips into shards: tar files with an index and checksums"),
    "verify": (verify, "check every byte of a packed set"),
    "stage": (stage, "copy a packed set to this node's own disk"),
}


class DiskError(RunFailed):
    """The disk is full or broken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (part, help_text) in _PARTS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        part.add_arguments(command)
        command.set_defaults(run_part=part.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen part. Raises UserError for what cannot be done, DiskError for a disk that is full or broken."""
    try:
        return int(args.run_part(args))
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise DiskError(message) from error
        raise ManifestError(message) from error
