"""A data set's list of clips: reading it, its columns, classes, split, quarantine, importers. This is its door."""

from summit_train.data.manifest.reading import (
    Manifest,
    ManifestRow,
    num_clips,
    read_classes,
    read_manifest,
    write_manifest,
)
from summit_train.data.manifest.tables import CLASSES_FILE, COLUMNS, ManifestError

__all__ = [
    "CLASSES_FILE",
    "COLUMNS",
    "Manifest",
    "ManifestError",
    "ManifestRow",
    "num_clips",
    "read_classes",
    "read_manifest",
    "write_manifest",
]
