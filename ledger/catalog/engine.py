"""Opening the catalog: transactions that read one state, and transactions that are durable.

Everything above is written for any dialect; `sqlite` and `postgres` hold what is particular.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa

from ledger.catalog import postgres, sqlite
from ledger.catalog.address import kind_of, shown
from ledger.catalog.driver import Driver, RawDriver
from ledger.catalog.sqlite import BUSY_TIMEOUT_S, sqlite_url
from ledger.catalog.turns import Turns
from ledger.errors import LedgerError, StorageFailed, explain

__all__ = ["BUSY_TIMEOUT_S", "Catalog", "sqlite_url"]

TURNS = "-turns"
"""What the name of the file has more than that of an SQLite catalog, before which writers wait."""
_TRIES = 8
"""Times that a transaction is run before being overtaken by others counts as a failure."""
_RECONNECT_S = 20.0
"""How long a write is tried again while the server cannot be reached."""

_Result = TypeVar("_Result")


class Catalog:
    """A connection pool that gives out read and write transactions, in our errors.

    Threads may share it; a forked child must open its own. At most some ten transactions run at
    once in a process: more wait for their turn.
    """

    def __init__(
        self,
        url: sa.URL,
        *,
        refusal: LedgerError | None = None,
        name: str | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`refusal` is raised by whoever wants to write. `name` is shown instead of the address.

        Raises:
            MissingDependency: the driver is not installed.
        """
        self.url = url
        self.kind = kind_of(url)
        """'sqlite' or 'postgresql'."""
        self.name = shown(url) if name is None else name
        """Where it is, without any password."""
        self.refusal = refusal
        self._on_close = on_close
        self._turns: Turns | None = None
        reading: dict[str, Any] = {}
        writing: dict[str, Any] = {sqlite.WRITE: True}
        if self.kind == "sqlite":
            self.engine = sa.create_engine(url, pool_timeout=BUSY_TIMEOUT_S)
            sqlite.configure(self.engine)
            path = sqlite.file_of(url)
            if path is not None:
                self._turns = Turns(path.with_name(path.name + TURNS), BUSY_TIMEOUT_S)
        else:
            try:
                self.engine = sa.create_engine(
                    url, connect_args=postgres.connect_args(url), **postgres.engine_options()
                )
            except ImportError as error:
                raise postgres.missing(error) from error
            # One snapshot for all statements of a reader. A writer locks the run's head first and
            # sees in every statement what was committed until then.
            reading = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            writing["isolation_level"] = "READ COMMITTED"
        self._reading = self.engine.execution_options(**reading)
        self._writing = self.engine.execution_options(**writing)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one state of the catalog."""
        with self._translated("the catalog was not read"), self._reading.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that is durable when the block has ended, and gone if it raised.

        Where the connection was lost in the very moment of the commit, nobody can say which:
        `transact` is for what can be asked twice.
        """
        self.require_writable()
        with (
            self._translated("the catalog did not take a commit"),
            self._turn(),
            self._writing.begin() as connection,
        ):
            yield connection

    def transact(self, work: Callable[[sa.Connection], _Result]) -> _Result:
        """Run `work` in a transaction that is durable on return; its result.

        `work` is run again where another transaction overtook it, and where the connection was
        lost: then what it did may be stored already, which it must recognise (an append does, by
        its key).

        Raises:
            StorageFailed: the catalog did not take it. Unless the connection was lost in the very
                moment of the commit, nothing is stored.
        """
        tries, until = 0, time.monotonic() + _RECONNECT_S
        while True:
            tries += 1
            try:
                with self.write() as connection:
                    return work(connection)
            except StorageFailed as error:
                if not self._again(error.__cause__, tries, until):
                    raise
            time.sleep(random.uniform(0.5, 1.0) * min(0.02 * 2**tries, 1.0))

    def _again(self, error: BaseException | None, tries: int, until: float) -> bool:
        if self.kind == "sqlite" or not isinstance(error, sa.exc.DBAPIError):
            return False  # SQLite has waited already
        if postgres.is_overtaken(error):
            return tries < _TRIES
        return postgres.is_lost(error) and time.monotonic() < until

    @contextlib.contextmanager
    def write_directly(self) -> Iterator[Driver]:
        """As `write`, for SQLite only, without SQLAlchemy in between: a fraction of the time."""
        self.require_writable()
        with (
            self._translated("the catalog did not take a commit"),
            self._turn(),
            self._raw() as raw,
        ):
            cursor = raw.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield RawDriver(self.engine.dialect, cursor)
            except BaseException:
                raw.rollback()
                raise
            raw.commit()

    @contextlib.contextmanager
    def read_statement(self) -> Iterator[Driver]:
        """As `read`, for a single statement; without SQLAlchemy in between where it is SQLite."""
        if self.kind != "sqlite":
            with self.read() as connection:
                yield Driver(connection)
            return
        with self._translated("the catalog was not read"), self._raw() as raw:
            yield RawDriver(self.engine.dialect, raw.cursor())

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._turns is None else self._turns.turn()

    @contextlib.contextmanager
    def _raw(self) -> Iterator[Any]:
        raw = self.engine.raw_connection()
        try:
            yield raw
        finally:
            raw.close()

    def require_writable(self) -> None:
        """Raise, with the reason, where this catalog was opened for reading only."""
        if self.refusal is not None:
            raise type(self.refusal)(*self.refusal.args)

    def keep_write_ahead_log(self) -> None:
        """Switch an SQLite file to WAL, for good. To be done by one process at a time."""
        if self.kind == "sqlite":
            with self._translated("the catalog was not set up"):
                sqlite.keep_write_ahead_log(self.engine)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    @contextlib.contextmanager
    def _translated(self, tried: str) -> Iterator[None]:
        try:
            yield
        except sa.exc.TimeoutError as error:
            raise StorageFailed(
                explain(
                    tried,
                    on=self.name,
                    expected="a free connection",
                    found="all are in use by other threads of this process",
                    do="try again; use fewer threads at once",
                )
            ) from error
        except (sa.exc.DBAPIError, *sqlite.ERRORS) as error:
            if self.kind == "sqlite":
                kind, found, do = sqlite.meaning(error)
            else:
                kind, found, do = postgres.meaning(error)
            raise kind(explain(tried, on=self.name, found=found, do=do)) from error
