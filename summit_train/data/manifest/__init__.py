"""A data set's list of clips: reading it, its columns, split, importers. This is its door."""

from summit_train.data.manifest.clip import ManifestRow, write_manifest
from summit_train.data.manifest.reading import Manifest, read_classes, read_manifest

__all__ = ["Manifest", "ManifestRow", "read_classes", "read_manifest", "write_manifest"]
