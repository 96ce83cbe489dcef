"""The paged KV cache: who owns which page, which pages hold which tokens, and the tensors."""
