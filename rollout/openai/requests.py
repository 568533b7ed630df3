"""The bodies of requests, read and checked. What would be ignored silently is refused instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.openai.asked import Asked, ChatAsked, IdsAsked, TextAsked
from rollout.openai.errors import bad_request
from rollout.openai.messages import normal_messages
from rollout.openai.reading import Reader, Wanted

__all__ = ["Call", "read_chat", "read_completion", "read_generate"]

_UNABLE: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "ignore_eos": (None, False),
    "regex": (None,),
    "json_schema": (None,),
    "ebnf": (None,),
}
"""Fields that would change what is sampled, and the values at which they do not."""
_WHY = {
    "n": "one request is one sample here: ask n times (a session answers requests in parallel)",
    "best_of": "one request is one sample here",
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A request, read."""

    asked: Asked
    wanted: Wanted
    model: str
    stream: bool
    with_usage: bool
    """Whether a stream ends with a chunk of usage."""
    logprobs: bool
    return_token_ids: bool
    """Whether the answer names the ids, as vLLM's `return_token_ids` does."""


def read_chat(body: Mapping[str, Any], reader: Reader) -> Call:
    """`POST /v1/chat/completions`. Raises ApiError."""
    _refuse_unable(body)
    if body.get("top_logprobs"):
        raise bad_request(
            "top_logprobs",
            "only the sampled token's log-prob is reported: leave it out",
        )
    tools = body.get("tools") or []
    choice = body.get("tool_choice") or ("auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise bad_request(
            "tool_choice",
            "only 'auto' and 'none' are served: nothing that is sampled is forced into a form",
        )
    if not isinstance(tools, list) or not all(
        isinstance(one, Mapping) and one.get("type") == "function" for one in tools
    ):
        raise bad_request("tools", "'tools' must be a list of tools of type 'function'")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise bad_request("chat_template_kwargs", "'chat_template_kwargs' must be an object")
    asked = ChatAsked(
        messages=normal_messages(body.get("messages")),
        tools=tools,
        options=options,
        template=reader.template,
    )
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    return _call(
        body, asked, limit, logprobs=bool(body.get("logprobs")), tools=choice == "auto" and tools
    )


def read_completion(body: Mapping[str, Any], reader: Reader) -> Call:
    """`POST /v1/completions`. Raises ApiError."""
    _refuse_unable(body)
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise bad_request(
            "logprobs", "the engine reports the log-prob of the sampled token only: give 0 or 1"
        )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    asked: Asked
    if isinstance(prompt, str) and prompt:
        asked = TextAsked(prompt=prompt, tokenizer=reader.tokenizer)
    else:
        asked = _ids(prompt, "prompt", reader)
    limit = body.get("max_tokens")
    return _call(
        body, asked, 16 if limit is None else limit, logprobs=logprobs not in (None, False)
    )


def read_generate(body: Mapping[str, Any], reader: Reader) -> Call:
    """SGLang's native `POST /generate`. Raises ApiError."""
    given = body.get("sampling_params") or {}
    if not isinstance(given, Mapping):
        raise bad_request("sampling_params", "'sampling_params' must be one object")
    _refuse_unable(given)
    for name in ("image_data", "audio_data", "video_data", "input_embeds", "lora_path"):
        if body.get(name) is not None:
            raise bad_request(name, f"{name!r} is not served here")
    if body.get("top_logprobs_num") or body.get("token_ids_logprob"):
        raise bad_request("top_logprobs_num", "only the sampled token's log-prob is reported")
    asked: Asked
    if body.get("input_ids") is not None:
        asked = _ids(body["input_ids"], "input_ids", reader)
    elif isinstance(body.get("text"), str) and body["text"]:
        asked = TextAsked(prompt=body["text"], tokenizer=reader.tokenizer)
    else:
        raise bad_request("input_ids", "give 'input_ids' (one list of ids) or 'text' (one text)")
    return _call(
        {"stream": body.get("stream"), "model": "", **given},
        asked,
        given.get("max_new_tokens"),
        logprobs=bool(body.get("return_logprob")),
    )


def _call(
    body: Mapping[str, Any], asked: Asked, limit: Any, *, logprobs: bool, tools: Any = False
) -> Call:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise bad_request("max_tokens", f"the token limit must be at least 1, not {limit!r}")
    options = body.get("stream_options") or {}
    return Call(
        asked=asked,
        wanted=Wanted(
            max_new_tokens=limit,
            stop=_stop_texts(body.get("stop")),
            stop_token_ids=tuple(int(one) for one in body.get("stop_token_ids") or ()),
            sampling=_sampling(body),
            parse_tools=bool(tools),
            noted=_noted(body),
        ),
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        with_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _refuse_unable(body: Mapping[str, Any]) -> None:
    for name, harmless in _UNABLE.items():
        if body.get(name) not in harmless:
            why = _WHY.get(name, "it would change the distribution that log-probs are recorded of")
            raise bad_request(
                name, f"{name}={body[name]!r} is not served: {why}", "unsupported_parameter"
            )


def _sampling(body: Mapping[str, Any]) -> dict[str, float | int]:
    made: dict[str, float | int] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise bad_request(name, f"{name!r} must be a number, not {value!r}")
        made[name] = kind(value)
    return made


def _noted(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the request said of its sampling: kept, whether it was followed or not."""
    names = ("model", "temperature", "top_p", "top_k", "seed", "sampling_seed", "user")
    return {name: body[name] for name in names if body.get(name) is not None}


def _stop_texts(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(t, str) and t for t in texts):
        raise bad_request("stop", "'stop' must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _ids(given: Any, param: str, reader: Reader) -> IdsAsked:
    good = isinstance(given, list) and given
    if not good or not all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        raise bad_request(param, f"{param!r} must be one text, or one list of token ids")
    if not all(0 <= i < 2**31 for i in given):
        raise bad_request(param, f"{param!r} holds ids that are no token ids")
    return IdsAsked(ids=np.array(given, dtype=np.int32), tokenizer=reader.tokenizer)
