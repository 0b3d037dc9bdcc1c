"""Attention over paged caches; attention with the same bits everywhere."""

from __future__ import annotations

import math

import torch

from scaled_mm.core.checks import check_device, check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.nn.reproducible import reproducible_attention  # noqa: F401  (public here)
from scaled_mm.rowwise.operands import check_float


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_heads: int,
    scale: float,
    kv_heads: int,
) -> torch.Tensor:
    """Attention of one new token of each sequence over the keys and values of that sequence, which are stored in pages.

        out[s, h] = sum over j < context_lens[s] of softmax_j(scale * query[s, h] . key[s, j, g]) * value[s, j, g],    g = h // (num_heads / kv_heads)
        key[s, j] = key_cache[block_tables[s, j // page], j % page],  value alike

    query: float [sequences, num_heads, D] or [sequences, num_heads * D]. key_cache, value_cache: query's dtype, [pages, page, kv_heads, D].
    context_lens: int32 or int64 [sequences], the new token included; 0: the result is 0. block_tables: int32 or int64 [sequences, pages of a
    sequence at most]; entries past a sequence's end are not read. scale: a finite number, usually 1 / sqrt(D).

    Returns query's shape and dtype. float16 and bfloat16 on a GPU use `torch.nn.attention.varlen.varlen_attn` if it accepts block tables (torch
    2.13). Other calls gather the pages and compute in float32, under autocast too. A NaN that is read makes its heads NaN.
    Values of context_lens and block_tables are checked on a CPU only. Attention is outside of the bit-exactness guarantee. Raises a
    ScaledMMError subclass that names the argument.
    """
    sequences, size = _check(query, key_cache, value_cache, context_lens, block_tables, num_heads, kv_heads)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise BadParamError(f"scale: expected a finite number, got {scale!r}")
    rows = query.reshape(sequences, num_heads, size)
    if key_cache.shape[0] == 0:  # no sequence has a token
        return torch.zeros_like(query)
    if query.is_cuda and query.dtype is not torch.float32 and (varlen := _varlen()) is not None:
        out = _by_varlen(varlen, rows, key_cache, value_cache, context_lens, block_tables, scale)
    else:
        out = _by_gathering(rows, key_cache, value_cache, context_lens, block_tables, scale, num_heads // kv_heads)
    return out.reshape(query.shape)


def _by_gathering(query, key_cache, value_cache, context_lens, block_tables, scale, repeats) -> torch.Tensor:
    page = key_cache.shape[1]
    places = torch.arange(block_tables.shape[1] * page, device=query.device)
    read = places[None] < context_lens[:, None]  # [S, L]
    tables = torch.where(read.view(*block_tables.shape, page).any(-1), block_tables, 0).long()

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        """[S, heads, L, D], float32; places that are not read are 0, whatever is stored there."""
        pages = cache[tables].flatten(1, 2).float()
        return torch.where(read[:, :, None, None], pages, 0.0).repeat_interleave(repeats, 2).transpose(1, 2)

    with torch.autocast(query.device.type, enabled=False):
        scores = (query.float()[:, :, None] @ gathered(key_cache).transpose(2, 3))[:, :, 0] * scale
        probabilities = scores.masked_fill(~read[:, None], float("-inf")).softmax(-1) if places.numel() else scores
        probabilities = probabilities.masked_fill((context_lens == 0)[:, None, None], 0.0)
        return (probabilities[:, :, None] @ gathered(value_cache))[:, :, 0].to(query.dtype)


def _varlen():
    """torch's attention of sequences of different lengths, if it reads pages."""
    try:
        import inspect

        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn).parameters) else None


def _by_varlen(varlen, query, key_cache, value_cache, context_lens, block_tables, scale) -> torch.Tensor:
    sequences, longest = query.shape[0], block_tables.shape[1] * key_cache.shape[1]
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=query.device)
    grouped = query.shape[1] != key_cache.shape[2]
    options = dict(block_table=block_tables.int(), seqused_k=context_lens.int(), scale=scale, num_splits=1, enable_gqa=grouped)
    out = varlen(query, key_cache, value_cache, starts, None, 1, longest, **options)
    return out.masked_fill((context_lens == 0)[:, None, None], 0.0)


def _check(query, key_cache, value_cache, context_lens, block_tables, num_heads, kv_heads) -> tuple[int, int]:
    """(sequences, the size D of a head)."""
    for name, value in (("num_heads", num_heads), ("kv_heads", kv_heads)):
        if not isinstance(value, int) or value < 1:
            raise BadParamError(f"{name}: expected an integer of 1 or more, got {value!r}")
    if num_heads % kv_heads:
        raise BadParamError(f"kv_heads: expected a divisor of num_heads = {num_heads}, got {kv_heads}")
    check_float("query", query)
    if not (query.dim() == 3 and query.shape[1] == num_heads or query.dim() == 2 and query.shape[1] % num_heads == 0):
        raise BadTensorShapeError(f"query: expected [sequences, {num_heads}, D] or [sequences, {num_heads} * D], got {list(query.shape)}")
    sequences, size = query.shape[0], query.shape[1:].numel() // num_heads
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_float(name, cache, (query.dtype,))
        check_device(name, cache, query.device)
        if cache.dim() != 4 or tuple(cache.shape[2:]) != (kv_heads, size) or cache.shape[1] < 1 or cache.shape != key_cache.shape:
            raise BadTensorShapeError(f"{name}: expected [pages, page, {kv_heads}, {size}] as key_cache, got {list(cache.shape)}")
    for name, tensor, dims in (("context_lens", context_lens, 1), ("block_tables", block_tables, 2)):
        check_strided(name, tensor)
        check_device(name, tensor, query.device)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise BadTensorDtypeError(f"{name}: expected int32 or int64, got {tensor.dtype}")
        if tensor.dim() != dims or tensor.shape[0] != sequences:
            shape = f"[{sequences}]" if dims == 1 else f"[{sequences}, pages]"
            raise BadTensorShapeError(f"{name}: expected {shape}, got {list(tensor.shape)}")
    if sequences and (query.device.type == "cpu" or key_cache.shape[0] == 0 and not query.is_meta):
        _check_values(key_cache, context_lens, block_tables)
    return sequences, size


def _check_values(key_cache, context_lens, block_tables) -> None:
    """On a CPU, and for a cache without pages: reading them on a GPU synchronizes."""
    page, capacity = key_cache.shape[1], block_tables.shape[1] * key_cache.shape[1]
    if int(context_lens.min()) < 0 or int(context_lens.max()) > capacity:
        raise BadParamError(f"context_lens: expected 0 to {capacity}, got {int(context_lens.min())} to {int(context_lens.max())}")
    first = torch.arange(block_tables.shape[1], device=block_tables.device) * page
    used = block_tables[first[None] < context_lens[:, None]]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= key_cache.shape[0]):
        raise BadParamError(f"block_tables: expected pages from 0 to {key_cache.shape[0] - 1}, got {int(used.min())} to {int(used.max())}")
