"""Attention on tensors: knows no model, no request, no text."""
