"""`flash_attn.ops.triton`: only `rotary` is here."""
