"""Kernels in C++ for CPUs: compiled once, kept in the user's cache, called with tensors."""
