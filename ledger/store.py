"""The ledger as a whole: a place for bytes, a catalog, and what they hold."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from ledger.behind import require_not_behind
from ledger.catalog import commit as commits
from ledger.catalog import queries
from ledger.catalog import tables as t
from ledger.catalog.engine import Catalog
from ledger.catalog.records import (
    MAIN,
    BranchInfo,
    RunInfo,
    SegmentInfo,
    VersionInfo,
)
from ledger.commit_queue import CommitQueue
from ledger.errors import (
    AlreadyExists,
    InvalidArgument,
    LedgerError,
    NotFound,
    explain,
)
from ledger.events import BranchForked
from ledger.exporter import LinkExporter
from ledger.hashing import GENESIS, multiset_digest, row_content_hashes
from ledger.kept import KEEP_BYTES, Kept
from ledger.keys import require_number, require_producer
from ledger.links import put_epoch, put_run
from ledger.lookup import LedgerLookup
from ledger.moment import Moment, sequence_at
from ledger.reader import Reader
from ledger.segment_index import SegmentIndex
from ledger.segment_reader import SegmentReader
from ledger.storage import ObjectStore
from ledger.writer import Writer

if TYPE_CHECKING:
    from ledger.follow import NewEvents
    from ledger.queue import QueuedWriter
    from ledger.result import Result
    from ledger.session import SessionPool

__all__ = ["Ledger"]

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class Ledger:
    """An open ledger. Threads may share it. Use it as a context manager, or call `close`."""

    def __init__(
        self, store: ObjectStore, catalog: Catalog, ledger_id: str, *, read_only: bool = False
    ) -> None:
        self.store = store
        self.catalog = catalog
        self.ledger_id = ledger_id
        self.read_only = read_only
        """Whether every write is refused."""
        self.segments = SegmentReader(self.store)
        self.exporter = LinkExporter(catalog, self.store, ledger_id)
        self.assembled = Kept(KEEP_BYTES)
        """Readers' own: what they put together, for the next reader to build upon."""
        self._sessions: SessionPool | None = None
        self.index = SegmentIndex(catalog, self.segments)
        self._queues: dict[str, CommitQueue] = {}
        self._lookups: dict[str, LedgerLookup] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """Where it is, without any secret."""
        return self.store.uri

    @property
    def root(self) -> Path | None:
        """The folder it is in, to which locations of checkpoints are relative; None elsewhere."""
        return self.store.root

    def locate(self, location: str) -> Path:
        """The folder that a checkpoint's `location` names: absolute, or relative to `root`.

        Raises:
            NotFound: it is relative, and the ledger is in no folder.
        """
        if self.root is not None:
            return self.root / location
        if Path(location).is_absolute():
            return Path(location)
        raise NotFound(
            explain(
                "a checkpoint's folder was not found",
                on=location,
                expected="a path from the root of the file system: the ledger is in no folder",
                found=f"a path relative to {self.uri}",
            )
        )

    def require_writable(self) -> None:
        """Raise, with the reason, where the ledger was opened for reading only."""
        self.catalog.require_writable()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the links that are due, and close. Tables that were read stay valid."""
        if self._sessions is not None:
            self._sessions.close()
        for queue in self._queues.values():
            queue.close()
        self.exporter.close()
        self.catalog.close()
        self.store.close()

    @property
    def sessions(self) -> SessionPool:
        """Connections for SQL that the readers of this ledger share."""
        from ledger.session import SessionPool

        with self._lock:
            if self._sessions is None:
                self._sessions = SessionPool()
            return self._sessions

    def runs(self) -> list[RunInfo]:
        """All runs, oldest first."""
        with self.catalog.read() as connection:
            return queries.list_runs(connection)

    def run(self, run_id: str | None = None) -> RunInfo:
        """A run by its name; without one, the only run.

        Raises:
            NotFound: no such run, or none named where there are none or several.
        """
        runs = self.runs()
        found = [r for r in runs if run_id is None or r.run_id == run_id]
        if len(found) == 1:
            return found[0]
        raise NotFound(
            explain(
                "a run was not found" if run_id is not None else "which run is not clear",
                on=self.uri if run_id is None else f"{run_id!r} in {self.uri}",
                expected="the only run" if run_id is None else None,
                found=f"runs {[r.run_id for r in runs]}",
                do="name a run with --run (in ledger-train: --run-id)"
                if runs
                else "record one first: ledger-train, or Ledger.create_run in Python",
            )
        )

    def create_run(self, run_id: str) -> RunInfo:
        """Begin a run with one branch, 'main', and no events.

        Raises:
            AlreadyExists: there is one of that name.
            InvalidArgument: the name has characters that cannot stand in a file name.
        """
        _require_name("run", run_id)
        made = RunInfo(run_id, time.time_ns() // 1000, 0, GENESIS)

        def add(connection: sa.Connection) -> RunInfo:
            nonlocal made
            query = sa.select(t.runs.c.created_at).where(t.runs.c.run_id == run_id)
            there = connection.execute(query).scalar()
            if there == made.created_at:
                return made  # this very call has made it: its acknowledgement was lost
            if there is not None:
                raise AlreadyExists(
                    explain(
                        "a run was not created: its name is taken",
                        on=f"{run_id!r} in {self.uri}",
                        do="name it otherwise, or go on with it",
                    )
                )
            # The row first: of several that make this run at once, all but one wait here.
            connection.execute(t.runs.insert().values(dataclasses.asdict(made)))
            created_at = put_run(self.store, self.ledger_id, run_id, made.created_at)
            if created_at != made.created_at:
                this = t.runs.c.run_id == run_id
                connection.execute(t.runs.update().where(this).values(created_at=created_at))
                made = dataclasses.replace(made, created_at=created_at)
            connection.execute(t.branches.insert().values(run_id=run_id, name=MAIN))
            return made

        return self.catalog.transact(add)

    def branches(self, run_id: str) -> list[BranchInfo]:
        """All branches of a run, the first one first. Raises: NotFound."""
        self.run(run_id)
        with self.catalog.read() as connection:
            return queries.list_branches(connection, run_id)

    def branch(self, run_id: str, name: str) -> BranchInfo:
        """A branch by its name. Raises: NotFound, naming those that are there."""
        branches = self.branches(run_id)
        for found in branches:
            if found.name == name:
                return found
        raise NotFound(
            explain(
                "a branch was not found",
                on=f"{name!r} in run {run_id!r}",
                found=f"branches {[b.name for b in branches]}",
            )
        )

    def branch_number(self, run_id: str, name: str) -> int:
        """0 for the run's first branch, then in the order of forking; see `ledger.numbering`.

        Raises: NotFound.
        """
        self.branch(run_id, name)
        return [b.name for b in self.branches(run_id)].index(name)

    def versions(self, run_id: str) -> list[VersionInfo]:
        """All weight versions of a run, on all branches, by number. Raises: NotFound."""
        self.run(run_id)
        with self.catalog.read() as connection:
            return queries.list_versions(connection, run_id=run_id)

    def version(self, run_id: str, weight_version: int) -> VersionInfo:
        """One weight version. Raises: NotFound, with the known ones and other runs that have it."""
        versions = self.versions(run_id)
        for found in versions:
            if found.weight_version == weight_version:
                return found
        with self.catalog.read() as connection:
            elsewhere = queries.list_versions(connection, weight_version)
        known = [v.weight_version for v in versions]
        raise NotFound(
            explain(
                "a weight version was not found",
                on=f"version {weight_version} in run {run_id!r}",
                expected=f"a version from {min(known)} to {max(known)}" if known else None,
                found=f"run {run_id!r} has {len(known)} versions"
                + (
                    f"; version {weight_version} is in run {[v.run_id for v in elsewhere]}"
                    if elsewhere
                    else ""
                ),
                do=f"see them: ledger log --run {run_id}",
            )
        )

    def writer(
        self, run_id: str, branch: str = MAIN, *, producer: str, epoch: int | None = None
    ) -> Writer:
        """A writer to a branch. It begins a new epoch: older writers of `producer` are fenced off.

        `epoch` takes up the newest epoch again instead, to repeat an append of a process that died
        (with its producer_seq).

        Raises:
            NotFound: no such run or branch.
            Conflict: the store has links of commits that the catalog does not have: it was put back
                from an older copy.
            FencedOff: `epoch` is not the newest one (on the first append).
        """
        self.branch(run_id, branch)
        return self._writer(run_id, branch, producer, epoch)

    def queued_writer(
        self,
        run_id: str,
        branch: str = MAIN,
        *,
        producer: str,
        max_bytes: int = 256 << 20,
        max_events: int = 1 << 20,
        policy: Literal["stop", "spill"] = "stop",
        spill: str | Path | None = None,
        max_spill_bytes: int | None = None,
        patience_s: float = 10.0,
        block_timeout_s: float = 30.0,
        on_trouble: Callable[[LedgerError], None] | None = None,
    ) -> QueuedWriter:
        """A writer whose `append` returns at once; a thread stores what it was given, in order.

        At most `max_bytes` and `max_events` wait in memory; a full queue makes an append wait for
        `block_timeout_s`, then fail. What the store refuses is tried again under the same key. When
        it has refused or stood still for `patience_s`, the policy says what happens: 'stop' fails
        this and every later append until `resume` or `abandon`; 'spill' goes on with files in the
        local folder `spill` (up to `max_spill_bytes`), delivered in order when the store is back.
        What an earlier process of the producer left in `spill` is delivered first, under its own
        epoch; then a new epoch begins, which fences older writers off.

        `on_trouble` is called, by whichever thread finds out, when the queue stops or begins to
        spill.

        Raises:
            NotFound: no such run or branch.
            Conflict: another process uses the spill folder.
            StorageFailed: what is left in the spill folder cannot be delivered now.
            InvalidArgument: an unknown policy, or 'spill' without a folder.
        """
        from ledger.queue import QueuedWriter
        from ledger.queue_items import QueueLimits

        limits = QueueLimits(
            max_bytes, max_events, policy, max_spill_bytes, patience_s, block_timeout_s
        )
        self.branch(run_id, branch)
        return QueuedWriter(self, run_id, branch, producer, limits, spill, on_trouble)

    def fork(self, run_id: str, event: BranchForked, producer: str) -> Writer:
        """Begin the branch that `event` describes, durably, and give a writer to it.

        Raises:
            AlreadyExists: there is a branch of that name.
            NotFound: no such run or parent branch.
            Conflict: its fork_seq or weight_version is not there.
        """
        self.run(run_id)
        _require_name("branch", event.branch)
        writer = self._writer(run_id, event.branch, producer, None)
        writer.append([event])
        return writer

    def _writer(self, run_id: str, branch: str, producer: str, epoch: int | None) -> Writer:
        self.require_writable()
        require_producer(producer)
        if epoch is not None:
            epoch = require_number("epoch", epoch)
        require_not_behind(self.catalog, self.store, run_id)
        if epoch is None:
            epoch = self.catalog.transact(lambda c: self._begin_epoch(c, run_id, producer))
        return Writer(self, run_id, branch, producer, epoch)

    def _begin_epoch(self, connection: sa.Connection, run_id: str, producer: str) -> int:
        epoch = commits.begin_epoch(connection, run_id, producer)
        # Before it is given out for good: no catalog made again lets an older one write.
        put_epoch(self.store, self.ledger_id, run_id, producer, epoch)
        return epoch

    def reader(
        self,
        run_id: str,
        branch: str | None = MAIN,
        *,
        as_of: Moment | None = None,
        verify: bool = True,
    ) -> Reader:
        """A reader of one state: the events of a branch and its ancestors up to now, or to `as_of`.

        `as_of` is a sequence number, a weight version ("v7") or a time, see `ledger.moment`.
        `branch=None` reads all branches. `verify=False` leaves out the hashes of files.

        Raises:
            NotFound: no such run, branch, or point in time.
            InvalidArgument: `as_of` means nothing.
        """
        limit = self.run(run_id).head_seq if as_of is None else sequence_at(self, run_id, as_of)
        with self.catalog.read() as connection:
            if branch is None:
                branches = queries.list_branches(connection, run_id)
                lineage: list[tuple[str, int | None]] = [(b.name, None) for b in branches]
            else:
                lineage = queries.ancestry(connection, run_id, branch)
        return Reader(self, run_id, branch, dict(lineage), limit, verify=verify)

    def sql(
        self,
        query: str,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        run: str | None = None,
        branch: str | None = None,
        as_of: Moment | None = None,
        timeout_s: float | None = None,
        memory_limit: str | None = None,
        allow_external: bool = False,
        tokenizer: str | Path | None = None,
        verify: bool = True,
    ) -> Result:
        """Ask in SQL (DuckDB's dialect) over the views: `ledger views`, docs/queries.md.

        Without `run`, the only one; without `branch`, all of them; `as_of` as in `reader`. `params`
        fill `?`, `$1` (a sequence) or `$name` (a mapping). `tokenizer` is a tokenizer.json or the
        folder of a model: then tokens have a column `text`; a file that the run did not begin with
        gives a warning.

        Raises what `reader` raises, and:
            InvalidArgument: the query is wrong, does not only read, reaches outside of the views
                (`allow_external` lets it read files), or used up its time or memory ("2GB").
            Corrupt: stored bytes are not what was committed.
        """
        from ledger.result import Result
        from ledger.sql import run_query
        from ledger.token_text import load_token_text, other_tokenizer

        reader = self.reader(self.run(run).run_id, branch, as_of=as_of, verify=verify)
        token_text = None if tokenizer is None else load_token_text(tokenizer)
        other = None if token_text is None else other_tokenizer(reader, token_text)
        if other is not None:
            warnings.warn(other, stacklevel=2)
        return Result(
            run_query(
                reader,
                query,
                params,
                timeout_s=timeout_s,
                memory_limit=memory_limit,
                allow_external=allow_external,
                token_text=token_text,
            )
        )

    def follow(
        self,
        run_id: str,
        since: int = 0,
        *,
        kinds: Collection[str] | None = None,
        branch: str | None = None,
        poll_s: float = 0.5,
        stop: threading.Event | None = None,
    ) -> Iterator[NewEvents]:
        """Events with a number above `since`, in order, each once: those there, then those to come.

        See `ledger.follow`, also for `events_after`, which ends with what is there.
        """
        from ledger.follow import follow

        return follow(self, run_id, since, kinds=kinds, branch=branch, poll_s=poll_s, stop=stop)

    def commit_queue(self, run_id: str) -> CommitQueue:
        """Where this process's appends to a run wait for each other, to be stored together."""
        with self._lock:
            queue = self._queues.get(run_id)
            if queue is None:
                queue = self._queues[run_id] = CommitQueue(self, run_id)
            return queue

    def lookup(self, run_id: str) -> LedgerLookup:
        """What checks of new events need to know of stored ones."""
        with self._lock:
            found = self._lookups.get(run_id)
            if found is None:
                found = self._lookups[run_id] = LedgerLookup(self, run_id)
            return found

    def segment_infos(self, run_id: str, up_to: int | None = None) -> list[SegmentInfo]:
        """The segments of a run that begin at or before `up_to` (without it: all), in order.

        They are remembered: asking again costs only what was committed since.
        """
        return self.index.infos(run_id, up_to)

    def content_digest(self, run_id: str, branch: str | None = MAIN) -> bytes:
        """What two runs are compared by: blake3 over the content of all rows of the lineage.

        It depends neither on segments, order of writing, names of runs and branches nor on anything
        that is a measurement. Of rows that retention has retired it goes by their recorded hashes.
        """
        reader = self.reader(run_id, branch)
        hashes = {kind: row_content_hashes(reader.table(kind)) for kind in reader.kinds()}
        for kind, of_retired in reader.retired_hashes().items():
            hashes[kind] = hashes.get(kind, []) + of_retired
        return multiset_digest(hashes)


def _require_name(what: str, name: str) -> None:
    if name and name[0] != "." and _NAME_CHARACTERS.issuperset(name) and len(name) <= 128:
        return
    raise InvalidArgument(
        explain(
            f"a {what} cannot have this name",
            expected="1 to 128 letters, digits, '.', '_' or '-', not beginning with '.'",
            found=repr(name),
        )
    )
