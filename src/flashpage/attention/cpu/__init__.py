"""The CPU backend: torch everywhere, numba where it reads pages faster."""
