"""From sampled ids to what an agent is told, and from what it wants to sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.openai.errors import bad_request
from rollout.openai.messages import Message
from rollout.openai.template import ChatTemplate
from rollout.protocol import SamplingParams
from rollout.tools.parsing import ParsedAnswer, ToolCall, tool_parser

__all__ = ["Answer", "Reader", "Said", "Wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request says about its answer. None, or empty: it does not say."""

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k`, where given."""
    parse_tools: bool = False
    noted: Mapping[str, Any] = field(default_factory=dict)
    """What is recorded with the segment besides; must survive JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """The ids of a turn, read. R is their number."""

    text: str
    """Without the stop token, and cut before a stop text."""
    parsed: ParsedAnswer
    kept: int
    """Ids that the text is made of, and the stop token: R, but where a stop text cut it."""
    stop_token: int | None
    ended: bool
    """By a stop token or a stop text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """An answer that is recorded. R is the number of its ids."""

    index: int
    """The sample that it belongs to."""
    rollout_id: int
    turn: int
    prompt_tokens: npt.NDArray[np.int32]
    """[C] The context it was sampled from."""
    tokens: npt.NDArray[np.int32]
    """[R] As sampled: those behind a stop text too."""
    log_probs: npt.NDArray[np.float32]
    """[R]"""
    said: Said
    message: Message
    """The assistant's message, as the agent gets it and is expected to send it back."""
    calls: tuple[tuple[str, ToolCall], ...]
    """Id and call."""
    finish_reason: str
    """'stop', 'length' or 'tool_calls'."""
    versions: tuple[int, ...]
    """The weight versions that sampled it, in order."""
    cached_tokens: int | None
    drift: int
    """See `rollout.openai.asked.differing`: of the history, at this request."""


class Reader:
    """The tokenizer's side of a session."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_format: str = "hermes",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options` go to the chat template. Raises InvalidArgument for an unknown format."""
        self.tokenizer, self._options = tokenizer, options
        self._parse: Callable[[str], ParsedAnswer] = tool_parser(tool_format)
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """Raises InvalidArgument where the tokenizer has no chat template."""
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer, self._options)
        return self._template

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Ids as text, special tokens written out."""
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """[n] A text as ids, nothing added."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def params(
        self, base: SamplingParams, wanted: Wanted, pinned: Mapping[str, Any]
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """Sampling parameters, and the stop texts that are more than one token.

        What is in `pinned` is not the request's to choose; `max_new_tokens` is that of `base` at
        most. Raises ApiError for values out of their range.
        """
        chosen = {**wanted.sampling, **pinned}
        ids = [*base.stop_token_ids, *wanted.stop_token_ids]
        texts = []
        for text in wanted.stop:
            found = self.encode(text)
            if len(found) == 1:
                ids.append(int(found[0]))
            else:
                texts.append(text)
        limit = base.max_new_tokens
        if wanted.max_new_tokens is not None:
            limit = min(limit, wanted.max_new_tokens)
        try:
            made = replace(
                base,
                **chosen,
                max_new_tokens=limit,
                stop_token_ids=tuple(dict.fromkeys(ids)),
            )
        except ValueError as error:
            raise bad_request(None, str(error)) from error
        # A text of one token stops there too, if the model says it in other tokens.
        return made, tuple(texts) and tuple(wanted.stop)

    def read(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
        stopped: bool,
        parse_tools: bool,
    ) -> Said:
        """Read the ids of a turn; `stopped`: a stop token ended it, so that it is not text."""
        stop_token = None
        body = tokens
        if stopped and len(tokens) and int(tokens[-1]) in stop_token_ids:
            stop_token, body = int(tokens[-1]), tokens[:-1]
        text = self.decode(body)
        kept, cut = len(tokens), False
        found = [at for at in (text.find(one) for one in stop) if at >= 0]
        if found:
            text, cut, stop_token = text[: min(found)], True, None
            kept = self._within(body, len(text))
        none = ParsedAnswer(content=text, calls=())
        return Said(
            text=text,
            parsed=self._parse(text) if parse_tools else none,
            kept=kept,
            stop_token=stop_token,
            ended=cut or stopped,
        )

    def rest(self, tokens: npt.NDArray[np.int32], text: str) -> npt.NDArray[np.int32]:
        """[n] Ids of what `text` says behind these, which say its beginning."""
        return self.encode(text[len(self.decode(tokens)) :])

    def _within(self, tokens: npt.NDArray[np.int32], characters: int) -> int:
        """How many of the ids, from the first on, say no more than so many characters."""
        low, high = 0, len(tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.decode(tokens[:middle])) <= characters:
                low = middle
            else:
                high = middle - 1
        return low
