"""Giving prompts out: rows of the source become groups with numbers, as events to be stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from ledger.events import PromptIssued
from rollout.buffer import BufferedGroup, DataBuffer
from rollout.history import IssuedGroup
from rollout.records import prompt_issued
from rollout.settings import RolloutSettings
from rollout.tasks import Prompt, PromptSource

__all__ = ["PromptIssuer"]


class PromptIssuer:
    """Takes rows and numbers from the buffer; what it makes is given out once it is stored."""

    def __init__(
        self, buffer: DataBuffer, source: PromptSource, tokenizer: Any, settings: RolloutSettings
    ) -> None:
        """`tokenizer` is a Hugging Face one."""
        self._buffer, self._source, self._tokenizer = buffer, source, tokenizer
        self._size = settings.n_samples_per_prompt + (settings.greedy_baseline_key is not None)

    def take(self, count: int, *, rollout_step: int, round_number: int) -> list[PromptIssued]:
        """The next `count` prompts: first those that the branch inherited undecided, then new rows.

        An inherited prompt's samples belong to the branch that issued them: it gets new ones.
        """
        events = []
        for orphan in self._buffer.orphans[:count]:
            events.append(
                self._event(orphan.source_row, orphan.group_index, rollout_step, round_number)
            )
        del self._buffer.orphans[:count]
        while len(events) < count:
            events.append(self._event(self._buffer.take_row(), None, rollout_step, round_number))
        return events

    def again(self, group: BufferedGroup, *, rollout_step: int, round_number: int) -> PromptIssued:
        """The prompt of a group once more, as a new group with new samples."""
        return self._event(group.source_row, group.group_index, rollout_step, round_number)

    def _event(
        self, row: int, retry_of: int | None, rollout_step: int, round_number: int
    ) -> PromptIssued:
        prompt = self._source.prompt(row)
        tokens = self._tokens(prompt)
        group_index, indices = self._buffer.take_group(self._size)
        made = IssuedGroup(
            round=round_number,
            group_index=group_index,
            indices=indices,
            rollout_ids=indices,
            tokens=tokens,
            text=prompt.text,
            label=prompt.label,
            metadata=dict(prompt.metadata or {}),
        )
        return prompt_issued(
            made,
            rollout_step=rollout_step,
            source=self._source.name,
            source_row=row,
            retry_of=retry_of,
        )

    def _tokens(self, prompt: Prompt) -> Any:
        if prompt.tokens is not None:
            return prompt.tokens
        encoded = self._tokenizer.encode(prompt.text, add_special_tokens=False)
        return np.array(encoded, dtype=np.int32)
