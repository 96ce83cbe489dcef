"""Attention kernels for Hopper (compute capability 9.0), in Gluon; on other GPUs not imported."""
