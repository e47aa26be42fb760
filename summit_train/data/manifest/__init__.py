"""A data set's list of clips: reading it, its columns, split, importers. This is its door."""

from summit_train.data.manifest.reading import Manifest, read_classes, read_manifest
from summit_train.data.manifest.rows import ManifestRow, write_manifest

__all__ = ["Manifest", "ManifestRow", "read_classes", "read_manifest", "write_manifest"]
