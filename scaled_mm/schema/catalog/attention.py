"""Softmax, rotary embedding, and decode attention over a paged KV cache. The package's solutions call torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.schema.catalog.entry import Entry
from scaled_mm.schema.catalog.gemm import FLOAT_NORM, HALF_NORM

_SOFTMAX = """import torch


def run(x):
    wide = x.double()
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(torch.float32)
"""

_ROPE = '''import torch


def rotated(x, cos, sin):
    """Pairs are (i, i + D/2): x * cos + (-second half, first half) * sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def run(query, key, cos, sin):
    """query [T, HQ, D] and key [T, HK, D], each rotated by the angles of its token, cos and sin [T, D]."""
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return tuple(rotated(x.double(), cos, sin).to(torch.bfloat16) for x in (query, key))
'''

_ROPE_FLOAT = _ROPE.replace(".double()", ".float()")

_ROPE_OURS = """import scaled_mm


def run(query, key, cos, sin):
    return scaled_mm.rope(query, key, cos, sin)
"""

_DECODE = '''import torch


def run(query, key_cache, value_cache, context_lens, block_tables, scale):
    """query [B, H, D]; caches [num_blocks, block_size, KV, D], whose pages block_tables [B, max_blocks] lists for each sequence, of which the
    first context_lens [B] entries count. Head h reads the cache of head h // (H / KV)."""
    out = torch.empty_like(query)
    for b in range(query.shape[0]):
        length, pages = int(context_lens[b]), block_tables[b].long()
        group = query.shape[1] // key_cache.shape[2]
        keys, values = (cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1) for cache in (key_cache, value_cache))
        scores = torch.einsum("hd,lhd->hl", query[b].double(), keys) * scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out[b] = torch.einsum("hl,lhd->hd", weights / weights.sum(-1, keepdim=True), values).to(query.dtype)
    return out
'''

_DECODE_OURS = """import torch


def run(query, key_cache, value_cache, context_lens, block_tables, scale):
    keys, values = (cache[block_tables.long()].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
    mask = torch.arange(keys.shape[2], device=query.device) < context_lens[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, mask[:, None, None], scale=scale, enable_gqa=True)
    return out[:, :, 0]
"""

_DECODE_PLAIN = """import torch


def run(query, key_cache, value_cache, context_lens, block_tables, scale):
    groups = query.shape[1] // key_cache.shape[2]
    keys, values = (cache[block_tables.long()].flatten(1, 2).float() for cache in (key_cache, value_cache))
    q = query.float().unflatten(1, (-1, groups))
    scores = torch.einsum("bkgd,blkd->bkgl", q, keys) * scale
    beyond = torch.arange(keys.shape[1], device=query.device) >= context_lens[:, None]
    weights = torch.softmax(scores.masked_fill(beyond[:, None, None], float("-inf")), dim=-1)
    return torch.einsum("bkgl,blkd->bkgd", weights, values).flatten(1, 2).to(query.dtype)
"""


def entries() -> Iterator[Entry]:
    for size in (128, 4096):
        yield Entry(
            name=f"softmax_d{size}",
            op_type="softmax",
            description="exp(x) / sum(exp(x)) over the last dimension.",
            axes={"R": None, "D": size},
            inputs={"x": ("float32", ["R", "D"])},
            outputs={"y": ("float32", ["R", "D"])},
            reference=_SOFTMAX,
            ours="import torch\n\n\ndef run(x):\n    return torch.softmax(x, dim=-1)\n",
            plain="import torch\n\n\ndef run(x):\n    e = torch.exp(x - x.amax(-1, keepdim=True))\n    return e / e.sum(-1, keepdim=True)\n",
            note="torch's own kernel",
            compare=FLOAT_NORM,
            workloads=[{"R": 16}, {"R": 4096}],
        )
    for heads, kv_heads in ((32, 8), (64, 8)):
        yield Entry(
            name=f"rope_d128_h{heads}_kv{kv_heads}",
            op_type="rope",
            description="Rotary embedding of query and key with one set of angles per token; pairs are half a head apart (GPT-NeoX style).",
            axes={"T": None, "HQ": heads, "HK": kv_heads, "D": 128},
            inputs={
                "query": ("bfloat16", ["T", "HQ", "D"]),
                "key": ("bfloat16", ["T", "HK", "D"]),
                "cos": ("float32", ["T", "D"]),
                "sin": ("float32", ["T", "D"]),
            },
            outputs={"query_out": ("bfloat16", ["T", "HQ", "D"]), "key_out": ("bfloat16", ["T", "HK", "D"])},
            reference=_ROPE,
            ours=_ROPE_OURS,
            plain=_ROPE_FLOAT,
            note="the package's row-wise operator",
            compare=HALF_NORM,
            workloads=[{"T": 1}, {"T": 16}, {"T": 512}],
        )
        yield Entry(
            name=f"paged_decode_attention_h{heads}_kv{kv_heads}_d128_bs16",
            op_type="paged_decode_attention",
            description="Decode attention: one new token per sequence attends to the sequence's paged KV cache, with grouped heads.",
            axes={"B": None, "num_blocks": None, "max_blocks": None, "block_size": 16, "H": heads, "KV": kv_heads, "D": 128},
            inputs={
                "query": ("bfloat16", ["B", "H", "D"]),
                "key_cache": ("bfloat16", ["num_blocks", "block_size", "KV", "D"]),
                "value_cache": ("bfloat16", ["num_blocks", "block_size", "KV", "D"]),
                "context_lens": ("int32", ["B"]),
                "block_tables": ("int32", ["B", "max_blocks"]),
                "scale": ("float32", None),
            },
            outputs={"out": ("bfloat16", ["B", "H", "D"])},
            reference=_DECODE,
            ours=_DECODE_OURS,
            plain=_DECODE_PLAIN,
            note="torch's scaled_dot_product_attention over the gathered pages",
            compare=HALF_NORM,
            constraints=["num_blocks >= B * max_blocks", "H % KV == 0"],
            scalars={"scale": 128**-0.5},
            files=("context_lens", "block_tables"),
            workloads=[{"B": 4, "num_blocks": 40, "max_blocks": 8}, {"B": 16, "num_blocks": 1100, "max_blocks": 64}],
        )
