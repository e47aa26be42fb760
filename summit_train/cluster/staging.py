"""Packed sets that a job copies to the nodes' own disks before it trains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from summit_train.cluster.site import Site
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.spec import Spec


def folders_to_stage(site: Site, specs: Iterable[Spec]) -> tuple[Path, ...]:
    """Return the packed sets of the specs with data.stage=auto, each once; none on a site without node_local."""
    wanted = [spec.data for spec in specs if spec.data.stage == "auto" and site.node_local is not None]
    paths = dict.fromkeys(Path(path).absolute() for data in wanted for path in (data.train, data.val))
    return tuple(path for path in paths if (path / PACK_FILE).is_file())


def staging_row(site: Site, spec: Spec, folders: Iterable[Path]) -> list[tuple[str, str]]:
    """Return one (name, value) row for people, or none where the spec does not ask the job to stage."""
    if spec.data.stage != "auto":
        return []
    if site.node_local is None:
        return [("staging", f"none: {site.name} names no node_local")]
    names = ", ".join(map(str, folders))
    return [("staging", f"{names} to {site.node_local}" if names else "none: data.train and data.val are not packed")]
