"""Kernels in C, their build, and their Python structures."""
