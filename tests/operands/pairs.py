"""Pairwise grids: every value of a dimension meets every value of every other one, in far fewer cases than the whole product.

A bug of two options that do not fit together shows in such a grid. One of three is left to the random tests beside it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def pairs(**dimensions: Sequence[Any]) -> list[dict[str, Any]]:
    """Cases as keyword arguments, the same ones each time. Values need not be hashable; one dimension gives its values."""
    values = {name: list(options) for name, options in dimensions.items()}
    if len(values) == 1:
        ((name, options),) = values.items()
        return [{name: option} for option in options]
    places = [range(len(options)) for options in values.values()]  # AllPairs compares values: 0, False and 0.0 would be one
    cases = [{name: options[place] for (name, options), place in zip(values.items(), row)} for row in AllPairs(places)]
    assert not (left_out := missing(cases, **values)), left_out
    return cases


def pairwise(**dimensions: Sequence[Any]) -> Callable[[Callable], Callable]:
    """A test for each case of `pairs`; it takes the dimensions by name or by `**options`, beside its fixtures.

    @pairwise(bias=BIASES, shape=SHAPES)
    def test_every_pair_of_options(device, shape, **options): ...
    """
    cases = [pytest.param(case, id="-".join(map(_label, case.values()))) for case in pairs(**dimensions)]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def with_case(pair: dict[str, Any], **fixtures: Any) -> None:
            test(**fixtures, **pair)

        # pytest asks the signature for fixtures, and refuses names that only **options takes.
        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in dimensions and p.kind is not p.VAR_KEYWORD]
        pair = inspect.Parameter("pair", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        with_case.__signature__ = signature.replace(parameters=[*fixtures, pair])
        return pytest.mark.parametrize("pair", cases)(with_case)

    return decorate


def missing(cases: Sequence[dict[str, Any]], **dimensions: Sequence[Any]) -> list[str]:
    """The pairs of values that no case has."""
    found = []
    for (first, xs), (second, ys) in itertools.combinations(dimensions.items(), 2):
        met = [(case[first], case[second]) for case in cases]
        found += [f"{first}={x!r} with {second}={y!r}" for x, y in itertools.product(xs, ys) if not any(a is x and b is y for a, b in met)]
    return found


def _label(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
