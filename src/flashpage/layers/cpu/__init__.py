"""Whole steps of a model with quantised weights on a CPU, as kernels that numba compiles."""
