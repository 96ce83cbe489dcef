"""Every number of attention.md, computed from the package; a claim is a name and its text.

The document holds each number between `<!--name-->` and `<!--/-->`, which a reader does not see.
"""

from __future__ import annotations

import math
import re

import torch

from flashpage.attention.functional import flash_attn_func, flash_attn_varlen_func
from flashpage.explain.hardware import DEVICES
from flashpage.explain.roofline import Workload, bound, standard_cost, tiled_cost
from flashpage.explain.steps import (
    ORDERS,
    PagedDecode,
    SequenceMap,
    TraceProblem,
    map_sequences,
    paged_decode,
    random_problem,
    walk,
    worked_examples,
)
from memory_curve import memory_claims

MARK = re.compile(r"<!--([a-z0-9-]+)-->(.*?)<!--/-->", re.DOTALL)

WORK = Workload((8192,), (8192,), head_dim=128, dtype="fp32")
LAYER = Workload((1,), (32768,), 32, 8, 128, "bf16", causal=True, block_size=16)


def causal_problem() -> TraceProblem:
    return random_problem(seqlen_q=8, block_size_k=4, num_workers=4, causal=True)


def sequences() -> SequenceMap:
    return map_sequences((3, 1, 5))


def decode() -> PagedDecode:
    return paged_decode((11, 10), block_size=4, num_shared_tokens=8)


def fill(text: str, claims: dict[str, str]) -> str:
    """The text with every marked number as computed.

    Raises:
        KeyError: a mark that no claim is for.
    """
    return MARK.sub(lambda mark: f"<!--{mark[1]}-->{claims[mark[1]]}<!--/-->", text)


def all_claims() -> dict[str, str]:
    return {
        **_standard(),
        **_tiled(),
        **_orders(),
        **_backward(),
        **_varlen(),
        **_paged(),
        **_gqa(),
        **memory_claims(),
    }


def _standard() -> dict[str, str]:
    device, cost = DEVICES["rtx4090"], standard_cost(WORK)
    size = {t.tensor: t.size for t in cost.transfers}
    limit = bound(cost, device, "fp32")
    half = standard_cost(Workload((8192,), (8192,), head_dim=128, dtype="bf16"))
    return {
        "s-bytes": f"{size['S'] / 1e6:.0f} MB",
        "q-bytes": f"{size['Q'] / 1e6:.1f} MB",
        "s-bf16": f"{next(t.size for t in half.transfers if t.tensor == 'S') / 2**20:.0f} MiB",
        "standard-bytes": f"{cost.bytes / 1e6:,.0f} MB",
        "flops": f"{cost.flops / 1e9:.1f} GFLOP",
        "standard-intensity": f"{cost.intensity:.1f}",
        "ridge": f"{device.ridge('fp32'):.1f}",
        "standard-time": f"{limit.seconds * 1e3:.2f} ms",
        "standard-utilisation": f"{limit.utilisation:.1%}",
    }


def _tiled() -> dict[str, str]:
    _, example = worked_examples()
    first = [step for step in walk(example, "FA2").steps if step.worker == 0]
    device, cost = DEVICES["rtx4090"], tiled_cost(WORK)
    limit, slow = (bound(c, device, "fp32") for c in (cost, standard_cost(WORK)))
    return {
        "m-first": f"{float(first[0].m[0]):.0f}",
        "m-second": f"{float(first[1].m[0]):.0f}",
        "factor": f"{float(first[1].rescale[0]):.4f}",
        "l-second": f"{float(first[1].l[0]):.4f}",
        "l-last": f"{float(first[-1].l[0]):.4f}",
        "o-last": ", ".join(f"{x:.4f}" for x in first[-1].o[0].tolist()),
        "o-standard": ", ".join(f"{x:.4f}" for x in example.standard().out[0, 0, 0].tolist()),
        "tiled-bytes": f"{cost.bytes / 1e6:.1f} MB",
        "tiled-intensity": f"{cost.intensity:,.0f}",
        "tiled-time": f"{limit.seconds * 1e6:.0f} us",
        "speed-up": f"{slow.seconds / limit.seconds:.1f}",
        "no-cache-bytes": f"{tiled_cost(WORK, absorbed=False).bytes / 1e6:.0f} MB",
    }


def _orders() -> dict[str, str]:
    _, example = worked_examples()
    reductions = [walk(example, order).num_reductions for order in ORDERS]
    skipped = walk(causal_problem(), "FA2").num_skipped
    problem = causal_problem()
    return {
        "fa1-reductions": str(reductions[0]),
        "fa2-reductions": str(reductions[1]),
        "causal-tiles": str(problem.num_workers * problem.num_key_blocks),
        "causal-skipped": str(skipped),
        "causal-share": f"{tiled_cost(_causal()).flops / tiled_cost(WORK).flops:.2f}",
    }


def _causal() -> Workload:
    return Workload((8192,), (8192,), head_dim=128, dtype="fp32", causal=True)


def _backward() -> dict[str, str]:
    standard, tiled = (cost(WORK, backward=True) for cost in (standard_cost, tiled_cost))
    product = 2 * WORK.num_scores * WORK.head_dim
    return {
        "backward-products-standard": str(standard.flops // product),
        "backward-products-tiled": str(tiled.flops // product),
        "backward-bytes-standard": f"{standard.bytes / 1e6:,.0f} MB",
        "backward-bytes-tiled": f"{tiled.bytes / 1e6:.1f} MB",
        "lse-bytes": f"{4 * WORK.seqlens_q[0] / 1e3:.1f} kB",
    }


def _varlen() -> dict[str, str]:
    shown = sequences()
    lengths = [len(tokens) for tokens in shown.sequences]
    count, longest = len(lengths), max(lengths)
    return {
        "cu-seqlens": ", ".join(map(str, shown.cu_seqlens)),
        "tokens": str(sum(lengths)),
        "padded-tokens": str(count * longest),
        "scores": str(int(shown.visible().sum())),
        "padded-scores": str(count * longest**2),
        "packed-gap": _packed_gap(shown),
    }


def _packed_gap(shown: SequenceMap) -> str:
    """One call over the pack against a call for each sequence, in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, shown.cu_seqlens[-1], 2, 8, generator=generator, dtype=torch.float64)
    bounds = torch.tensor(shown.cu_seqlens, dtype=torch.int32)
    longest = max(map(len, shown.sequences))
    together = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest)
    alone = [
        flash_attn_func(*(x[None, t.start : t.stop] for x in (q, k, v)))[0] for t in shown.sequences
    ]
    return _below(float((together - torch.cat(alone)).abs().max()))


def _paged() -> dict[str, str]:
    shown = decode()
    shared = shown.shared_pages(0, 1)
    used = {page for pages in shown.block_table for page in pages}
    slots = len(used) * shown.block_size
    filled = sum(len(shown.positions_of_page(page)) for page in used)
    cost = tiled_cost(LAYER)
    limit = bound(cost, DEVICES["h100"], "bf16")
    return {
        "block-table": " and ".join(f"[{', '.join(map(str, row))}]" for row in shown.block_table),
        "shared-pages": " and ".join(map(str, shared)),
        "pages-used": str(len(used)),
        "pages-alone": str(sum(map(len, shown.block_table))),
        "slots-unused": str(slots - filled),
        "slots-bound": str(shown.block_size - 1),
        "paged-gap": _below(float((shown.tiled_out - shown.library_out).abs().max())),
        "decode-bytes": f"{2 * LAYER.k_bytes / 2**20:.0f} MiB",
        "decode-time": f"{limit.seconds * 1e6:.0f} us",
        "decode-intensity": f"{cost.intensity:.1f}",
        "decode-ridge": f"{DEVICES['h100'].ridge('bf16'):.0f}",
        "gather-times": f"{standard_cost(LAYER).bytes / cost.bytes:.1f}",
    }


def _gqa() -> dict[str, str]:
    alone = Workload((1,), (32768,), 32, 32, 128, "bf16", causal=True, block_size=16)
    return {
        "gqa-less": f"{alone.k_bytes / LAYER.k_bytes:.0f}",
        "mha-bytes": f"{2 * alone.k_bytes / 2**20:.0f} MiB",
        "mha-intensity": f"{tiled_cost(alone).intensity:.1f}",
        "token-bytes": f"{2 * LAYER.k_bytes // LAYER.seqlens_k[0] // 1024} KiB",
    }


def _below(gap: float) -> str:
    """A bound, as the last digits differ between machines."""
    power = math.ceil(math.log10(gap)) if gap else -14
    return f"1e{max(-14, power)}"
