"""What an evaluation measures on: only like is compared with like."""

from __future__ import annotations

from typing import NamedTuple

from ledger.events import EvalScored

__all__ = ["Evaluation"]


class Evaluation(NamedTuple):
    """One evaluation, whatever the version."""

    name: str
    source: str
    """The task or data set, with its settings."""
    responses: int
    seed: int
    verifier: str
    temperature: float
    top_p: float | None = None
    """None, here and below: as in the rollout."""
    top_k: int | None = None
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, event: EvalScored) -> Evaluation:
        """The one that an event is of."""
        return cls(
            event.name,
            event.source,
            len(event.source_rows),
            event.seed,
            event.verifier,
            event.temperature,
            event.top_p,
            event.top_k,
            event.max_new_tokens,
        )
