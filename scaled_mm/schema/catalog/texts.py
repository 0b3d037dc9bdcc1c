"""Source-text fragments that read and write the bytes of each GGUF format in plain PyTorch, without this package's code."""

from __future__ import annotations

from scaled_mm.gguf_formats import FORMATS, BlockFormat

HEADER = "import torch\n"

_HALF = '''

def half(data, at):
    """The float16 at byte `at` of every block, [..., 1], in float64."""
    return data[..., at : at + 2].contiguous().view(torch.float16).double()
'''


def _levels(fmt: BlockFormat) -> str:
    at = fmt.levels_offset
    if fmt.bits == 8:
        return f"    levels = data[..., {at}:{at + 32}].contiguous().view(torch.int8).double()\n"
    low = f"    low = data[..., {at}:{at + 16}].long()  # byte j: element j in the low four bits, j + 16 in the high four\n"
    if fmt.bits == 4:
        return low + "    levels = torch.cat([low & 15, low >> 4], dim=-1).double()\n"
    return (
        low
        + f"    word = data[..., {fmt.high_offset}:{fmt.high_offset + 4}].long()  # bit j: the fifth bit of element j\n"
        + "    fifth = torch.stack([(word[..., j // 8] >> j % 8) & 1 for j in range(32)], dim=-1)\n"
        + "    levels = (torch.cat([low & 15, low >> 4], dim=-1) + 16 * fifth).double()\n"
    )


def parts(name: str) -> str:
    """The text of `<name>_parts(blocks)`: (levels [..., 32], d [..., 1], m or s [..., 1] if the format has one), in float64."""
    fmt = FORMATS[name]
    second = "" if fmt.second is None else ", half(data, 2)"
    said = {None: "d", "m": "d, minimum m", "s": "d, stored sum s"}[fmt.second]
    return (
        f"\n\ndef {name}_parts(blocks):\n"
        f'    """Levels [..., 32] and {said} [..., 1] of {name.upper()} blocks of {fmt.block_bytes} bytes, in float64."""\n'
        f"    data = blocks.contiguous().view(torch.uint8)\n{_levels(fmt)}"
        f"    return levels, half(data, 0){second}\n"
    )


def values(name: str) -> str:
    """The text of `<name>_values(blocks)`: float64 [..., 32]."""
    fmt = FORMATS[name]
    first = f"    levels, d{', m' if fmt.second == 'm' else ', _' if fmt.second else ''} = {name}_parts(blocks)\n"
    term = f"d * (levels - {fmt.zero})" if fmt.zero else "d * levels + m" if fmt.second == "m" else "d * levels"
    return f"{parts(name)}\n\ndef {name}_values(blocks):\n{first}    return {term}\n"


def reader(*pieces: str) -> str:
    """A text with the definitions that `parts` and `values` need, followed by `pieces`."""
    return HEADER + _HALF + "".join(pieces)


# ---- writing blocks -----------------------------------------------------------------------------------------------------

_WRITE = '''

def number(value, like):
    """A device tensor: for a Python divisor, a GPU multiplies by the reciprocal, which rounds twice."""
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def inverse(d):
    return torch.where(d == 0, number(0, d), number(1, d) / torch.where(d == 0, number(1, d), d))


def stored(value):
    """float32 [..., 1] converted to the two bytes of a float16."""
    return value.to(torch.float16).view(torch.uint8)
'''

_ROUND = '''

def round_away(value):
    """Rounds to the nearest integer, halves away from zero."""
    whole = value.abs().floor()
    return torch.where(value.abs() - whole >= 0.5, whole + 1, whole) * value.sign()
'''

_NIBBLES = "    nibbles = (levels[..., :16] & 15 | (levels[..., 16:] & 15) << 4).to(torch.uint8)\n"
_FIFTH = (
    "    bits = (levels >> 4).unflatten(-1, (4, 8)) << torch.arange(8, device=levels.device)\n"
    "    fifth = bits.sum(-1).to(torch.uint8)  # byte i: the fifth bits of elements 8 i to 8 i + 7\n"
)


def quantizer(name: str, rule: str) -> str:
    """A text whose `quantize(x)` makes int8 blocks [..., bytes] from float [..., 32], by the formulas of docs/design/gguf-formats.md."""
    fmt = FORMATS[name]
    top = 2**fmt.bits - 1
    body = ["\n\ndef quantize(x):\n", f'    """{name.upper()} blocks of the values [..., 32]."""\n', "    x = x.float()\n"]
    kept = ["stored(d)"]
    if fmt.second == "m":
        body += [
            "    m = x.amin(-1, keepdim=True)\n",
            f"    d = (x.amax(-1, keepdim=True) - m) / number({top}, x)\n",
            f"    levels = ((x - m) * inverse(d) + 0.5).trunc().clamp(0, {top}).long()\n",
        ]
        kept.append("stored(m)")
    elif fmt.signed:
        body += ["    d = x.abs().amax(-1, keepdim=True) / number(127, x)\n", "    levels = round_away(x * inverse(d)).to(torch.int8)\n"]
        if fmt.second == "s":
            body += [
                "    s = x  # the sum of the original values: first those 16 apart, then 8, 4, 2, 1\n",
                "    for apart in (16, 8, 4, 2, 1):\n",
                "        s = s[..., :apart] + s[..., apart:]\n",
            ]
            kept.append("stored(s)")
    elif rule == "ggml":
        body += [
            "    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # including its sign\n",
            f"    d = largest / number(-{fmt.zero}, x)\n",
            f"    levels = (x * inverse(d) + {fmt.zero + 0.5}).trunc().clamp(0, {top}).long()\n",
        ]
    else:
        body += [
            f"    d = x.abs().amax(-1, keepdim=True) / number({fmt.zero - 1}, x)\n",
            f"    levels = (round_away(x / torch.where(d == 0, number(1, d), d)) + {fmt.zero}).clamp(0, {top}).long()\n",
        ]
    if fmt.bits == 8:
        kept.append("levels.view(torch.uint8)")
    else:
        body.append(_NIBBLES)
        if fmt.bits == 5:
            body.append(_FIFTH)
            kept.append("fifth")
        kept.append("nibbles")
    body.append(f"    return torch.cat([{', '.join(kept)}], dim=-1).view(torch.int8)\n")
    needs_round = fmt.signed or (rule == "absmax" and fmt.second is None)
    return _WRITE + (_ROUND if needs_round else "") + "".join(body)
