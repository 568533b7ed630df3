"""Prompt sources: where a row number becomes a prompt, the same one everywhere and always."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

__all__ = ["TASK_NAMES", "Prompt", "PromptSource", "create_source", "stop_token_ids"]

TASK_NAMES = ("addition", "reasoning_gym:<dataset>")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt of a source."""

    text: str
    label: str | None
    """What the verifier compares with."""
    metadata: Mapping[str, Any] | None = None
    """What else the verifier needs; must survive JSON."""
    tokens: npt.NDArray[np.int32] | None = None
    """[P] Ids, where the source makes them itself; None: the worker tokenises `text`."""


class PromptSource(Protocol):
    """An endless list of prompts; `prompt(row)` depends on row and settings only."""

    name: str
    """The task with its settings, as it is recorded."""
    stop_texts: tuple[str, ...]
    """Texts, each one token, that end an answer; empty: the model's own end token."""
    reward: str
    """Name of the reward that fits, for `rollout.rewards.create_reward`."""

    def prompt(self, row: int) -> Prompt:
        """The prompt of `row`, counted from 0."""


def create_source(
    name: str, *, seed: int, options: Mapping[str, Any] | str | None = None
) -> PromptSource:
    """Make a source by name: 'addition' or 'reasoning_gym:<dataset>', `options` as dict or JSON.

    Raises:
        InvalidArgument: unknown task or option.
        MissingDependency: the library behind the task is not installed.
    """
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except json.JSONDecodeError as error:
            raise InvalidArgument(
                explain(
                    "reading the options of a task",
                    on=str(options),
                    expected="a JSON object",
                    found=str(error),
                )
            ) from error
    if options is not None and not isinstance(options, Mapping):
        raise InvalidArgument(
            explain(
                "reading the options of a task", on=name, expected="a JSON object", found=options
            )
        )
    given = dict(options or {})
    if name == "addition":
        from rollout.tasks.addition import AdditionSource

        return AdditionSource(seed=seed, options=given)
    family, _, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        from rollout.tasks.gym import GymSource

        return GymSource(dataset, seed=seed, options=given)
    raise InvalidArgument(
        explain(
            "making a prompt source",
            on=name,
            expected=f"one of {', '.join(TASK_NAMES)}",
            found=name,
        )
    )


def stop_token_ids(source: PromptSource, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: of the source's stop texts, or the tokenizer's end token.

    Raises:
        InvalidArgument: a stop text is not one token, or there is no end token.
    """
    ids: list[int] = []
    for text in source.stop_texts:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise InvalidArgument(
                explain(
                    "finding the stop tokens",
                    on=f"{text!r} of {source.name}",
                    expected="one token of this model's tokenizer",
                    found=f"ids {found}",
                    do="choose a model whose tokenizer has it, or another task",
                )
            )
        ids.append(int(found[0]))
    if not ids:
        if tokenizer.eos_token_id is None:
            raise InvalidArgument(
                explain(
                    "finding the stop tokens",
                    on=source.name,
                    expected="a tokenizer with an end token",
                    found="none",
                    do="set eos_token in the tokenizer's tokenizer_config.json",
                )
            )
        ids.append(int(tokenizer.eos_token_id))
    return tuple(ids)
