"""Constraints between axes, like `K == 32 * KB`. flashinfer-bench parses and keeps them; here they are evaluated too.

An expression may have names of axes, integers, + - * // %, comparisons, and, or, not. Nothing else is evaluated, and nothing by `eval`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping

_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


def names(expression: str) -> set[str]:
    """The axes that an expression names."""
    return {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}


def check(expression: str, axes: set[str]) -> None:
    """ValueError for what cannot be evaluated with these axes."""
    unknown = names(expression) - axes
    if unknown:
        raise ValueError(f"expected names of axes ({', '.join(sorted(axes))}), got {', '.join(sorted(unknown))} in {expression!r}")
    tree = _parse(expression)
    if not isinstance(tree, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        raise ValueError(f"expected a comparison, got {expression!r}")
    try:
        _evaluate(tree, dict.fromkeys(axes, 1), expression)
    except ZeroDivisionError:
        pass  # with sizes of 1; sizes that are asked about may do


def holds(expression: str, sizes: Mapping[str, int]) -> bool:
    """Whether it is true of these sizes of axes. A division by 0 is not."""
    try:
        return bool(_evaluate(_parse(expression), sizes, expression))
    except ZeroDivisionError:
        return False


def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"expected an expression, got {expression!r} ({error.msg})") from error


def _evaluate(node: ast.expr, sizes: Mapping[str, int], whole: str) -> int | bool:
    def value(part: ast.expr) -> int | bool:
        return _evaluate(part, sizes, whole)

    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](value(left), value(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)([value(part) for part in values])
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            numbers = [value(left), *(value(part) for part in comparators)]
            return all(_COMPARE[type(op)](*pair) for op, pair in zip(ops, zip(numbers, numbers[1:])))
    raise ValueError(f"expected axes, integers, + - * // %, comparisons, and, or, not; got {ast.unparse(node)!r} in {whole!r}")
