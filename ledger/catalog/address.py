"""Addresses of catalogs: what `--catalog` takes, as SQLAlchemy wants it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import sqlalchemy as sa

from ledger.errors import InvalidArgument, explain
from ledger.redact import REDACTED, redact_text

__all__ = ["KINDS", "catalog_url", "kind_of", "shown"]

KINDS = {
    "sqlite": "sqlite:////folder/catalog.sqlite, on a local disk",
    "postgresql": "postgresql+psycopg://user@host/database",
}
"""Kind of a catalog → what its address looks like."""

_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def kind_of(url: sa.URL) -> str:
    """'sqlite' or 'postgresql'."""
    return url.get_backend_name()


def shown(url: sa.URL) -> str:
    """The address as it may be printed: without user, password and other secrets."""
    if kind_of(url) == "sqlite":
        return f"sqlite:///{url.database}"
    return redact_text(url.render_as_string(hide_password=True))


def catalog_url(text: str) -> sa.URL:
    """The address of a catalog; the path of an SQLite file becomes absolute.

    Raises:
        InvalidArgument: it is no address, or of a kind that is not supported. The message holds no
            password.
    """
    url = None
    with contextlib.suppress(sa.exc.ArgumentError, ValueError):
        url = sa.make_url(text)
    if url is None:
        # Not from SQLAlchemy's error, which holds the whole text.
        if "://" not in text and "@" in text:
            raise _refused(REDACTED + "@" + text.rpartition("@")[2])
        raise _refused(redact_text(text))
    driver = _DRIVERS.get(url.drivername)
    if driver is None:
        raise _refused(shown(url))
    url = url.set(drivername=driver)
    if kind_of(url) == "sqlite":
        if url.query or url.host or url.database in (None, "", ":memory:"):
            raise _refused(shown(url))
        return url.set(database=str(Path(str(url.database)).expanduser().absolute()))
    return url


def _refused(found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "a ledger was not opened: this is not an address of a catalog",
            on="--catalog (LEDGER_CATALOG)",
            expected=", or ".join(KINDS.values()),
            found=found,
        )
    )
