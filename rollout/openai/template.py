"""The chat template: from messages to ids, and what new messages add to ids that are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.errors import InvalidArgument, explain
from rollout.openai.errors import bad_request
from rollout.openai.messages import Message

__all__ = ["Added", "ChatTemplate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Added:
    """What comes behind recorded ids."""

    text: str
    tokens: npt.NDArray[np.int32]
    """[n]"""


class ChatTemplate:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        """`tokenizer` is a Hugging Face one; `options` go to its template at every call.

        Raises:
            InvalidArgument: it has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidArgument(
                explain(
                    "serving chat completions",
                    on="the tokenizer",
                    expected="a chat template",
                    found="none",
                    do="add chat_template.jinja to the model's folder, or have agents use "
                    "/v1/completions",
                )
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        *,
        generate: bool = True,
    ) -> str:
        """The conversation as text, ending where the assistant begins if `generate`.

        Raises:
            ApiError: the template refuses the messages.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                tokenize=False,
                **{**self._options, **options},
            )
        except Exception as error:  # templates raise what they like
            raise bad_request(
                "messages", f"the chat template refuses the messages: {error}"
            ) from error
        return text

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """[n] The ids of a text, nothing added."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def added(
        self,
        messages: Sequence[Message],
        known: int,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        stop_token: int | None,
    ) -> Added | None:
        """What the template puts behind the answer `messages[known - 1]`, to the next one's start.

        Found without looking at the answer's own words, which templates rewrite (they leave earlier
        thoughts out) and tokenizers may split otherwise: those ids are recorded already. The end of
        the answer is written too, except for `stop_token`, which the recorded ids end with.
        None: the template does not let the two be told apart.

        Raises:
            ApiError: the template refuses the messages.
        """
        mark = "⟦" + blake3(canonical_json(list(messages)).encode()).hexdigest()[:16] + "⟧"
        answer = messages[known - 1]
        bare = {"role": "assistant", "content": mark}
        called = bare | {k: v for k, v in answer.items() if k == "tool_calls"}
        before, rest = list(messages[: known - 1]), list(messages[known:])
        closing = self._behind(mark, [*before, bare], tools, options, generate=False)
        ending = closing
        if called != bare:
            ending = self._behind(mark, [*before, called], tools, options, generate=False)
        whole = self._behind(mark, [*before, called, *rest], tools, options, generate=True)
        if closing is None or ending is None or whole is None:
            return None
        if not whole.startswith(ending) or not ending.endswith(closing):
            return None
        if stop_token is not None:
            stop = self.tokenizer.decode([stop_token], skip_special_tokens=False)
            closing = closing.removeprefix(stop)
        text = closing + whole[len(ending) :]
        return Added(text=text, tokens=self.encode(text))

    def _behind(
        self,
        mark: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        *,
        generate: bool,
    ) -> str | None:
        """The text behind the mark; None where the template did not write it once."""
        text = self.render(messages, tools, options, generate=generate)
        return text.partition(mark)[2] if text.count(mark) == 1 else None
