"""What a request asks to be continued, and whether that goes on from something recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.canonical import canonical_json
from rollout.openai.messages import Message, message_key, observer_of
from rollout.openai.template import Added, ChatTemplate
from rollout.trajectory import Trajectory

__all__ = ["Asked", "ChatAsked", "IdsAsked", "Known", "Mark", "TextAsked", "differing"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What was asked and answered, as far as a later request shows whether it goes on from it."""

    kind: str
    """'chat', 'text' or 'ids'."""
    length: int
    """Messages, or characters, the answer included."""
    digest: bytes
    """blake3 of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A point of the session that a request can go on from: where an answer ended."""

    mark: Mark
    trajectory: Trajectory
    length: int
    """Tokens of the trajectory, prompt included, up to there."""
    tail: npt.NDArray[np.int32]
    """Ids behind them, where the answer ended within a token."""
    stop_token: int | None
    """The id that ended the answer, the last of `tokens`; None where none did."""

    @property
    def size(self) -> int:
        """Number of `tokens`."""
        return self.length + len(self.tail)

    def tokens(self) -> npt.NDArray[np.int32]:
        """[size] Context and answer, as they were fed and sampled."""
        return np.concatenate([self.trajectory.context()[: self.length], self.tail])


class Asked(Protocol):
    """What a request wants continued."""

    def identity(self) -> bytes:
        """Equal for equal questions."""

    def answered(self, message: Message, text: str) -> Mark:
        """The mark of this question and its answer, given as a message and as text."""

    def continues(self, known: Known) -> bool:
        """Whether it goes on from the answer at `known`."""

    def added(self, known: Known) -> Added | None:
        """What it puts behind the tokens at `known`; None where that cannot be said."""

    def text(self) -> str:
        """All of it as text."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """[C] All of it as ids, encoded anew."""

    def observer(self, known: Known) -> str:
        """Who said what it puts behind `known`: the source of the observation."""


def differing(recorded: npt.NDArray[np.int32], again: npt.NDArray[np.int32]) -> int:
    """Positions at which ids encoded anew are not those that are recorded.

    Where the lengths differ, what lies between the common beginning and the common end counts, on
    the longer side.
    """
    short = min(len(recorded), len(again))
    unequal = np.flatnonzero(recorded[:short] != again[:short])
    if len(recorded) == len(again):
        return len(unequal)
    head = int(unequal[0]) if len(unequal) else short
    tails = np.flatnonzero(recorded[::-1][: short - head] != again[::-1][: short - head])
    tail = int(tails[0]) if len(tails) else short - head
    return max(len(recorded), len(again)) - head - tail


@dataclass(slots=True, eq=False, kw_only=True)
class ChatAsked:
    """Messages, to be continued by the assistant."""

    messages: Sequence[Message]
    tools: Sequence[Any]
    options: Mapping[str, Any]
    """For the chat template."""
    template: ChatTemplate
    _digests: list[bytes] = field(init=False)
    """After each message, tools and options included."""
    _text: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Compute the digests once: each request is compared with many points."""
        first = canonical_json([list(self.tools), dict(self.options)])
        self._digests = [blake3(first.encode()).digest()]
        for message in self.messages:
            self._digests.append(_chained(self._digests[-1], message))

    def identity(self) -> bytes:
        """See `Asked`."""
        said = canonical_json([list(self.messages), list(self.tools), dict(self.options)])
        return blake3(b"chat" + said.encode()).digest()

    def answered(self, message: Message, text: str) -> Mark:
        """See `Asked`."""
        return Mark("chat", len(self.messages) + 1, _chained(self._digests[-1], message))

    def continues(self, known: Known) -> bool:
        """The same tools, the same messages, then the answer as it was given, then more."""
        mark = known.mark
        return (
            mark.kind == "chat"
            and len(self.messages) > mark.length
            and self._digests[mark.length] == mark.digest
        )

    def added(self, known: Known) -> Added | None:
        """See `Asked`. Raises ApiError where the template refuses the messages."""
        return self.template.added(
            self.messages, known.mark.length, self.tools, self.options, known.stop_token
        )

    def text(self) -> str:
        """See `Asked`. Raises ApiError where the template refuses the messages."""
        if self._text is None:
            self._text = self.template.render(self.messages, self.tools, self.options)
        return self._text

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `Asked`."""
        return self.template.encode(self.text())

    def observer(self, known: Known) -> str:
        """See `Asked`."""
        return observer_of(self.messages[known.mark.length :])


def _chained(before: bytes, message: Message) -> bytes:
    return blake3(before + message_key(message).encode()).digest()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextAsked:
    """A text, to be continued as it is."""

    prompt: str
    tokenizer: Any

    def identity(self) -> bytes:
        """See `Asked`."""
        return blake3(b"text" + self.prompt.encode()).digest()

    def answered(self, message: Message, text: str) -> Mark:
        """See `Asked`."""
        whole = self.prompt + text
        return Mark("text", len(whole), blake3(whole.encode()).digest())

    def continues(self, known: Known) -> bool:
        """It begins with the text that was asked and its answer."""
        mark = known.mark
        return (
            mark.kind == "text"
            and len(self.prompt) >= mark.length
            and blake3(self.prompt[: mark.length].encode()).digest() == mark.digest
        )

    def added(self, known: Known) -> Added | None:
        """See `Asked`. An end token that the answer has must have been written out."""
        text = self.prompt[known.mark.length :]
        if known.stop_token is not None:
            stop = self.tokenizer.decode([known.stop_token], skip_special_tokens=False)
            if not text.startswith(stop):
                return None
            text = text[len(stop) :]
        return Added(text=text, tokens=self._encode(text))

    def text(self) -> str:
        """See `Asked`."""
        return self.prompt

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `Asked`."""
        return self._encode(self.prompt)

    def observer(self, known: Known) -> str:
        """See `Asked`."""
        return "environment"

    def _encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IdsAsked:
    """Ids, to be continued as they are."""

    ids: npt.NDArray[np.int32]
    """[C]"""
    tokenizer: Any

    def identity(self) -> bytes:
        """See `Asked`."""
        return blake3(b"ids" + self.ids.astype("<i4").tobytes()).digest()

    def answered(self, message: Message, text: str) -> Mark:
        """See `Asked`."""
        return Mark("ids", 0, b"")

    def continues(self, known: Known) -> bool:
        """It begins with the recorded ids."""
        n = known.size
        return len(self.ids) >= n and bool(np.array_equal(self.ids[:n], known.tokens()))

    def added(self, known: Known) -> Added | None:
        """See `Asked`."""
        rest = self.ids[known.size :]
        return Added(text=self._decode(rest), tokens=rest)

    def text(self) -> str:
        """See `Asked`."""
        return self._decode(self.ids)

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `Asked`."""
        return self.ids

    def observer(self, known: Known) -> str:
        """See `Asked`."""
        return "environment"

    def _decode(self, ids: npt.NDArray[np.int32]) -> str:
        text: str = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text
