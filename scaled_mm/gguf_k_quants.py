"""The list of llama.cpp's K-quants: types of GGUF files whose super-blocks hold 256 consecutive values of a row.

No kernel and no product reads a K-quant, so they are not in `gguf_formats.FORMATS`: they are dequantized, or converted to a format of that list.
No torch here, as in gguf_formats.py. Bytes of a super-block, little-endian and without gaps; `scaled_mm/gguf/k_quants.py` reads them:

    q4_k, q5_k                                          q6_k
    half d, dmin      factors of the numbers below      u8   ql[128]      low four bits of the levels
    u8   scales[12]   8 scales and 8 minima of 6 bits   u8   qh[64]       high two bits
    u8   qh[32]       q5_k only: fifth bits             i8   scales[16]   of 16 values each
    u8   qs[128]      low four bits of the levels       half d            factor of the scales

What they mean is in docs/design/gguf-formats.md.
"""

from __future__ import annotations

import dataclasses

SUPER_BLOCK = 256
"""Values in a super-block, in every K-quant."""


@dataclasses.dataclass(frozen=True)
class KQuant:
    """One K-quant.

    name: as the API spells it; in capitals it is the type's name in GGUF files.
    block_bytes: of a super-block.
    bits: of a stored level.
    converted: the name of the format to which `convert_k_quant` converts it, with the same levels; None: no format has its scales.
    """

    name: str
    block_bytes: int
    bits: int
    converted: str | None = None

    @property
    def block_values(self) -> int:
        """Values in a super-block."""
        return SUPER_BLOCK

    @property
    def advice(self) -> str:
        """What to do where a format of `gguf_formats.FORMATS` is expected."""
        if self.converted:
            return f"K-quants are converted by pack_block_weight or convert_k_quant, {self.name} to {self.converted}"
        return (
            f"{self.name} has a scale for each 16 values, which no product reads; multiply with dequantize_block(q, {self.name!r}) by torch, "
            "or quantize that again by quantize_block(values, 'q8_0'), which adds an error"
        )


K_QUANTS: dict[str, KQuant] = {
    description.name: description
    for description in (
        KQuant("q4_k", block_bytes=144, bits=4, converted="q4_1"),
        KQuant("q5_k", block_bytes=176, bits=5, converted="q5_1"),
        KQuant("q6_k", block_bytes=210, bits=6),
    )
}
