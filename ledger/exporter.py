"""Writing links beside the data, in the background: never on an append's path."""

from __future__ import annotations

import functools
import logging
import threading

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.engine import Catalog
from ledger.errors import Corrupt, LedgerError, explain
from ledger.hashing import GENESIS
from ledger.links import put_links, read_linked_commits
from ledger.storage import ObjectStore

__all__ = ["LinkExporter", "export_links"]

_LOG = logging.getLogger("ledger.exporter")

_COMMITS = 500
"""Commits in one object at most."""
_INTERVAL_S = 1.0
_LONGEST_INTERVAL_S = 60.0
"""How long the exporter rests after it failed again and again."""


def export_links(
    catalog: Catalog, store: ObjectStore, ledger_id: str, run_id: str, *, again: bool = False
) -> int:
    """Write the links of all commits of a run that are not written yet; how many those were.

    Several processes may do so at once: what they write overlaps and agrees. `again` writes those
    of all commits, whatever the catalog says was written.

    Raises:
        Corrupt: links that are there say otherwise.
        StorageFailed: the store or the catalog did not take it. What was written stays and counts.
    """
    exported = 0
    done: int | None = 0 if again else None
    while True:
        with catalog.read() as connection:
            if done is None:
                done = _exported(connection, run_id) or 0
            before = (t.commits.c.run_id == run_id) & (t.commits.c.last_seq == done)
            found = connection.execute(sa.select(t.commits.c.chain).where(before)).scalar()
            commits = read_linked_commits(connection, run_id, done, _COMMITS)
        if not commits:
            return exported
        if found is None and done:
            raise Corrupt(
                explain(
                    "links were not written: the catalog says that earlier ones were",
                    on=f"run {run_id!r}",
                    expected=f"a commit that ends at seq {done}",
                    found="none",
                    do="see what is wrong: ledger verify",
                )
            )
        put_links(store, ledger_id, commits, GENESIS if found is None else bytes(found))
        advance = functools.partial(_advance, run_id=run_id, last_seq=commits[-1].last_seq)
        catalog.transact(advance)
        done = commits[-1].last_seq if again else None
        exported += len(commits)


def _exported(connection: sa.Connection, run_id: str) -> int | None:
    """The event up to which links are written; None where the run has no row yet."""
    found = connection.execute(
        sa.select(t.exports.c.last_seq).where(t.exports.c.run_id == run_id)
    ).scalar()
    return None if found is None else int(found)


def _advance(connection: sa.Connection, run_id: str, last_seq: int) -> None:
    """Never backwards: another process may have been further."""
    this = t.exports.c.run_id == run_id
    # The run's row is locked, so that two processes do not both insert the first one.
    connection.execute(
        sa.select(t.runs.c.run_id).where(t.runs.c.run_id == run_id).with_for_update()
    )
    there = _exported(connection, run_id)
    if there is None:
        connection.execute(t.exports.insert().values(run_id=run_id, last_seq=last_seq))
    elif there < last_seq:
        connection.execute(t.exports.update().where(this).values(last_seq=last_seq))


class LinkExporter:
    """Exports the runs it is told of, at most once in `interval_s` each; a thread of its own.

    What could not be written is tried again with the next commit, at `close`, by any later process
    that commits to the run, and by `ledger export-links`. Each failure is logged as a warning, and
    `ledger verify` says how many commits have no links yet. Nothing is ever raised.
    """

    def __init__(
        self, catalog: Catalog, store: ObjectStore, ledger_id: str, interval_s: float = _INTERVAL_S
    ) -> None:
        self._catalog, self._store, self._ledger_id = catalog, store, ledger_id
        self._interval_s = interval_s
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._exporting = threading.Lock()

    def notify(self, run_id: str) -> None:
        """Say that a run has new commits. Costs a few microseconds."""
        if run_id in self._told:
            return
        with self._changed:
            self._told.add(run_id)
            if self._thread is None:
                self._stopping.clear()
                self._thread = threading.Thread(target=self._work, name="ledger-links", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Export what is left, and end the thread."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping.set()
            self._changed.notify()
        if thread is not None:
            thread.join()
        self.flush()

    def flush(self) -> bool:
        """Export now what was told; False (and a warning) where that failed for some run."""
        with self._exporting:
            with self._changed:
                # Taken out before the catalog is read: a commit after that tells us again.
                told, self._told = self._told, set()
            failed = {run_id for run_id in told if not self._export(run_id)}
            with self._changed:
                self._told |= failed
        return not failed

    def _work(self) -> None:
        rest_s = self._interval_s
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._told or self._stopping.is_set())
            # What is committed meanwhile goes into the same object.
            if self._stopping.wait(rest_s):
                return
            rest_s = self._interval_s if self.flush() else min(2 * rest_s, _LONGEST_INTERVAL_S)

    def _export(self, run_id: str) -> bool:
        try:
            export_links(self._catalog, self._store, self._ledger_id, run_id)
        except Exception as error:  # this thread must not end
            if not isinstance(error, LedgerError):
                _LOG.exception("links of run %r were not written", run_id)
            else:
                _LOG.warning("links of run %r were not written yet: %s", run_id, error)
            return False
        return True
