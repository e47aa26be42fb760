"""Packed data sets: clips in tar files that are read by position, with an index, checksums and staging."""
