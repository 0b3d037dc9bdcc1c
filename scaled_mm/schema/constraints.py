"""Constraints between axes, such as `K == 32 * KB`. flashinfer-bench parses and stores them; here they are also evaluated.

An expression may contain names of axes, integers, + - * // %, comparisons, and, or, not, and nothing else. `eval` is not used.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping

_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


_LONGEST = 400  # characters; bounds the nesting for Python's parser and for the recursion here
_ALLOWED = (ast.Load, ast.And, ast.Or, ast.Not, ast.USub, *_BINARY, *_COMPARE)


def names(expression: str) -> set[str]:
    """The axes in an expression."""
    return {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}


def check(expression: str, axes: set[str]) -> None:
    """Raises ValueError if the expression cannot be evaluated with these axes."""
    tree = _parse(expression)
    for node in ast.walk(tree):
        integer = isinstance(node, ast.Constant) and type(node.value) is int
        if not integer and not isinstance(node, (ast.Name, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, *_ALLOWED)):
            raise ValueError(
                f"expected axes, integers, + - * // %, comparisons, and, or, not; got {ast.unparse(node) or type(node).__name__!r} in {expression!r}"
            )
    unknown = names(expression) - axes
    if unknown:
        raise ValueError(f"expected names of axes ({', '.join(sorted(axes))}), got {', '.join(sorted(unknown))} in {expression!r}")
    if not isinstance(tree, (ast.Compare, ast.BoolOp)) and not (isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)):
        raise ValueError(f"expected a comparison, got {expression!r}")


def holds(expression: str, sizes: Mapping[str, int]) -> bool:
    """Whether an expression accepted by `check` is true for these sizes of axes. A division by 0 makes it false."""
    try:
        return bool(_evaluate(_parse(expression), sizes))
    except ZeroDivisionError:
        return False


def _parse(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise ValueError(f"expected at most {_LONGEST} characters, got {len(expression)}")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected an expression, got {expression!r} ({error})") from error


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int | bool:
    def value(part: ast.expr) -> int | bool:
        return _evaluate(part, sizes)

    match node:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value(operand)
        case ast.UnaryOp(operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](value(left), value(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)([value(part) for part in values])
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            numbers = [value(left), *(value(part) for part in comparators)]
            return all(_COMPARE[type(op)](*pair) for op, pair in zip(ops, zip(numbers, numbers[1:])))
    raise AssertionError(f"{ast.dump(node)} was not checked")
