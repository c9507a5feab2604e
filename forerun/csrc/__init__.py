"""The kernels in C, their build, and the Python side of their structures."""
