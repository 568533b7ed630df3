"""Answers as JSON, in the forms of the OpenAI API and of SGLang's native one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.openai.reading import Answer, Reader
from rollout.openai.requests import Call

__all__ = [
    "chat_answer",
    "chat_chunks",
    "completion_answer",
    "completion_chunks",
    "generate_answer",
    "server_sent",
]

_PIECE = 64
"""Characters of a chunk of a stream."""


def _usage(answer: Answer) -> dict[str, Any]:
    asked, said = len(answer.prompt_tokens), len(answer.tokens)
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
    }


def _texts(reader: Reader, tokens: npt.NDArray[np.int32]) -> list[str]:
    return [reader.decode(tokens[i : i + 1]) for i in range(len(tokens))]


def _chat_logprobs(answer: Answer, reader: Reader) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": text,
                "logprob": float(log_prob),
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
            for text, log_prob in zip(
                _texts(reader, answer.tokens), answer.log_probs.tolist(), strict=True
            )
        ],
        "refusal": None,
    }


def _ids(call: Call, answer: Answer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields for the answer and for its choice, where ids were asked for."""
    if not call.return_token_ids:
        return {}, {}
    return (
        {"prompt_token_ids": answer.prompt_tokens.tolist()},
        {"token_ids": answer.tokens.tolist()},
    )


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for name, call in answer.calls
    ]


def chat_answer(name: str, created: int, call: Call, answer: Answer, reader: Reader) -> Any:
    """A `chat.completion`."""
    top, inner = _ids(call, answer)
    calls = _tool_calls(answer)
    content = answer.message["content"]
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": call.model,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": content if content or not calls else None,
                    "refusal": None,
                    **({"tool_calls": calls} if calls else {}),
                },
                "logprobs": _chat_logprobs(answer, reader) if call.logprobs else None,
                "finish_reason": answer.finish_reason,
                **inner,
            }
        ],
        "usage": _usage(answer),
        **top,
    }


def chat_chunks(
    name: str, created: int, call: Call, answer: Answer, reader: Reader
) -> Iterator[dict[str, Any]]:
    """The `chat.completion.chunk`s of an answer, behind the one that names the role."""
    top, inner = _ids(call, answer)
    content = answer.message["content"]
    size = len(content) if call.logprobs else _PIECE
    for at in range(0, len(content), max(size, 1)):
        logprobs = _chat_logprobs(answer, reader) if call.logprobs else None
        yield _chunk(name, created, call, {"content": content[at : at + size]}, logprobs=logprobs)
    for i, one in enumerate(_tool_calls(answer)):
        yield _chunk(name, created, call, {"tool_calls": [{"index": i, **one}]})
    yield _chunk(name, created, call, {}, finish_reason=answer.finish_reason, **inner) | top
    if call.with_usage:
        yield _chunk(name, created, call, None) | {"usage": _usage(answer)}


def _chunk(
    name: str, created: int, call: Call, delta: dict[str, Any] | None, **choice: Any
) -> dict[str, Any]:
    choices = []
    if delta is not None:
        plain = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        choices = [plain | choice]
    return {
        "id": name,
        "object": "chat.completion.chunk",
        "created": created,
        "model": call.model,
        "choices": choices,
    }


def chat_beginning(name: str, created: int, call: Call) -> dict[str, Any]:
    """The first chunk of a stream, which may be sent before there is an answer."""
    return _chunk(name, created, call, {"role": "assistant", "content": ""})


def completion_answer(name: str, created: int, call: Call, answer: Answer, reader: Reader) -> Any:
    """A `text_completion`; the same object is a stream's chunk."""
    top, inner = _ids(call, answer)
    logprobs = None
    if call.logprobs:
        texts = _texts(reader, answer.tokens)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        logprobs = {
            "tokens": texts,
            "token_logprobs": answer.log_probs.tolist(),
            "top_logprobs": None,
            "text_offset": [0, *ends[:-1]],
        }
    return {
        "id": name,
        "object": "text_completion",
        "created": created,
        "model": call.model,
        "choices": [
            {
                "index": 0,
                "text": answer.said.text,
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                **inner,
            }
        ],
        "usage": _usage(answer),
        **top,
    }


def completion_chunks(
    name: str, created: int, call: Call, answer: Answer, reader: Reader
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream: the whole answer, then its usage if that was asked for."""
    whole: dict[str, Any] = completion_answer(name, created, call, answer, reader)
    usage = whole.pop("usage")
    yield whole
    if call.with_usage:
        yield {**whole, "choices": [], "usage": usage}


def generate_answer(name: str, created: int, call: Call, answer: Answer, reader: Reader) -> Any:
    """As SGLang's native `/generate` answers."""
    if answer.said.ended:
        reason: dict[str, Any] = {"type": "stop", "matched": answer.said.stop_token}
    else:
        reason = {"type": "length", "length": len(answer.tokens)}
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": reason,
        "prompt_tokens": len(answer.prompt_tokens),
        "completion_tokens": len(answer.tokens),
        "cached_tokens": answer.cached_tokens or 0,
        "weight_version": str(answer.versions[-1]) if answer.versions else None,
    }
    if call.logprobs:
        meta["output_token_logprobs"] = [
            [float(log_prob), int(token), None]
            for log_prob, token in zip(
                answer.log_probs.tolist(), answer.tokens.tolist(), strict=True
            )
        ]
    return {"text": answer.said.text, "output_ids": answer.tokens.tolist(), "meta_info": meta}


def server_sent(data: Any) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
