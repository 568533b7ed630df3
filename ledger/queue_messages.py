"""The errors of a queued writer, in words: what waits, why, and what to do."""

from __future__ import annotations

from pathlib import Path

from ledger.errors import FencedOff, LedgerError, StorageFailed, explain
from ledger.queue_items import Item, QueueLimits, QueueStats

__all__ = ["has_stopped", "left_waiting", "queue_full", "spill_full"]


def has_stopped(where: str, error: LedgerError) -> LedgerError:
    """What later appends raise: of the class of what stopped the queue."""
    return type(error)(
        explain(
            "an append was refused: its queue has stopped",
            on=where,
            found=_one_line(str(error)),
            do="stop this process: another one writes under the same producer name"
            if isinstance(error, FencedOff)
            else "mend it, then resume(); or give up what is queued with abandon()",
        )
    )


def queue_full(where: str, found: QueueStats, limits: QueueLimits, item: Item) -> StorageFailed:
    """The caller has waited long enough."""
    return StorageFailed(
        explain(
            "an append was refused: its queue is full, and the store is too slow to empty it",
            on=where,
            expected=f"room for {item.events} events and {item.size_bytes} bytes below "
            f"{limits.max_events} events and {limits.max_bytes} bytes, within "
            f"{limits.block_timeout_s} s",
            found=f"{found.queued_events} events and {found.queued_bytes} bytes queued, the "
            f"oldest since {found.oldest_age_s:.1f} s; last error: "
            + _one_line(found.last_error or "none"),
            do="append it again later; or give the queue more room, or the policy 'spill'",
        )
    )


def spill_full(folder: Path, used: int, limits: QueueLimits, item: Item) -> StorageFailed:
    """The spill folder may not grow any more."""
    return StorageFailed(
        explain(
            "events were not spilled to local disk: the spill folder is full",
            on=str(folder),
            expected=f"at most {limits.max_spill_bytes} bytes",
            found=f"{used} bytes, and {item.size_bytes} more to come",
            do="mend the ledger's store, then resume(); or give up with abandon()",
        )
    )


def left_waiting(tried: str, where: str, found: QueueStats, folder: Path | None) -> StorageFailed:
    """What the ledger does not have yet."""
    in_memory = found.queued_appends - found.spilled_appends
    return StorageFailed(
        explain(
            tried,
            on=where,
            expected="nothing that waits",
            found=f"{found.queued_appends} appends with {found.queued_events} events, the "
            f"oldest since {found.oldest_age_s:.1f} s; {found.spilled_appends} of them lie in "
            f"{folder}, {in_memory} only in memory; last error: "
            + _one_line(found.last_error or "none"),
            do="what was spilled is delivered by the next queue of this producer with the same "
            "spill folder; what was not is gone with this process"
            if found.spilled_appends
            else "mend the ledger's store; what is in memory is gone with this process",
        )
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
