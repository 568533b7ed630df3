"""What is particular to PostgreSQL: how sessions are set up, what its errors mean."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ledger.errors import InvalidArgument, LedgerError, MissingDependency, StorageFailed, explain

__all__ = [
    "LOCK",
    "connect_args",
    "engine_options",
    "is_lost",
    "is_overtaken",
    "meaning",
    "missing",
    "require_durable",
    "require_schema",
]

LOCK = 0x6C656467_65723031
"""Key of the advisory lock that whoever makes or changes tables holds."""

_CONNECT_TIMEOUT_S = 10
_SESSION = {
    # A transaction that waits this long for a run's head waits for one that hangs.
    "lock_timeout": "60s",
    # A client that was cut off in the middle must not keep the run's head locked for hours.
    "idle_in_transaction_session_timeout": "60s",
}

_OVERTAKEN = (
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "23505",  # unique_violation: another transaction has added the row since it was looked for
)
_LOST = (
    "08",  # connection exceptions
    "57P",  # the server stops, has crashed, or is not ready yet
    "25P03",  # idle_in_transaction_session_timeout
)


def engine_options() -> dict[str, Any]:
    """Of the pool: connections are looked at before use; at most 12 of a process."""
    return {
        "pool_pre_ping": True,
        "pool_size": 4,
        "max_overflow": 8,
        "pool_timeout": 60,
        "pool_use_lifo": True,
    }


def connect_args(url: sa.URL) -> dict[str, Any]:
    """Arguments of the driver that the address does not give itself."""
    given = {key: str(value) for key, value in url.query.items()}
    # `options` of the address come last, so that they win.
    session = " ".join(f"-c {name}={value}" for name, value in _SESSION.items())
    made: dict[str, Any] = {"options": f"{session} {given.get('options', '')}".strip()}
    defaults = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": "trajectory-ledger",
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }
    return made | {name: value for name, value in defaults.items() if name not in given}


def missing(error: ImportError) -> MissingDependency:
    """The error of a process that has no driver."""
    return MissingDependency(
        explain(
            "a catalog on PostgreSQL was not opened: its driver is not installed",
            expected="the package psycopg",
            found=str(error),
            do="pip install 'trajectory-ledger[postgres]'",
        )
    )


def require_durable(connection: sa.Connection, name: str) -> None:
    """Refuse a server that acknowledges what a power cut may take back.

    Raises:
        StorageFailed: `synchronous_commit` or `fsync` is off.
    """
    for setting in ("synchronous_commit", "fsync"):
        found = connection.exec_driver_sql(f"SHOW {setting}").scalar()
        if found == "off":
            raise StorageFailed(
                explain(
                    "a ledger was not opened for writing: its catalog would acknowledge commits "
                    "that a crash can take back",
                    on=name,
                    expected=f"{setting} = on",
                    found=f"{setting} = off",
                    do=f"set {setting} = on for this server, database or user (in "
                    "postgresql.conf, or ALTER DATABASE … SET), or open it for reading only",
                )
            )


def require_schema(connection: sa.Connection, name: str) -> str:
    """The schema in which the tables are, or are to be made.

    Raises:
        InvalidArgument: the address names one that is not there.
    """
    schema = connection.exec_driver_sql("SELECT current_schema()").scalar()
    if schema is None:
        raise InvalidArgument(
            explain(
                "a catalog was not opened: its schema is not there",
                on=name,
                expected="a schema that exists first in search_path",
                found=connection.exec_driver_sql("SHOW search_path").scalar(),
                do="make it: CREATE SCHEMA …",
            )
        )
    return str(schema)


def _state(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(original, "sqlstate", None)


def is_overtaken(error: BaseException) -> bool:
    """Whether the transaction was undone for another one's sake: it can simply be run again."""
    return _state(error) in _OVERTAKEN


def is_lost(error: BaseException) -> bool:
    """Whether the connection is gone: a commit that was on its way may have happened, or not."""
    if isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated:
        return True
    state = _state(error)
    if state is None:  # said by the driver, not by the server
        return isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError)
    return state.startswith(_LOST)


def meaning(error: BaseException) -> tuple[type[LedgerError], str, str]:
    """Class of ours for an error of PostgreSQL, what was found, and what to do about it."""
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    text = " ".join(str(original).split())
    if is_lost(error):
        return (
            StorageFailed,
            text,
            "see that the server runs, can be reached and takes this login; then try again: "
            "an append is repeated safely under its producer_seq",
        )
    return StorageFailed, text, "see the server's log; then try again"
