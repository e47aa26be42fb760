"""The files that public data sets come with, read into manifests: one module a format."""
