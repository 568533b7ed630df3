"""A catalog that was put back from an older copy: nobody appends a second history to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ledger import Ledger, open_ledger
from ledger.catalog import tables as t
from ledger.errors import Conflict
from ledger.place import place_of
from ledger.rebuild_catalog import rebuild_catalog
from ledger.storage import open_store
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.places import AnyPlace

Rows = dict[str, list[dict[str, Any]]]


def append(ledger: Ledger, first: int, count: int, producer: str = "p") -> None:
    writer = ledger.writer("run", producer=producer)
    for number in range(first, first + count):
        writer.append([factory.score(number, 1.0)])


def rows_of(ledger: Ledger) -> Rows:
    with ledger.catalog.read() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            for table in t.METADATA.sorted_tables
        }


def put_back(ledger: Ledger, rows: Rows) -> None:
    """As a copy of the database would."""
    with ledger.catalog.write() as connection:
        for table in reversed(t.METADATA.sorted_tables):
            connection.execute(table.delete())
        for table in t.METADATA.sorted_tables:
            if rows[table.name]:
                connection.execute(table.insert(), rows[table.name])


def test_no_second_history_is_begun(any_place: AnyPlace) -> None:
    with any_place.open(create=True) as ledger:
        before_the_run = rows_of(ledger)
        ledger.create_run("run")
        append(ledger, 0, 3)
    with any_place.open() as ledger:
        old = rows_of(ledger)
        append(ledger, 100, 3)
        ledger.exporter.flush()
        append(ledger, 200, 1)
        head = ledger.run().head_chain
        assert ledger.exporter.flush()
    for rows in (old, before_the_run):
        with any_place.open() as ledger:
            put_back(ledger, rows)
            if rows is before_the_run:
                ledger.create_run("run")
            objects = sorted(ledger.store.list(""))
            with pytest.raises(Conflict, match="rebuild-catalog --force") as refused:
                append(ledger, 300, 1, "q")
            assert "links up to seq 7" in str(refused.value)
            assert sorted(ledger.store.list("")) == objects
            with pytest.raises(Conflict, match="rebuild-catalog --force"):
                ledger.writer("run", producer="p", epoch=1)
            assert not verify_ledger(ledger).ok
    if any_place.name.startswith("memory"):
        return
    store = open_store(any_place.uri, any_place.storage_options)
    rebuild_catalog(place_of(store, any_place.catalog), force=True)
    with any_place.open() as ledger:
        assert ledger.run().head_chain == head
        append(ledger, 300, 1, "q")
        assert verify_ledger(ledger).ok


def test_what_was_exported_but_not_noted_is_no_reason(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        append(ledger, 0, 3)
    connection = sqlite3.connect(tmp_path / "ledger" / "catalog.sqlite")
    with connection:  # its exporter died between the two
        connection.execute("DELETE FROM exports")
    connection.close()
    with open_ledger(tmp_path / "ledger") as ledger:
        append(ledger, 100, 3)
        assert ledger.exporter.flush()
        assert verify_ledger(ledger).ok
