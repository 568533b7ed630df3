"""How an environment's messages become tokens: only what comes between two turns of the model.

What the model sampled is never encoded again: its ids stand where they were sampled, and the next
turn's context is everything before it with new ids behind. So what is encoded is the *increment*
that a chat template puts after an assistant's words: the end of that turn, the messages, and the
beginning of the next turn.

    … <assistant> sampled ids │ <end> <user> message <end> <assistant> │ sampled ids …
                              └────────────── increment ───────────────┘

A template gives it as the difference of two renderings with a stand-in for the model's words. That
is right only where the template renders earlier turns as they were sampled. Some do not (they drop
reasoning from earlier turns): those are refused, because the model would be trained on contexts
that the template never makes; `keep_history` accepts it, and keeps what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from rollout.environments.protocol import Message

__all__ = ["ChatTurns", "PlainTurns", "TurnFormat"]

Ids = npt.NDArray[np.int32]


class TurnFormat(Protocol):
    """Tokens between turns."""

    def increment(self, messages: Sequence[Message], last_token: int | None) -> Ids:
        """[n] What follows a turn of the model: messages, up to where its next turn begins.

        `last_token` is the stop token that ended the turn; None where it was cut.
        """

    def opening(self, messages: Sequence[Message]) -> Ids:
        """[n] Messages right behind the prompt. Raises InvalidArgument where they cannot be."""


class PlainTurns:
    """Messages as they are, for models without a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """A Hugging Face tokenizer."""
        self._tokenizer = tokenizer

    def increment(self, messages: Sequence[Message], last_token: int | None) -> Ids:
        """The texts, one after the other."""
        return self.opening(messages)

    def opening(self, messages: Sequence[Message]) -> Ids:
        """The texts, one after the other."""
        return _encode(self._tokenizer, "".join(message.text for message in messages))


_WORDS = "assistant-words-3f9a"
_THOUGHT = "assistant-thought-71c2"
_THINKING = f"<think>\n{_THOUGHT}\n</think>\n\n{_WORDS}"


class ChatTurns:
    """Messages by the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        roles: Sequence[str],
        stop_token_ids: Sequence[int],
        keep_history: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the template for messages of each of `roles`; `kwargs` go to it.

        `keep_history` accepts a template that renders earlier turns otherwise than they were
        sampled: what was sampled stays as it is.

        Raises:
            InvalidArgument: there is no template, it refuses such messages, its end of a turn is
                none of `stop_token_ids`, it gives another increment after other turns, or it
                rewrites earlier turns.
        """
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs or {})
        self._keep_history = keep_history
        if not getattr(tokenizer, "chat_template", None):
            raise _refused(
                "a tokenizer with a chat template",
                "none",
                "give messages as they are: --environment-turns plain",
            )
        for role in roles:
            self._check(role)
        self._end = self._end_of_turn(roles[0] if roles else "user", stop_token_ids)

    def increment(self, messages: Sequence[Message], last_token: int | None) -> Ids:
        """As the template renders it, without an end of turn that was sampled.

        Where another stop token ended the turn, it stands for the template's own. Raises
        InvalidArgument where the template refuses the messages.
        """
        text = self._after(_WORDS, [_as_dict(message) for message in messages])
        ids = _encode(self._tokenizer, text)
        if last_token is None:
            return ids
        if ids[0] != self._end:
            raise _refused(
                f"an increment that begins with the end of a turn, id {self._end}",
                f"id {ids[0]}",
                "use a template whose turns end with one token of their own",
            )
        return ids[1:]

    def opening(self, messages: Sequence[Message]) -> Ids:
        """Refused: behind the prompt the model's turn has begun. Raises InvalidArgument."""
        raise _refused(
            "prompts that hold all that comes before the first turn",
            f"a message of reset: {messages[0].text[:80]!r}",
            "put it into the prompt, or give messages as they are: --environment-turns plain",
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], *, begin: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=begin, **self._kwargs
            )
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages)
            raise _refused(
                f"a template that takes messages of roles {roles}",
                f"{type(error).__name__}: {error}",
                "use another role, or another template",
            ) from error
        return text

    def _after(
        self,
        words: str,
        messages: Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """What the template puts after the stand-in, up to the next turn."""
        said = [*before, _USER, {"role": "assistant", "content": words}, *messages]
        text = self._render(said, begin=True)
        if text.count(_WORDS) != 1:
            raise _refused(
                "a template that renders the words of an assistant once, as they are",
                f"{text.count(_WORDS)} times",
                "use another template",
            )
        return text.partition(_WORDS)[2]

    def _check(self, role: str) -> None:
        probe = [{"role": role, "content": "message-5d20"}]
        after = self._after(_WORDS, probe)
        earlier = [_USER, {"role": "assistant", "content": "a"}]
        if self._after(_WORDS, probe, earlier) != after:
            raise _refused(
                "one increment, whatever turns are before it",
                f"another one in a longer conversation, for role {role!r}",
                "use another template",
            )
        if self._keep_history:
            return
        prompt = self._render([_USER], begin=True)
        for words, what in ((_WORDS, "the words"), (_THINKING, "the reasoning")):
            said = [_USER, {"role": "assistant", "content": words}, *probe]
            if self._render(said, begin=True) != prompt + words + after:
                raise _refused(
                    f"earlier turns as they were sampled, before a message of role {role!r}",
                    f"a template that renders {what} of an earlier turn otherwise than the model "
                    "was prompted and answered",
                    "pass what makes the template keep it (--apply-chat-template-kwargs), or give "
                    "--environment-keep-history to keep what was sampled in the context",
                )

    def _end_of_turn(self, role: str, stop_token_ids: Sequence[int]) -> int:
        ids = _encode(
            self._tokenizer, self._after(_WORDS, [{"role": role, "content": "message-5d20"}])
        )
        if int(ids[0]) not in stop_token_ids:
            raise _refused(
                f"turns that end with a stop token: ids {list(stop_token_ids)}",
                f"id {ids[0]}, {self._tokenizer.decode(ids[:1].tolist())!r}",
                "make the template's end of a turn a stop token: --rollout-stop-token-ids",
            )
        return int(ids[0])


_USER: Mapping[str, str] = {"role": "user", "content": "message-0b6e"}


def _as_dict(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.text}


def _encode(tokenizer: Any, text: str) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def _refused(expected: str, found: str, do: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "making the tokens between turns from a chat template",
            expected=expected,
            found=found,
            do=do,
        )
    )
