"""Attention kernels for Hopper (compute capability 9.0), in Gluon; imported on no other GPU."""
