"""Requests in, tokens out: scheduling and running steps over the paged cache."""
