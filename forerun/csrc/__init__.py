"""Kernels in C, and how they are built."""
