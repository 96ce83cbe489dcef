"""Attention on any GPU that Triton serves: kernels in Python, compiled at the first call."""
