"""`flash_attn.ops`: only `triton.rotary` is here."""
