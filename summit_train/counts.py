"""Counts of networks, kept in the user's cache: only the first count of a network needs torch and its compiler.

A count depends on the network's keys, on the code that builds and counts it, and on torch. A network of the user's own
is counted each time, as its code may import more than its file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from summit_train.core.count import Count
from summit_train.core.files import cache_folder, read_file, write_text
from summit_train.spec import ModelSpec, Spec
from summit_train.spec.catalog import is_foreign

_COUNT = TypeAdapter(Count)


def count_network(spec: Spec) -> Count:
    """Count the spec's network as models.count.count_network does, from the cache if it is there."""

    def count() -> Count:
        from summit_train.models.count import count_network

        return count_network(spec)

    optimizer = spec.optimizer
    names = {"freeze", "lr_factors", "head_lr_factor", "first_lr_factor"}
    by_name = optimizer.model_dump(mode="json", include=names) if optimizer.freeze or optimizer.lr_factors else None
    return _kept(spec.model, [spec.data.clip_shape, spec.execution.compile, by_name], count)


def count_model(model: ModelSpec, clip_shape: tuple[int, int, int, int]) -> Count:
    """Count a network on one clip of (T, H, W, C), from the cache if it is there."""

    def count() -> Count:
        from summit_train.models.count import count_model

        return count_model(model, clip_shape)

    return _kept(model, [clip_shape, False, None], count)


def _kept(model: ModelSpec, keys: list[Any], count: Callable[[], Count]) -> Count:
    """Return the count that `model` and `keys` determine: from the cache, else counted and stored."""
    if is_foreign(model.arch):
        return count()
    try:
        keys = [_code(), model.model_dump(mode="json", exclude={"pretrained"}), *keys]
        file = cache_folder() / "counts" / f"{hashlib.sha256(json.dumps(keys).encode()).hexdigest()}.json"
    except (OSError, PackageNotFoundError):  # no home folder, unreadable code, or a torch without metadata
        return count()
    with suppress(OSError, ValueError):  # not there, or not whole
        return _read(file)
    counted = count()
    with suppress(OSError):  # counted again next time
        write_text(file, _COUNT.dump_json(counted).decode())
    return counted


@cache
def _read(file: Path) -> Count:
    return _COUNT.validate_json(read_file(file))


@cache
def _code(package: Path = Path(__file__).parent) -> str:
    """Return a digest of what builds and counts networks."""
    files = [package / "core/count.py"]
    for folder in ("models", "spec", "tasks"):
        files += sorted((package / folder).rglob("*.py"))
    contents = [file.read_bytes() for file in files]
    return hashlib.sha256(b"\0".join([version("torch").encode(), *contents])).hexdigest()
