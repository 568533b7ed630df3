"""Rows of a source that no prompt is made of, on record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ledger.events import PromptsLeftOut
from rollout.tasks import PromptSource
from rollout.tasks.files import FileSource

if TYPE_CHECKING:
    from ledger.reader import Reader
    from ledger.writer import Writer

__all__ = ["record_left_out"]


def record_left_out(reader: Reader, writer: Writer, source: PromptSource) -> None:
    """Write which rows `source` leaves out, if any, unless the branch has it on record."""
    if not isinstance(source, FileSource) or not source.too_long:
        return
    if source.name in reader.table("prompts_left_out", ["source"])["source"].to_pylist():
        return
    rows, lengths = zip(*source.too_long, strict=True)
    writer.append(
        [
            PromptsLeftOut(
                source=source.name,
                source_rows=np.array(rows, np.int64),
                prompt_tokens=np.array(lengths, np.int32),
                reason=f"more than {source.max_prompt_len} tokens",
                rule="rollout_max_prompt_len",
            )
        ]
    )
