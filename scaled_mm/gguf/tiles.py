"""Packed weights on a GPU: tiles of 64 rows by 8 blocks. Each part is stored in the order in which threads read it.

Tiles of a weight [N, K] are uint8 [ceil(N/64), ceil(K/256), 512 * bytes of a block + 128]; rows and blocks past the end are zero bytes. A tile has
four bands of 16 rows, and then the powers of its rows. The parts of a band follow one another: levels, fifth words of levels of five bits, d, m of
formats with a minimum. docs/design/gguf-formats.md gives the position of every byte. No arithmetic, but for powers.

Axis names below: w is the warp, g the group of a thread, h the first or second of its two rows; row = 16 w + 8 h + g. t is the thread in its
group. Block b = 2 p + e. Element of a block: 8 q + 2 t + o with q = 2 y + s; for 8-bit levels 16 u + 8 v + 2 t + o. Pair of five-bit levels:
n = 8 e + 4 h + q.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scaled_mm.gguf import layout
from scaled_mm.gguf_formats import BLOCK, TILE_BLOCKS, TILE_ROWS, BlockFormat

_W, _H, _G, _T = 4, 2, 8, 4
_P, _E = TILE_BLOCKS // 2, 2
LAYOUT = 2  # of tiles; pickles have it. 1: powers of rows had another meaning
_CHUNK_BLOCKS = 1 << 21  # converted at a time, which bounds temporary memory


def shape(rows: int, blocks: int, description: BlockFormat) -> tuple[int, int, int]:
    """The shape of the tiles of a weight [rows, 32 * blocks]."""
    return -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS), description.tile_bytes


def from_blocks(q: torch.Tensor, description: BlockFormat) -> torch.Tensor:
    """The tiles of q, uint8 [N, K/32, bytes of a block], on q's device."""
    m, blocks, _ = q.shape
    tiles = q.new_empty(shape(m, blocks, description))
    for part in _chunks(tiles):
        rows = q[part.start * TILE_ROWS : part.stop * TILE_ROWS]
        _pack(rows, description, tiles[part, :, : -2 * TILE_ROWS])
        tiles[part, :, -2 * TILE_ROWS :] = _tiled_powers(powers(rows, description), part.stop - part.start)
    return tiles


def powers(q: torch.Tensor, description: BlockFormat) -> torch.Tensor:
    """float16 [N]: for each row of q, uint8 [N, K/32, bytes of a block], the power p = 2^(e+9) that is stored with it, from 2^-15 to 2^15.

    Kernels multiply values by 2^e before they round them to 16 bits. p is the largest, up to 2^15, for which 2^15 p d and p m of all blocks stay
    finite in float16. Scales and minima that are not finite do not count."""
    fields = layout.take_apart(q, description)
    exponents = (1 - _exponents(fields.d, -14)).clamp(max=15)
    if fields.second is not None:
        exponents = torch.minimum(exponents, 16 - _exponents(fields.second, 1))
    return torch.ldexp(exponents.new_ones(q.shape[0], dtype=torch.float32), exponents).half()


def _exponents(of: torch.Tensor, of_zeros: int) -> torch.Tensor:
    """int32 [N]: the least n for which the finite values of a row of [N, K/32] are below 2^n. of_zeros: the n of a row that has none but zeros."""
    largest = of.abs().float().nan_to_num(0.0, 0.0).amax(1) if of.shape[1] else of.new_zeros(of.shape[0], dtype=torch.float32)
    return torch.where(largest > 0, torch.frexp(largest).exponent, of_zeros)


def _tiled_powers(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Bytes [R, 1, 128] of float16 [rows of the weight], in the order w g h."""
    padded = values.new_full((rows * TILE_ROWS,), 2.0**15)
    padded[: len(values)] = values
    return padded.view(rows, 1, _W, _H, _G).transpose(3, 4).contiguous().view(torch.uint8).flatten(2)


def to_blocks(tiles: torch.Tensor, m: int, blocks: int, description: BlockFormat) -> torch.Tensor:
    """The exact inverse of `from_blocks`."""
    q = tiles.new_empty((m, blocks, description.block_bytes))
    for part in _chunks(tiles):
        _unpack(tiles[part, :, : -2 * TILE_ROWS], description, q[part.start * TILE_ROWS : part.stop * TILE_ROWS])
    return q


def _chunks(tiles: torch.Tensor) -> Iterator[slice]:
    """Slices of whole rows of tiles."""
    size = max(1, _CHUNK_BLOCKS // (TILE_ROWS * TILE_BLOCKS * max(1, tiles.shape[1])))
    for start in range(0, tiles.shape[0], size):
        yield slice(start, min(start + size, tiles.shape[0]))


def _split(tiles: torch.Tensor, description: BlockFormat) -> list[torch.Tensor]:
    """Views [R, C, w, bytes] of the parts of bands: levels, fifth words, d, m. Absent parts are empty."""
    blocks = TILE_ROWS * TILE_BLOCKS // _W
    halves = 2 * blocks
    sizes = [blocks * description.level_bytes, blocks * description.high_bytes, halves, halves if description.second else 0]
    return list(tiles.unflatten(-1, (_W, -1)).split(sizes, -1))


def _pack(q: torch.Tensor, description: BlockFormat, tiles: torch.Tensor) -> None:
    rows, columns = tiles.shape[:2]
    padded = q.new_zeros((rows * TILE_ROWS, columns * TILE_BLOCKS, description.block_bytes))
    padded[: q.shape[0], : q.shape[1]] = q
    fields = layout.take_apart(padded, description)
    levels, high, d, second = _split(tiles, description)
    values = layout.unpack_levels(fields).view(torch.uint8)
    if description.signed:
        values = values.view(rows, _W, _H, _G, columns, TILE_BLOCKS, 2, 2, _T, 2)  # R w h g C b u v t o
        levels.copy_(values.permute(0, 4, 1, 5, 3, 8, 2, 7, 9, 6).reshape(levels.shape))
    elif description.high_bytes:
        words = _words_of_fives(values.view(rows, _W, _H, _G, columns, _P, _E, 4, _T, 2))
        levels.copy_(words[..., :4, :].reshape(levels.shape))
        high.copy_(words[..., 4, :].reshape(high.shape))
    else:
        values = values.view(rows, _W, _H, _G, columns, _P, _E, 2, 2, _T, 2)  # R w h g C p e y s t o
        pairs = values.select(8, 0) | (values.select(8, 1) << 4)
        levels.copy_(pairs.permute(0, 4, 1, 5, 3, 8, 6, 2, 9, 7).reshape(levels.shape))
    d.copy_(_tiled_halves(fields.d, rows, columns).reshape(d.shape))
    if fields.second is not None:
        second.copy_(_tiled_halves(fields.second, rows, columns).reshape(second.shape))


def _words_of_fives(values: torch.Tensor) -> torch.Tensor:
    """The bytes [R, C, w, p, g, t, 5, 4] of a thread's five words, from levels [R, w, h, g, C, p, e, q, t, o].

    Half o of word i contains level o of pairs 3 i, 3 i + 1 and 3 i + 2 at bits 0, 5 and 10, and bit i of level o of pair 15 at bit 15.
    """
    pairs = values.permute(0, 4, 1, 5, 3, 8, 6, 2, 7, 9).flatten(6, 8).to(torch.int16)  # R C w p g t n o
    first, second, third = (pairs[..., field:15:3, :] for field in range(3))
    halves = first | (second << 5) | (third << 10) | ((pairs[..., 15:, :] >> _word_numbers(pairs.device)) << 15)
    return halves.contiguous().view(torch.uint8)


def _tiled_halves(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bytes of float16 [rows, blocks] in the order R C w g b h."""
    bits = values.view(torch.int16).view(rows, _W, _H, _G, columns, TILE_BLOCKS)
    ordered = bits.permute(0, 4, 1, 3, 5, 2).reshape(rows, columns, TILE_ROWS * TILE_BLOCKS)
    return ordered.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unpack(tiles: torch.Tensor, description: BlockFormat, q: torch.Tensor) -> None:
    rows, columns = tiles.shape[:2]
    levels, high, d, second = _split(tiles, description)
    whole = (rows * TILE_ROWS, columns * TILE_BLOCKS, BLOCK)
    if description.signed:
        values = levels.reshape(rows, columns, _W, TILE_BLOCKS, _G, _T, _H, 2, 2, 2)  # R C w b g t h v o u
        values = values.permute(0, 2, 6, 4, 1, 3, 9, 7, 5, 8).reshape(whole).view(torch.int8)
    elif description.high_bytes:
        words = [part.reshape(rows, columns, _W, _P, _G, _T, count, 4) for part, count in ((levels, 4), (high, 1))]
        values = _fives_of_words(torch.cat(words, -2)).reshape(whole)
    else:
        pairs = levels.reshape(rows, columns, _W, _P, _G, _T, _E, _H, 2, 2)  # R C w p g t e h o y
        values = torch.stack((pairs & 15, pairs >> 4), -1)
        values = values.permute(0, 2, 7, 4, 1, 3, 6, 9, 10, 5, 8).reshape(whole)  # R w h g C p e y s t o
    high_bits, packed = layout.pack_levels(values, description)
    halves = [None if part.shape[-1] == 0 else _plain_halves(part, rows, columns) for part in (d, second)]
    parts = layout.Parts(*halves, high_bits, packed)
    layout.put_together(parts.slice(slice(0, q.shape[0]), slice(0, q.shape[1])), description, q)


def _fives_of_words(words: torch.Tensor) -> torch.Tensor:
    """Levels [R, w, h, g, C, p, e, q, t, o]: the inverse of `_words_of_fives`."""
    halves = words.view(torch.int16)
    pairs = words.new_empty((*halves.shape[:-2], 16, 2))  # R C w p g t n o
    for field in range(3):
        pairs[..., field:15:3, :] = (halves >> 5 * field) & 31
    pairs[..., 15, :] = (((halves >> 15) & 1) << _word_numbers(words.device)).sum(-2)
    return pairs.unflatten(-2, (_E, _H, 4)).permute(0, 2, 7, 4, 1, 3, 6, 8, 5, 9)


def _word_numbers(device: torch.device) -> torch.Tensor:
    """[i, 1], to broadcast with the halves of words."""
    return torch.arange(5, dtype=torch.int16, device=device).unsqueeze(-1)


def _plain_halves(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float16 [rows, blocks]: the inverse of `_tiled_halves`."""
    bits = part.contiguous().view(torch.int16).view(rows, columns, _W, _G, TILE_BLOCKS, _H)
    return bits.permute(0, 2, 5, 3, 1, 4).reshape(rows * TILE_ROWS, columns * TILE_BLOCKS).view(torch.float16)
