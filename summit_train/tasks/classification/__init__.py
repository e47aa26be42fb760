"""The class of a clip, or its classes."""
