"""Why FlashAttention is fast, in numbers and pictures; sees only errors and attention."""
