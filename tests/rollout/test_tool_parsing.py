"""Tool calls are read in every format that models use, and nothing malformed becomes a call."""

from __future__ import annotations

import pytest

from ledger.errors import InvalidArgument
from rollout.tools.parsing import ToolCall, parse_tool_calls


def test_hermes_calls_leave_the_text_around_them() -> None:
    said = (
        'I look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    found = parse_tool_calls(said)
    assert found.content == "I look."
    assert found.calls == (
        ToolCall(name="add", arguments='{"a": 1, "b": [2]}'),
        ToolCall(name="now", arguments="{}"),
    )
    assert found.calls[0].loaded() == {"a": 1, "b": [2]}
    assert not found.problems
    assert parse_tool_calls(said, "none").content == said


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("<tool_call>{not json}</tool_call>", "property name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "f", "argum', "Unterminated"),
    ],
)
def test_malformed_calls_stay_text(said: str, why: str) -> None:
    found = parse_tool_calls(said)
    assert not found.calls
    assert found.content == said
    assert len(found.problems) == 1
    assert why in found.problems[0]


def test_a_call_cut_short_after_its_json_is_a_call_beside_a_broken_one() -> None:
    found = parse_tool_calls(
        '<tool_call>x</tool_call><tool_call>{"name": "f", "arguments": "{\\"q\\": 1}"}'
    )
    assert found.calls == (ToolCall(name="f", arguments='{"q": 1}'),)
    assert found.content == "<tool_call>x</tool_call>"
    assert len(found.problems) == 1


def test_llama_and_mistral() -> None:
    two = '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}'
    assert [c.name for c in parse_tool_calls(two, "llama3").calls] == ["f", "g"]
    assert parse_tool_calls("{3, 4} is a set", "llama3").problems
    assert parse_tool_calls("plain", "llama3").content == "plain"
    said = 'So: [TOOL_CALLS][{"name": "f", "arguments": {"x": "ä"}}]'
    found = parse_tool_calls(said, "mistral")
    assert (found.content, found.calls[0].arguments) == ("So:", '{"x": "ä"}')
    assert parse_tool_calls("[TOOL_CALLS]oops", "mistral").content == "[TOOL_CALLS]oops"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="hermes"):
        parse_tool_calls("x", "yaml")
