"""Building blocks of models: modules on flat `[num_tokens, ...]` tensors."""
