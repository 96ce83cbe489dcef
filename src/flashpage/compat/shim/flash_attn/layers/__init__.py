"""`flash_attn.layers`: only `rotary` is here."""
