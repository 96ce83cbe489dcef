"""Code written for flash-attn and a model of transformers, both served by flashpage.

    python examples/compat.py

Needs transformers; the model is tiny and random.
"""

from __future__ import annotations

import torch

from flashpage.compat import flash_attn as shim
from flashpage.compat.transformers import register

shim.install()

from flash_attn import flash_attn_func  # noqa: E402 - found from here on

q, k, v = (torch.randn(2, 128, heads, 64) for heads in (8, 2, 2))
out = flash_attn_func(q, k, v, causal=True)
print(f"flash_attn_func is {flash_attn_func.__module__}'s: {tuple(out.shape)} on {out.device}")

register()

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

config = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = Qwen3ForCausalLM(config).eval()
ids = torch.randint(0, 1000, (2, 20))
mask = torch.ones_like(ids)
mask[0, :5] = 0
logits = {}
for implementation in ("flashpage", "sdpa"):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits[implementation] = model(ids, attention_mask=mask).logits[mask.bool()]
difference = (logits["flashpage"] - logits["sdpa"]).abs().max()
print(f"flashpage and sdpa differ by {difference:.1e} in the logits")
