"""What an agent that is started again has been answered already, read from its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.trajectory import Observation, Segment, Trajectory

__all__ = ["RecordedTurn", "recorded_turns"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedTurn:
    """One answer, or the beginning of one."""

    context: npt.NDArray[np.int32]
    """[C] What it was sampled from."""
    first: int
    """Its first segment."""
    segments: Sequence[Segment]
    """Empty where the request was recorded and nothing was sampled."""
    is_last: bool
    """Nothing is recorded behind it: it may have been cut."""


def recorded_turns(trajectory: Trajectory) -> list[RecordedTurn]:
    """The turns of a sample that has pieces, in order; none where it has none."""
    made: list[RecordedTurn] = []
    context = trajectory.prompt_tokens
    segments: list[Segment] = []
    first, waits = 0, False

    def end(is_last: bool) -> None:
        nonlocal context, segments, first, waits
        if segments or waits:
            made.append(
                RecordedTurn(context=context, first=first, segments=segments, is_last=is_last)
            )
        first += len(segments)
        context = np.concatenate([context, *(one.tokens for one in segments)])
        segments, waits = [], False

    for piece in trajectory.pieces:
        if isinstance(piece, Observation):
            if segments:
                end(False)
            context, waits = np.concatenate([context, piece.tokens]), True
            continue
        if segments and piece.turn != segments[-1].turn:
            end(False)
        segments.append(piece)
    end(True)
    return made
