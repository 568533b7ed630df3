"""What an earlier process spilled: delivered under its own epoch, before a new one begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledger.errors import Corrupt, FencedOff, LedgerError, StorageFailed
from ledger.gaps import Lost, find_stored
from ledger.queue_items import Gap
from ledger.spill import SpillFile, SpillFolder

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["recover"]


def recover(ledger: Ledger, run_id: str, producer: str, folder: SpillFolder) -> list[Gap]:
    """Deliver all that waits in `folder`, in order; what cannot be delivered, by reason.

    A file is removed once the ledger has its append. What an append of a replaced epoch holds is
    never appended under a new key: its successor began without it, and may have made the same
    samples again. It is given up, unless the ledger turns out to have it.

    Raises:
        StorageFailed: the ledger does not take it now. Nothing was lost; try again.
        Corrupt: the ledger itself is damaged.
    """
    gaps: dict[str, Gap] = {}
    for file in folder.files():
        if find_stored(ledger, run_id, producer, file.epoch, file.number) is not None:
            folder.remove(file)
            continue
        problem = _deliver(ledger, run_id, producer, folder, file)
        if problem is None:
            folder.remove(file)
            continue
        gap = gaps.setdefault(problem, Gap([], problem, []))
        gap.lost.append(_lost(producer, folder, file))
        gap.files.append(folder.give_up(file))
    return list(gaps.values())


def _deliver(
    ledger: Ledger, run_id: str, producer: str, folder: SpillFolder, file: SpillFile
) -> str | None:
    """None when it was delivered, else why it cannot be."""
    if file.abandoned:
        return "given up by an earlier process"
    try:
        spilled, tables = folder.read(file)
    except Corrupt as error:
        return f"a spilled file was damaged: {' '.join(str(error).split())}"
    try:
        writer = ledger.writer(run_id, spilled.branch, producer=producer, epoch=file.epoch)
        writer.append_tables(tables, producer_seq=file.number)
    except (StorageFailed, Corrupt):
        raise
    except FencedOff:
        return "a newer writer of the producer began before these were delivered"
    except LedgerError as error:
        return f"the ledger refused what was spilled: {' '.join(str(error).split())}"
    return None


def _lost(producer: str, folder: SpillFolder, file: SpillFile) -> Lost:
    try:
        spilled = folder.describe(file)
    except Corrupt:
        return Lost(producer, file.epoch, file.number, {}, None)
    return Lost(producer, file.epoch, file.number, spilled.rows, spilled.spilled_at)
