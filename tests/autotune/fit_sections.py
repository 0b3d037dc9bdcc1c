"""Fits the `times` of sm90's sections for experts and block-scaled products: `python tests/autotune/fit_sections.py`.

Prints the loss of the choice on fitted and on held-out products, and the `times` entries for the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from scaled_mm.autotune.fit import Choice, fit, judge
from scaled_mm.kernels.gpu import facts
from scaled_mm.tables import TileTable, load_table

DATA = Path(__file__).parents[1] / "tables" / "data"
H200 = facts("NVIDIA H200", "sm90", 132)
TABLE = load_table("sm90")
SECTIONS: dict[str, TileTable] = {"channel": TABLE.grouped, "block": TABLE.grouped_block_scaled}
LOCAL, SHARE = "deepseek_ep8", 8  # one of eight ranks, so an eighth of the rows is expected to belong to its experts
LEAST_TILE_US = 1.0  # of block-scaled products, whose K is at least 1536: too long to tell a tile's own time
Measured = dict[tuple[int, ...], dict[str, float]]


def experts(scales: str, wanted: Callable[[dict], bool]) -> Measured:
    """Microseconds by product (M, N, K, count) and kernel config."""
    cases = json.loads((DATA / "h200_experts.json").read_text())["cases"]
    return {_product(case): case["us"] for case in cases if case["scales"] == scales and wanted(case)}


def _product(case: dict) -> tuple[int, ...]:
    """(M, N, K, count) that a plan predicts the time of."""
    M, count = case["M"], case["count"]
    if case["model"] == LOCAL:
        rows = -(-M * count // SHARE)
        count = min(count, rows)
        M = -(-rows // count)
    return M, case["N"], case["K"], count


def balanced(case: dict) -> bool:
    """Cases that the times are fitted to."""
    return case["routing"] == "balanced" and case["model"] != LOCAL


def skewed(case: dict) -> bool:
    return case["routing"] == "skewed" and case["model"] != LOCAL


def local(case: dict) -> bool:
    return case["routing"] == "balanced" and case["model"] == LOCAL


def block_scaled() -> Measured:
    """Microseconds by product (M, N, K) and kernel config."""
    cases = json.loads((DATA / "h200_block_scaled.json").read_text())["cases"]
    return {(case["M"], case["N"], case["K"]): case["us"] for case in cases}


def held_out(scales: str, model: str) -> Choice | None:
    """The choice on the products of one model by times that were fitted to the others."""
    others = experts(scales, lambda case: balanced(case) and case["model"] != model)
    own = experts(scales, lambda case: balanced(case) and case["model"] == model)
    section = SECTIONS[scales]
    return judge(section.model_copy(update={"times": fit(section, others, H200)}), own, H200)


def _show(section: TileTable, measured: Measured, least_tile_us: float = 0.0) -> None:
    print("  the table's times:", judge(section, measured, H200))
    for name, times in fit(section, measured, H200, least_tile_us).items():
        print(f"    {name}: {{{', '.join(f'{key}: {value}' for key, value in times.model_dump(exclude_defaults=True).items())}}}")


def main() -> None:
    for scales, section in SECTIONS.items():
        print("products of experts, scales of", scales)
        for model in ("mixtral", "qwen3", "deepseek"):
            print(f"  fitted to the other models, on {model}:", held_out(scales, model))
        for wanted in (skewed, local):
            print(f"  {wanted.__name__} routing:", judge(section, experts(scales, wanted), H200))
        _show(section, experts(scales, balanced))
    print("block-scaled products")
    _show(TABLE.block_scaled, block_scaled(), LEAST_TILE_US)


if __name__ == "__main__":
    main()
