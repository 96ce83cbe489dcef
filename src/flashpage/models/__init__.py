"""Model structures: which layers, in which order; nothing about files or requests."""
