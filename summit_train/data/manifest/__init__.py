"""A data set's list of clips: reading it, its columns, split, quarantine, importers. This is its door."""

from summit_train.data.manifest.reading import Manifest, ManifestRow, read_classes, read_manifest, write_manifest
from summit_train.data.manifest.tables import ManifestError

__all__ = ["Manifest", "ManifestError", "ManifestRow", "read_classes", "read_manifest", "write_manifest"]
