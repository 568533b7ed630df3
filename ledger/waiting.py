"""Waiting for what other processes will commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ledger.errors import NotFound, explain

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["wait_for"]

_T = TypeVar("_T")
_FIRST_S, _LAST_S = 0.02, 0.5
"""Between two looks: at first, and once nothing has come for some time."""


def wait_for(
    ledger: Ledger,
    run_id: str,
    look: Callable[[], _T | None],
    *,
    what: str,
    timeout_s: float | None = None,
    whole_run: bool = True,
    standing: Callable[[], str] = lambda: "nothing of it",
    do: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> _T:
    """What `look` finds, as soon as it is not None.

    It looks at once, and again whenever the run has new events; a run that does not exist yet has
    none. With `whole_run` False it looks twice a second besides: not all is in the run's events.
    While it waits, and each time that something has come, `tell` hears for what, and how it
    stands (`standing`). It waits as long as it takes, or `timeout_s` after the last event of the
    run that it has seen: what still comes, however slowly, is waited for.

    Raises:
        NotFound: nothing came for `timeout_s`; `what`, `standing` and `do` are in the message.
        What `look` raises.
    """
    seen: int | None = None
    since, pause_s = time.monotonic(), _FIRST_S
    while True:
        # The head first: what is committed between the two looks is looked at again.
        head = next((run.head_seq for run in ledger.runs() if run.run_id == run_id), 0)
        if head != seen or not whole_run:
            found = look()
            if found is not None:
                return found
        if head != seen:
            seen, since, pause_s = head, time.monotonic(), _FIRST_S
            tell(f"waiting for {what}: {standing()}")
        waited_s = time.monotonic() - since
        if timeout_s is not None and waited_s > timeout_s:
            raise NotFound(
                explain(
                    f"waiting for {what}",
                    on=f"run {run_id!r} in {ledger.uri}",
                    expected=f"new events within {timeout_s:g} s",
                    found=f"none after event {seen}; {standing()}",
                    do=do,
                )
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_S)
