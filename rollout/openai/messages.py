"""Chat messages: brought into one form, and compared with what is recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ledger.canonical import canonical_json
from rollout.openai.errors import bad_request

__all__ = ["Message", "message_key", "normal_messages", "observer_of"]

Message = dict[str, Any]
"""`role`, `content` (a text), and `tool_calls` (arguments as a dict), `name`, `tool_call_id`,
`reasoning_content` where they are there."""

_ROLES = ("system", "user", "assistant", "tool")
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


def normal_messages(given: Any) -> list[Message]:
    """The messages of a request, in the form that chat templates take.

    'developer' is 'system', parts of text are joined, the arguments of tool calls are decoded.

    Raises:
        ApiError: no messages, an unknown role, or a content that is no text.
    """
    if not isinstance(given, list) or not given:
        raise bad_request("messages", "'messages' must be a list of at least one message")
    return [_normal(one, f"messages[{i}]") for i, one in enumerate(given)]


def _normal(given: Any, at: str) -> Message:
    if not isinstance(given, Mapping):
        raise bad_request(at, f"{at} must be an object")
    role = {"developer": "system", "function": "tool"}.get(given.get("role"), given.get("role"))  # type: ignore[arg-type]
    if role not in _ROLES:
        raise bad_request(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}")
    made: Message = {"role": role, "content": _text(given.get("content"), f"{at}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name) is not None:
            made[name] = given[name]
    if given.get("tool_calls"):
        made["tool_calls"] = [
            _tool_call(one, f"{at}.tool_calls[{i}]") for i, one in enumerate(given["tool_calls"])
        ]
    return made


def _text(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                raise bad_request(at, f"{at}: parts of type {kind!r} are not taken; only text is")
            texts.append(part[kind])
        return "".join(texts)
    raise bad_request(at, f"{at} must be a text or a list of parts")


def _tool_call(given: Any, at: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(at, f"{at} must hold a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise bad_request(
                f"{at}.function.arguments", f"{at}.function.arguments is no JSON: {error}"
            ) from error
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if given.get("id") is not None:
        made["id"] = given["id"]
    return made


def message_key(message: Message) -> str:
    """Equal for messages that say the same.

    Of an assistant's message neither surrounding whitespace, nor a leading thought, nor the names
    of its tool calls count: agents strip them, and the sampled ids are what stays.
    """
    content = message["content"]
    calls = message.get("tool_calls", [])
    if message["role"] == "assistant":
        content = _THOUGHT.sub("", content).strip()
        return canonical_json(["assistant", content, [call["function"] for call in calls]])
    return canonical_json(
        [message["role"], content, message.get("name"), message.get("tool_call_id")]
    )


def observer_of(messages: Sequence[Message]) -> str:
    """The source of an observation made of these messages."""
    roles = {message["role"] for message in messages}
    for role in ("tool", "user", "system"):
        if role in roles:
            return role
    return "environment"
