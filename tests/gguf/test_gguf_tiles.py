"""A GPU's packed weights: every byte where docs/design/gguf-formats.md says, and the blocks back bit by bit. On a CPU too: torch alone is used."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from gguf_data import BLOCK_BYTES, LAYOUTS, WEIGHTS, random_blocks

import scaled_mm as sm
from scaled_mm.errors import BadParamError
from scaled_mm.gguf import tiles
from scaled_mm.gguf.pack import PackedBlockWeight
from scaled_mm.gguf_formats import FORMATS

SHAPES = [(1, 1), (64, 8), (65, 9), (63, 7), (130, 17)]


def field(block: list[int], fmt: str, element: int) -> tuple[int, int]:
    """(low four bits or the byte, fifth bit) of an element."""
    layout = LAYOUTS[fmt]
    if layout.bits == 8:
        return block[layout.levels + element], 0
    nibbles = block[layout.levels + element % 16]
    fifth = block[layout.fifth_bits + element // 8] >> element % 8 & 1 if layout.bits == 5 else 0
    return (nibbles & 15 if element < 16 else nibbles >> 4), fifth


def tile_of(rows: list[list[list[int]]], fmt: str) -> bytes:
    """One tile of rows[64][8] blocks, byte by byte."""
    tile = bytearray(64 * 8 * BLOCK_BYTES[fmt])  # without the powers of its rows
    minimum, bits = LAYOUTS[fmt].minimum, LAYOUTS[fmt].bits
    band_bytes = len(tile) // 4
    halves = band_bytes - (256 if minimum is None else 512)
    for i in range(128):
        w, g, t = i // 32, i // 4 % 8, i % 4
        band, lane = w * band_bytes, i % 32
        low_row, high_row = rows[16 * w + g], rows[16 * w + g + 8]
        elements = [2 * t, 2 * t + 8, 2 * t + 16, 2 * t + 24, 2 * t + 1, 2 * t + 9, 2 * t + 17, 2 * t + 25]
        for b in range(8):
            if bits == 8:
                order = [2 * t, 2 * t + 16, 2 * t + 1, 2 * t + 17, 2 * t + 8, 2 * t + 24, 2 * t + 9, 2 * t + 25]
                words = bytes(field(row[b], fmt, e)[0] for row in (low_row, high_row) for e in order)
                at = band + b * 512 + lane * 16
                tile[at : at + 16] = words
            for which, row in enumerate((low_row, high_row)):
                at = band + halves + (g * 8 + b) * 4 + 2 * which
                tile[at : at + 2] = bytes(row[b][:2])
                if minimum is not None:
                    tile[at + 256 : at + 258] = bytes(row[b][minimum : minimum + 2])
        for p in range(4) if bits != 8 else ():
            quarters = (low_row[2 * p], high_row[2 * p], low_row[2 * p + 1], high_row[2 * p + 1])
            if bits == 5:
                words = five_words(quarters, fmt, elements)
                at = band + 2048 + p * 128 + lane * 4
                tile[at : at + 4] = words[4].to_bytes(4, "little")
            else:
                words = [sum(field(block, fmt, element)[0] << 4 * j for j, element in enumerate(elements)) for block in quarters]
            for c in range(4):
                at = band + p * 512 + lane * 16 + 4 * c
                tile[at : at + 4] = words[c].to_bytes(4, "little")
    return bytes(tile)


def five_words(quarters: tuple[list[int], ...], fmt: str, elements: list[int]) -> list[int]:
    """Every bit by itself: the 160 of 16 pairs of levels; quarters has four pairs of each block, elements their first halves, then their second."""
    words = [0] * 5
    for n in range(16):
        for half in range(2):
            low, fifth = field(quarters[n // 4], fmt, elements[n % 4 + 4 * half])
            for bit in range(5):
                word, place = (n // 3, n % 3 * 5 + bit) if n < 15 else (bit, 15)
                words[word] |= ((low | fifth << 4) >> bit & 1) << (16 * half + place)
    return words


def powers_of(rows: torch.Tensor, fmt: str) -> bytes:
    """The powers of 64 rows of blocks. Rows g and g + 8 of a band are neighbours."""
    minimum = LAYOUTS[fmt].minimum
    powers = []
    for row in rows.clone():
        d = row[:, :2].clone().view(torch.float16).flatten().tolist()
        m = [0.0] * len(d) if minimum is None else row[:, minimum : minimum + 2].clone().view(torch.float16).flatten().tolist()
        largest_d, largest_m = (max((abs(one) for one in of if math.isfinite(one)), default=0.0) for of in (d, m))
        powers.append(2.0 ** min([15] + [most - math.frexp(one)[1] for most, one in ((1, largest_d), (16, largest_m)) if one]))
    order = [16 * w + 8 * h + g for w in range(4) for g in range(8) for h in range(2)]
    return bytes(torch.tensor([powers[row] for row in order]).half().view(torch.uint8).tolist())


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("m, blocks", SHAPES)
def test_every_byte_is_where_the_documentation_says(fmt, m, blocks):
    q = random_blocks(m, blocks, fmt, seed=m)
    made = tiles.from_blocks(q, FORMATS[fmt])
    assert made.shape == (-(-m // 64), -(-blocks // 8), 512 * BLOCK_BYTES[fmt] + 128)
    padded = torch.zeros((made.shape[0] * 64, made.shape[1] * 8, BLOCK_BYTES[fmt]), dtype=torch.uint8)
    padded[:m, :blocks] = q
    for r in range(made.shape[0]):
        for c in range(made.shape[1]):
            part = padded[64 * r : 64 * r + 64, 8 * c : 8 * c + 8].tolist()
            assert bytes(made[r, c, :-128].tolist()) == tile_of(part, fmt), (r, c)
            assert bytes(made[r, c, -128:].tolist()) == powers_of(padded[64 * r : 64 * r + 64], fmt), (r, c)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_powers_of_rows_without_scales(fmt):
    """Rows of zeros, rows whose scales or minima alone are zero, and rows without blocks."""
    description = FORMATS[fmt]
    q = torch.zeros((3, 2, description.block_bytes), dtype=torch.uint8)
    q[1, 0, :2] = torch.tensor([2.0**-3]).half().view(torch.uint8)
    if description.second == "m":
        q[2, 1, 2:4] = torch.tensor([2.0**9]).half().view(torch.uint8)
    assert tiles.powers(q, description).tolist() == [2.0**15, 2.0**3, 2.0**6 if description.second == "m" else 2.0**15]
    assert tiles.powers(q[:, :0], description).tolist() == [2.0**15] * 3


@pytest.mark.parametrize("fmt", [fmt for fmt in WEIGHTS if LAYOUTS[fmt].bits == 5])
def test_each_bit_of_a_thread_s_levels_of_five_bits_has_one_place(fmt):
    # (block, row of the band, element) of lane 0 and bit of its level: (byte of the 16, or of the fifth word, and bit of it)
    places = {
        (0, 0, 0, 0): (0, 0),
        (0, 0, 1, 4): (2, 4),
        (0, 0, 8, 0): (0, 5),
        (0, 0, 8, 3): (1, 0),
        (0, 0, 16, 0): (1, 2),
        (0, 0, 24, 0): (4, 0),
        (0, 8, 0, 0): (4, 5),
        (0, 8, 24, 4): (9, 1),
        (1, 0, 0, 0): (9, 2),
        (1, 0, 8, 0): (12, 0),
        (1, 8, 16, 4): (2048 + 1, 6),
        (1, 8, 24, 0): (1, 7),
        (1, 8, 24, 1): (5, 7),
        (1, 8, 24, 3): (13, 7),
        (1, 8, 24, 4): (2048 + 1, 7),
        (1, 8, 25, 4): (2048 + 3, 7),
    }
    levels, fifth_bits = LAYOUTS[fmt].levels, LAYOUTS[fmt].fifth_bits
    for (block, row, element, bit), (byte, place) in places.items():
        q = torch.zeros((64, 8, BLOCK_BYTES[fmt]), dtype=torch.uint8)
        if bit < 4:
            q[row, block, levels + element % 16] = 1 << bit + (4 if element >= 16 else 0)
        else:
            q[row, block, fifth_bits + element // 8] = 1 << element % 8
        made = tiles.from_blocks(q, FORMATS[fmt])[..., :-128].flatten()
        assert made.nonzero().flatten().tolist() == [byte] and made[byte] == 1 << place, (block, row, element, bit)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_tiles_give_the_blocks_back_bit_by_bit(device, fmt):
    for m, blocks in (*SHAPES, (0, 3), (3, 0), (1000, 33)):
        q = random_blocks(m, blocks, fmt, seed=blocks).to(device)
        assert torch.equal(tiles.to_blocks(tiles.from_blocks(q, FORMATS[fmt]), m, blocks, FORMATS[fmt]), q), (m, blocks)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_large_weight_is_converted_in_pieces(fmt, monkeypatch):
    q = random_blocks(300, 9, fmt, seed=5)
    whole = tiles.from_blocks(q, FORMATS[fmt])
    monkeypatch.setattr(tiles, "_CHUNK_BLOCKS", 1)  # a row of tiles at a time
    assert torch.equal(tiles.from_blocks(q, FORMATS[fmt]), whole)
    assert torch.equal(tiles.to_blocks(whole, 300, 9, FORMATS[fmt]), q)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_blocks_at_odd_addresses_are_taken(fmt):
    q = random_blocks(70, 9, fmt, seed=2)
    memory = torch.empty(70 * (q[0].numel() + 3) + 1, dtype=torch.uint8)
    view = memory[1:].view(70, -1)[:, : q[0].numel()].unflatten(1, q.shape[1:]).copy_(q)
    assert torch.equal(tiles.from_blocks(view, FORMATS[fmt]), tiles.from_blocks(q, FORMATS[fmt]))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_weight_packed_on_a_gpu_is_the_tiles_of_a_cpu_and_constant(fmt):
    q = random_blocks(130, 17, fmt, seed=3)
    packed = sm.pack_block_weight(q.cuda(), fmt)
    assert packed.constant and packed.fields is None and torch.equal(packed.tiles.cpu(), tiles.from_blocks(q, FORMATS[fmt]))
    from_cpu = sm.pack_block_weight(q, fmt).to("cuda")
    assert from_cpu.constant and torch.equal(from_cpu.tiles, packed.tiles) and from_cpu.to(packed.device) is from_cpu
    back = packed.to("cpu")
    assert back.tiles is None and not back.constant and torch.equal(back.unpack(), q)
    for kept, other in zip(packed.parts(), back.fields):
        assert (kept is None) == (other is None) and (kept is None or torch.equal(kept.cpu().view(torch.uint8), other.view(torch.uint8)))
    copied = pickle.loads(pickle.dumps(packed))
    assert not copied.constant and not copy.deepcopy(packed).constant and torch.equal(copied.tiles, packed.tiles)


@pytest.mark.parametrize("layout", [None, 1, 3])
def test_a_pickle_with_another_layout_of_tiles_is_refused(layout):
    q = random_blocks(64, 8, "q4_0", seed=1)
    packed = PackedBlockWeight("q4_0", 64, 256, tiles.from_blocks(q, FORMATS["q4_0"]), None)
    state = packed.__getstate__()
    assert state.pop("layout") == tiles.LAYOUT and torch.equal(copy.deepcopy(packed).tiles, packed.tiles)
    with pytest.raises(BadParamError, match=f"expected a pickle with layout 2 of tiles, got {layout or 1}: pack the weight again"):
        PackedBlockWeight.__new__(PackedBlockWeight).__setstate__(state if layout is None else {**state, "layout": layout})
