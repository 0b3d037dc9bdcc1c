"""The predicted time of what travels for a layer of experts that are divided over ranks, each expert whole on one rank.

Both ways start with normalized, quantized tokens, an equal share on each rank, and end with the layer's output for all tokens on every rank. Between
them both multiply the same rows, which is not counted. Tokens choose experts uniformly; a popular expert makes its rank, and so all, slower.
"""

from __future__ import annotations

import math

from scaled_mm.errors import BadParamError
from scaled_mm.parallel.cost.collectives import all_gather_us, all_to_all_us, reduce_scatter_us
from scaled_mm.parallel.cost.links import Hosts, check_count


def experts_all_to_all(tokens: int, choices: int, experts: int, hidden: int, ranks: int, hosts: Hosts) -> dict[str, float]:
    """Microseconds by part if each token goes to the ranks of its experts.

    dispatch: int8 rows with a float32 scale and `choices` int32 ids, once to each rank that has an expert of the token. combine: a bfloat16 row for
    each choice, back to the token's rank, which sums them in a fixed order. gather: bfloat16 results to all ranks. Not in it: the numbers of rows,
    which the host of each rank must know before.
    tokens: of all ranks together. Raises BadParamError that names the argument.
    """
    _check(tokens, choices, experts, hidden, ranks)
    own = -(-tokens // ranks)
    copies = own * reached_ranks(choices, experts, ranks)
    return {
        "dispatch": all_to_all_us(round(copies * (hidden + 4 + 4 * choices)), ranks, hosts),
        "combine": all_to_all_us(own * choices * hidden * 2, ranks, hosts),
        "gather": all_gather_us(own * ranks * hidden * 2, ranks, hosts),
    }


def experts_replicated(tokens: int, choices: int, experts: int, hidden: int, ranks: int, hosts: Hosts) -> dict[str, float]:
    """Microseconds by part if every rank has all tokens and computes those of its experts.

    tokens: an all-gather of int8 rows with a float32 scale. combine: a reduce-scatter of bfloat16 [tokens, choices, hidden], where all ranks but one
    have zeros, which is exact. gather: as above. The arguments and errors: see `experts_all_to_all`.
    """
    _check(tokens, choices, experts, hidden, ranks)
    rows = -(-tokens // ranks) * ranks
    return {
        "tokens": all_gather_us(rows * (hidden + 4), ranks, hosts),
        "combine": reduce_scatter_us(rows * choices * hidden * 2, ranks, hosts),
        "gather": all_gather_us(rows * hidden * 2, ranks, hosts),
    }


def reached_ranks(choices: int, experts: int, ranks: int) -> float:
    """The mean number of ranks that have an expert of a token, its choices being distinct and uniform."""
    elsewhere = experts - experts // ranks
    return ranks * (1 - math.comb(elsewhere, choices) / math.comb(experts, choices))


def _check(tokens: int, choices: int, experts: int, hidden: int, ranks: int) -> None:
    for name, value in (("tokens", tokens), ("choices", choices), ("experts", experts), ("hidden", hidden), ("ranks", ranks)):
        check_count(name, value)
    if experts % ranks:
        raise BadParamError(f"experts: expected a multiple of the {ranks} ranks, got {experts}")
    if choices > experts:
        raise BadParamError(f"choices: expected at most {experts} (experts), got {choices}")
