"""Tool calls in what a model said. Text in, calls out; the sampled ids stay what is recorded.

Formats, with the names that SGLang's `--tool-call-parser` uses for them:

- `hermes` (also `qwen`, `qwen25`): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any
  number of them. The format of NousResearch/Hermes-Function-Calling and of Qwen's chat templates.
- `llama3`: the whole answer is `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or not;
  several are separated by `;`.
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` at the end.
- `code_block`: each fenced block of Python is a call of the tool `python` with its `code`; for
  models without a format of their own.
- `none`: nothing is looked for.
- `module:function`: your own, from a text to a `ParsedAnswer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.imports import IMPORT_PATH, is_import_path, load_function

__all__ = ["TOOL_FORMATS", "ParsedAnswer", "ToolCall", "parse_tool_calls", "tool_parser"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that a model asked for."""

    name: str
    arguments: str
    """A JSON object as text."""

    def loaded(self) -> dict[str, Any]:
        """The arguments by name."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer, taken apart."""

    content: str
    """The text without the calls, outer whitespace stripped where there are any."""
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...] = ()
    """What looked like a call and is none, and why. Its text stays in `content`."""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CODE_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```\s*?$", re.DOTALL | re.MULTILINE)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


def _call(found: Any, arguments: str) -> ToolCall:
    """A call from decoded JSON. Raises ValueError where it is none."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError('no JSON object with a text "name"')
    given = found.get(arguments, {})
    if isinstance(given, str):  # some models quote the object once more
        given = json.loads(given)
    if not isinstance(given, dict):
        raise ValueError(f'"{arguments}" is no JSON object')
    return ToolCall(name=found["name"], arguments=json.dumps(given, ensure_ascii=False))


def _hermes(text: str) -> ParsedAnswer:
    calls: list[ToolCall] = []
    problems: list[str] = []
    kept: list[str] = []
    end = 0
    for match in _HERMES.finditer(text):
        kept.append(text[end : match.start()])
        end = match.end()
        try:
            calls.append(_call(json.loads(match[1]), "arguments"))
        except ValueError as error:
            problems.append(f"{error}: {match[0]!r}")
            kept.append(match[0])
    kept.append(text[end:])
    return _answer(text, "".join(kept), calls, problems)


def _objects(text: str) -> Iterator[Any]:
    """JSON values that follow each other, separated by `;` or whitespace. Raises ValueError."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        yield found
        at += len(text[at:]) - len(text[at:].lstrip("; \t\r\n"))


def _llama3(text: str) -> ParsedAnswer:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return ParsedAnswer(content=text, calls=())
    try:
        calls = [_call(found, "parameters") for found in _objects(body)]
    except ValueError as error:
        return ParsedAnswer(content=text, calls=(), problems=(f"{error}: {body!r}",))
    return ParsedAnswer(content="", calls=tuple(calls))


def _mistral(text: str) -> ParsedAnswer:
    before, mark, after = text.partition(_MISTRAL)
    if not mark:
        return ParsedAnswer(content=text, calls=())
    try:
        found = json.loads(after)
        calls = [_call(one, "arguments") for one in (found if isinstance(found, list) else [found])]
    except ValueError as error:
        return ParsedAnswer(content=text, calls=(), problems=(f"{error}: {after!r}",))
    return ParsedAnswer(content=before.strip(), calls=tuple(calls))


def _answer(text: str, kept: str, calls: list[ToolCall], problems: list[str]) -> ParsedAnswer:
    content = kept.strip() if calls else text
    return ParsedAnswer(content=content, calls=tuple(calls), problems=tuple(problems))


def _code_block(text: str) -> ParsedAnswer:
    calls = [
        ToolCall(name="python", arguments=json.dumps({"code": match[1]}, ensure_ascii=False))
        for match in _CODE_BLOCK.finditer(text)
    ]
    return _answer(text, _CODE_BLOCK.sub("", text), calls, [])


def _none(text: str) -> ParsedAnswer:
    return ParsedAnswer(content=text, calls=())


_PARSERS: dict[str, Callable[[str], ParsedAnswer]] = {
    "hermes": _hermes,
    "qwen": _hermes,
    "qwen25": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "code_block": _code_block,
    "none": _none,
}

TOOL_FORMATS = tuple(_PARSERS)


def tool_parser(name: str) -> Callable[[str], ParsedAnswer]:
    """The parser of a format, or one's own by its import path.

    Raises:
        InvalidArgument: no format of that name, or nothing that can be called at that path.
    """
    if is_import_path(name):
        return load_function(name, setting="--tool-call-parser")
    if name not in _PARSERS:
        raise InvalidArgument(
            explain(
                "choosing how tool calls are read",
                on=f"--tool-call-parser {name}",
                expected=f"one of {', '.join(TOOL_FORMATS)}, or {IMPORT_PATH}",
                found=name,
            )
        )
    return _PARSERS[name]


def parse_tool_calls(text: str, tool_format: str = "hermes") -> ParsedAnswer:
    """Take an answer apart. A malformed call is no call: it stays text and is a problem.

    Raises:
        InvalidArgument: no format of that name.
    """
    return tool_parser(tool_format)(text)
