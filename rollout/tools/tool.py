"""Tools: what an agent can ask for by name, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ledger.errors import InvalidArgument, explain
from rollout.tools.parsing import ParsedAnswer

__all__ = ["Tool", "ToolAnswer", "ToolBox", "schema_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool says to the model."""

    text: str
    ok: bool = True
    """False where the call could not do what was asked, by the model's own fault."""


class Tool(Protocol):
    """One tool. It keeps nothing between calls: what it says is a function of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """A JSON schema of an object: what the arguments are."""

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Do it. What the model did wrong is an answer (`ok` false).

        Raises:
            Exception: the tool itself is broken. The episode fails; that is no reward of zero.
        """


def schema_of(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates and the OpenAI API describe it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


class ToolBox:
    """The tools of an environment, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidArgument where two have one name."""
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise InvalidArgument(
                explain(
                    "putting tools together",
                    expected="a name for each",
                    found=", ".join(tool.name for tool in tools),
                )
            )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """As `schema_of` gives them."""
        return [schema_of(tool) for tool in self._tools.values()]

    async def answer(self, parsed: ParsedAnswer) -> list[ToolAnswer]:
        """An answer to each call, then to each thing that looked like a call and is none.

        A tool that is not there, and arguments that it does not take, are told to the model. Raises
        what a tool raises.
        """
        answers = [await self._call(call.name, call.loaded()) for call in parsed.calls]
        return answers + [
            ToolAnswer(text=f"error: this is no tool call: {problem}", ok=False)
            for problem in parsed.problems
        ]

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolAnswer(text=f"error: no tool {name!r}; there are: {known}", ok=False)
        wrong = _mismatch(arguments, tool.parameters)
        if wrong:
            return ToolAnswer(text=f"error: {name}: {wrong}", ok=False)
        return await tool(arguments)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _mismatch(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What of the arguments does not fit: names, and types one level deep; '' where all does."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"no argument {name!r}; there are: {', '.join(properties) or 'none'}"
        wanted = properties[name].get("type")
        fits = isinstance(value, _TYPES.get(wanted, (object,)))
        if not fits or (isinstance(value, bool) and wanted in ("integer", "number")):
            return f"argument {name!r} is no {wanted}: {json.dumps(value)}"
    return ""
