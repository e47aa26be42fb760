"""Options of the commands that use a site: its name, overrides and walltime."""

from __future__ import annotations

import argparse

from summit_train.cluster.site import parse_walltime


def add_site_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add --site, --set and --walltime."""
    parser.add_argument("--site", required=required, metavar="NAME", help="a shipped site profile, or the path of one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="key of the site to override: account=abc123"
    )
    parser.add_argument("--walltime", type=_walltime, metavar="H:MM", help="walltime (default: what the run needs)")


def _walltime(text: str) -> int:
    try:
        return int(parse_walltime(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
