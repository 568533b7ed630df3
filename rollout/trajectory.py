"""A sample under construction: its prompt, and the pieces of its response as they are recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger.events import UNKNOWN_VERSION, PromptIssued
from ledger.numbering import VERSION_SPAN, local_number

__all__ = ["Observation", "Piece", "Segment", "Trajectory", "trajectory_of"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segment:
    """What one engine call sampled: R new tokens."""

    segment: int
    """Number of the engine call within the sample."""
    turn: int
    start: int
    """Offset in the response."""
    tokens: npt.NDArray[np.int32]
    """[R]"""
    log_probs: npt.NDArray[np.float32]
    """[R] As the engine gave them."""
    finish_reason: str
    """'stop', 'length' or 'abort'."""
    span_versions: npt.NDArray[np.int64]
    """[S] The versions that sampled it, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Observation:
    """Tokens that nobody sampled: of a tool, an environment, a user."""

    turn: int
    """The turn that it ends."""
    start: int
    tokens: npt.NDArray[np.int32]
    source: str
    text: str | None


Piece = Segment | Observation


@dataclass(slots=True, eq=False, kw_only=True)
class Trajectory:
    """One sample: P prompt tokens, then pieces one after the other. Only recorded things are here.

    All of it can be read back from the ledger, which is how a sample that was cut goes on.
    """

    index: int
    group_index: int
    rollout_id: int
    """The execution it belongs to: siblings share it."""
    rollout_step: int
    """The one that issued it."""
    prompt_tokens: npt.NDArray[np.int32]
    """[P]"""
    text: str
    label: str | None
    metadata: Mapping[str, Any]
    parent_index: int | None = None
    """Of a sibling: the sample in whose episode it began."""
    pieces: list[Piece] = field(default_factory=list)
    routing_rows: int = 0
    """Positions of the sequence whose experts are recorded, from the first one on."""

    @property
    def session_id(self) -> str:
        """Requests of one execution go to one engine."""
        return f"rollout-{self.rollout_id}"

    @property
    def response_length(self) -> int:
        """Tokens of all pieces."""
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def segments(self) -> Sequence[Segment]:
        """The pieces that were sampled."""
        return [piece for piece in self.pieces if isinstance(piece, Segment)]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled."""
        return sum(len(piece.tokens) for piece in self.segments)

    @property
    def next_segment(self) -> int:
        """The number of the next engine call."""
        return len(self.segments)

    @property
    def next_turn(self) -> int:
        """The turn that the next engine call belongs to: one that was cut goes on."""
        if not self.pieces:
            return 0
        last = self.pieces[-1]
        if isinstance(last, Segment):
            is_open = last.finish_reason != "stop"
        else:
            # What is added behind the prompt, before anything was sampled, ends no turn.
            is_open = not any(isinstance(piece, Segment) for piece in self.pieces)
        return last.turn if is_open else last.turn + 1

    @property
    def sampled_in_turn(self) -> int:
        """Tokens that `next_turn` has already."""
        turn = self.next_turn
        return sum(len(one.tokens) for one in self.segments if one.turn == turn)

    @property
    def finish_reason(self) -> str | None:
        """Of the last engine call; None before the first one."""
        segments = self.segments
        return segments[-1].finish_reason if segments else None

    def context(self) -> npt.NDArray[np.int32]:
        """[P + response] All tokens so far."""
        return np.concatenate([self.prompt_tokens, *(piece.tokens for piece in self.pieces)])

    def response(self) -> npt.NDArray[np.int32]:
        """[response] The tokens of all pieces."""
        if not self.pieces:
            return np.zeros(0, np.int32)
        return np.concatenate([piece.tokens for piece in self.pieces])

    def oldest_version(self) -> int | None:
        """The version of the lowest local number that sampled a token of it.

        None where nothing was sampled, or where an engine did not say which version did.
        """
        known: list[int] = [
            v for one in self.segments if len(one.tokens) for v in one.span_versions.tolist()
        ]
        if not known or UNKNOWN_VERSION in known:
            return None
        return min(known, key=lambda version: local_number(version, VERSION_SPAN))


def trajectory_of(event: PromptIssued, position: int) -> Trajectory:
    """Sample number `position` of a prompt that was issued, without any piece yet."""
    return Trajectory(
        index=int(event.indices[position]),
        group_index=event.group_index,
        rollout_id=int(event.rollout_ids[position]),
        rollout_step=event.rollout_step,
        prompt_tokens=event.tokens,
        text=event.text,
        label=event.label,
        metadata=json.loads(event.metadata or "{}"),
        parent_index=event.parent_index,
    )
