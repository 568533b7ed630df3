"""Prompts from files: how a row becomes text, and in which order the rows come.

The rows of a file come again and again: `row // rows` is the epoch, and each epoch has an order of
its own where they are shuffled. What a row number stands for depends on the content of the data and
on the settings in the source's name, and on nothing that was read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.errors import InvalidArgument, explain
from ledger.seeds import derive_seed
from rollout.tasks import Prompt
from rollout.tasks.prompt_rows import METADATA_KEY, PromptData, PromptRows
from rollout.tasks.shuffle import Shuffle

__all__ = ["FileSource"]

_BATCH = 512
"""Prompts that are encoded at a time where their lengths are asked for."""


class FileSource:
    """The rows of prompt data as an endless list of prompts; a `PromptSource`."""

    stop_texts: tuple[str, ...] = ()

    def __init__(
        self,
        data: PromptData,
        *,
        tokenizer: Any,
        seed: int,
        reward: str,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """Open the data; with `max_prompt_len`, encode every prompt once to find the long ones.

        `tokenizer` is a Hugging Face one; `seed` orders the rows where they are shuffled; `reward`
        is a name for `create_reward`; `tools` are for the chat template, where a row has none.

        Raises:
            NotFound, InvalidArgument: nothing there, no such format, no row, no chat template, or
                the first row has not the fields that were named.
        """
        self._data, self._tokenizer, self.reward = data, tokenizer, reward
        self._tools = tools
        self.max_prompt_len = data.max_prompt_len
        self._table = PromptRows(data)
        self._rows: Sequence[int] | npt.NDArray[np.int64] = self._table.numbers
        self.digest = self._table.digest
        """As `content_digest`."""
        if data.apply_chat_template:
            _check_template(tokenizer)
        self._read(int(self._rows[0]))
        self.too_long: tuple[tuple[int, int], ...] = ()
        """(row of the table, tokens) of each prompt that was left out."""
        if data.max_prompt_len is not None:
            self._leave_out(data.max_prompt_len)
        self._seed = derive_seed("prompt data", seed)
        self._order: tuple[int, Shuffle] | None = None
        self.name = self._name(seed)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def prompt(self, row: int) -> Prompt:
        """The prompt of `row`, which counts on from epoch to epoch.

        Raises:
            InvalidArgument: the row of the file has not the fields that were named.
            Conflict: the file has changed since it was opened.
        """
        epoch, position = divmod(row, len(self._rows))
        if self._data.shuffle:
            position = self._shuffled(epoch)[position]
        return self._read(int(self._rows[position]))

    def _shuffled(self, epoch: int) -> Shuffle:
        # One assignment, so that threads in different epochs do not mix them up.
        order = self._order
        if order is None or order[0] != epoch:
            seed = derive_seed("epoch", self._seed, epoch)
            order = self._order = (epoch, Shuffle(len(self._rows), seed))
        return order[1]

    def _name(self, seed: int) -> str:
        """Everything that decides what a row number stands for. Not the path: data may move."""
        data = self._data
        settings: dict[str, Any] = {"input_key": data.input_key}
        if data.label_key is not None:
            settings["label_key"] = data.label_key
        if data.metadata_key != METADATA_KEY:
            settings["metadata_key"] = data.metadata_key
        if data.apply_chat_template:
            template = blake3(self._tokenizer.get_chat_template().encode()).hexdigest()
            settings["chat_template"] = template[:16]
            settings["tool_key"] = data.tool_key
            if self._tools is not None:
                settings["tools"] = blake3(canonical_json(self._tools).encode()).hexdigest()[:16]
            if data.apply_chat_template_kwargs:
                settings["apply_chat_template_kwargs"] = dict(data.apply_chat_template_kwargs)
        if data.shuffle:
            settings["shuffle"] = seed
        if data.max_prompt_len is not None:
            settings["max_prompt_len"] = data.max_prompt_len
            settings["too_long"] = len(self.too_long)
        return f"prompt_data:{self.digest}{canonical_json(settings)}"

    def _read(self, number: int) -> Prompt:
        row = self._table.row(number)
        text = row.prompt
        if self._data.apply_chat_template:
            messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
            try:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=self._tools if row.tools is None else row.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._data.apply_chat_template_kwargs,
                )
            except Exception as error:  # a template may raise anything
                raise self._table.bad(
                    number, "what the chat template takes", f"{type(error).__name__}: {error}"
                ) from error
        return Prompt(text=str(text), label=row.label, metadata=row.metadata)

    def _leave_out(self, limit: int) -> None:
        lengths = np.array([n for part in self._lengths() for n in part])
        rows, long = np.asarray(self._rows, np.int64), lengths > limit
        self.too_long = tuple(zip(rows[long].tolist(), lengths[long].tolist(), strict=True))
        self._rows = rows[~long]
        if not len(self._rows):
            raise InvalidArgument(
                explain(
                    "opening prompt data",
                    on=self._data.path,
                    expected=f"prompts of up to {limit} tokens (--rollout-max-prompt-len)",
                    found=f"{len(rows)} rows, the shortest of {lengths.min()} tokens",
                )
            )

    def _lengths(self) -> Iterator[list[int]]:
        """Tokens of every prompt, in order, some at a time."""
        for begin in range(0, len(self._rows), _BATCH):
            texts = [self._read(int(n)).text for n in self._rows[begin : begin + _BATCH]]
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            yield [len(ids) for ids in encoded]


def _check_template(tokenizer: Any) -> None:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidArgument(
            explain(
                "applying the chat template",
                on="--apply-chat-template",
                expected="a tokenizer with a chat template",
                found="one without",
                do="put chat_template.jinja into the model's folder, or leave "
                "--apply-chat-template out: prompts are then taken as they are",
            )
        )
