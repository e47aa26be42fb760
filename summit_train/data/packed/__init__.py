"""Packed sets: clips in shards, with an index and checksums."""
