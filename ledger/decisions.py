"""Which samples of a branch are kept, followed as the decisions come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledger.follow import events_after

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Decisions"]


class Decisions:
    """The decisions of a branch, read as they come: each event once."""

    def __init__(self, ledger: Ledger, run_id: str, branch: str) -> None:
        self._ledger, self._run_id, self._branch = ledger, run_id, branch
        self._since = 0
        self._last: dict[int, dict[int, tuple[int, str]]] = {}
        """Rollout step → sample → its rollout, and the last decision on it."""

    def read(self) -> None:
        """Take in what is new."""
        for news in events_after(
            self._ledger,
            self._run_id,
            self._since,
            kinds=["sample_decided"],
            branch=self._branch,
        ):
            self._since = news.last_seq
            if news.table is None:
                continue  # no longer kept, so of steps that were trained long ago
            names = ("rollout_step", "index", "rollout_id", "decision")
            columns = (news.table[name].to_pylist() for name in names)
            for rollout_step, index, rollout_id, decision in zip(*columns, strict=True):
                self._last.setdefault(rollout_step, {})[index] = (rollout_id, decision)

    def forget_before(self, rollout_step: int) -> None:
        """Earlier rollout steps will not be asked for."""
        self._last = {step: of for step, of in self._last.items() if step >= rollout_step}

    def kept(self, rollout_step: int) -> int:
        """Rollouts that are kept: siblings of one count once."""
        of_step = self._last.get(rollout_step, {}).values()
        return len({rollout_id for rollout_id, decision in of_step if decision == "kept"})

    def decided(self, rollout_step: int) -> int:
        """Samples with any decision."""
        return len(self._last.get(rollout_step, {}))
