"""A calculator: integers, + - * and brackets. Small enough for tests and tiny models."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rollout.tools.parsing import ParsedAnswer, ToolCall
from rollout.tools.tool import ToolAnswer

__all__ = ["Calculator", "question_mark_calls"]

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LONGEST = 200
"""Characters of an expression: what it costs stays small."""


class Calculator:
    """The tool `calculator`."""

    name = "calculator"
    description = "Computes an expression of whole numbers with + - * and brackets."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Such as 3*(4+5)."}},
        "required": ["expression"],
    }

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """The value, or what is wrong with the expression."""
        said = arguments["expression"]
        try:
            if len(said) > _LONGEST:
                raise ValueError
            return ToolAnswer(text=str(_value(ast.parse(said.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, RecursionError):
            return ToolAnswer(text="error: no such expression", ok=False)


def _value(node: ast.expr) -> int:
    """Raises ValueError for anything but whole numbers, + - * and signs."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError


def question_mark_calls(text: str) -> ParsedAnswer:
    """A parser for models whose alphabet has no brackets: `?3+4` asks the calculator for 3+4."""
    said = text.strip()
    if not said.startswith("?"):
        return ParsedAnswer(content=text, calls=())
    arguments = json.dumps({"expression": said[1:]}, ensure_ascii=False)
    return ParsedAnswer(content="", calls=(ToolCall(name="calculator", arguments=arguments),))
