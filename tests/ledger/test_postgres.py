"""A catalog on a real PostgreSQL server: what it must refuse, survive and keep to itself."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import migrations
from ledger import Ledger, open_ledger
from ledger.catalog import engine
from ledger.catalog.address import catalog_url
from ledger.catalog.engine import Catalog
from ledger.catalog.integrity import catalog_differences
from ledger.catalog.tables import METADATA
from ledger.errors import (
    IncompatibleFormat,
    InvalidArgument,
    LedgerError,
    NotFound,
    StorageFailed,
)
from ledger.verify import verify_ledger
from tests.ledger import append_child, factory
from tests.servers.between import Between, between
from tests.servers.postgres import PostgresServer

EVENTS = factory.story()[0].events


@pytest.fixture
def ledger(tmp_path: Path, postgres_url: str) -> Iterator[Ledger]:
    with open_ledger(tmp_path / "ledger", create=True, catalog=postgres_url) as opened:
        opened.create_run("run")
        yield opened


@pytest.fixture
def lossy(postgres_server: PostgresServer) -> Iterator[Between]:
    with between(postgres_server.port) as made:
        yield made


def test_migrations_up_and_down(postgres_url: str) -> None:
    catalog = Catalog(catalog_url(postgres_url))
    with catalog.write() as connection:
        assert migrations.current(connection) is None
        migrations.upgrade(connection)
        assert migrations.current(connection) == migrations.HEAD
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    assert catalog_differences(catalog) == []
    with catalog.write() as connection:
        migrations.downgrade(connection, "0001")
        assert sa.inspect(connection).has_table("counters")
        migrations.upgrade(connection)
    assert catalog_differences(catalog) == []
    with catalog.write() as connection:
        migrations.downgrade(connection, "base")
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    catalog.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DROP INDEX ix_locations_path", "table locations, indexes"),
        ("ALTER TABLE commits DROP CONSTRAINT uq_commits_key", "table commits, unique"),
        ("ALTER TABLE segments ALTER COLUMN chain DROP NOT NULL", "table segments, columns"),
        ("ALTER TABLE runs ALTER COLUMN head_seq TYPE integer", "table runs, columns"),
        ("ALTER TABLE versions DROP CONSTRAINT versions_pkey", "table versions, primary key"),
        ("DROP TABLE exports", "table exports"),
        ("DELETE FROM producers", "producers"),
        ("UPDATE runs SET head_seq = head_seq + 1", "the last seq"),
        (
            "SET session_replication_role = replica; DELETE FROM commits",
            "a row in commits for segments",
        ),
    ],
)
def test_damage_is_found(
    ledger: Ledger, postgres_server: PostgresServer, postgres_url: str, statement: str, says: str
) -> None:
    ledger.writer("run", producer="p").append(EVENTS)
    assert verify_ledger(ledger).ok
    postgres_server.execute(statement, postgres_url)
    assert any(says in line for line in verify_ledger(ledger).lines())


def test_a_reader_sees_one_state(ledger: Ledger) -> None:
    writer = ledger.writer("run", producer="p")
    query = sa.text("SELECT head_seq FROM runs")
    with ledger.catalog.read() as connection:
        before = connection.execute(query).scalar()
        writer.append(EVENTS)
        assert connection.execute(query).scalar() == before
        with pytest.raises(sa.exc.DBAPIError, match="read-only"):
            connection.execute(sa.text("DELETE FROM meta"))
    assert ledger.run().head_seq > 0


def test_eight_processes_append_at_once(tmp_path: Path, postgres_url: str) -> None:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.ledger.append_child", "psycopg", "alembic.command"])
    children = [
        server.Process(target=append_child.main, args=(str(tmp_path / "l"), n, 3, postgres_url))
        for n in range(8)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    with open_ledger(tmp_path / "l", catalog=postgres_url) as ledger:
        assert ledger.run().head_seq == 8 * 3 * 3
        assert verify_ledger(ledger).ok


@pytest.mark.parametrize("lose", ["answer", "commit"])
def test_a_commit_whose_connection_is_lost_is_there_once(
    tmp_path: Path, postgres_url: str, lossy: Between, postgres_server: PostgresServer, lose: str
) -> None:
    through = postgres_url.replace(f":{postgres_server.port}/", f":{lossy.port}/")
    with open_ledger(tmp_path / "l", create=True, catalog=through) as ledger:
        lossy.lose = lose  # type: ignore[assignment]
        ledger.create_run("run")
        assert lossy.lost == 1
        writer = ledger.writer("run", producer="p")
        first = writer.append(EVENTS)
        lossy.lose = lose  # type: ignore[assignment]
        second = writer.append(EVENTS)
        assert lossy.lost == 2
        third = writer.append(EVENTS)
        assert (second.first_seq, third.first_seq) == (first.last_seq + 1, second.last_seq + 1)
        assert ledger.run().head_seq == third.last_seq
        assert verify_ledger(ledger).ok


def test_a_server_that_is_gone_is_told_and_the_append_can_be_repeated(
    tmp_path: Path,
    postgres_url: str,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_RECONNECT_S", 0.2)
    with open_ledger(tmp_path / "l", create=True, catalog=postgres_url) as ledger:
        ledger.create_run("run")
        writer = ledger.writer("run", producer="p")
        writer.append(EVENTS)
        postgres_server.stop()
        try:
            with pytest.raises(StorageFailed, match="try again") as failed:
                writer.append(EVENTS)
            with pytest.raises(StorageFailed):
                ledger.runs()
        finally:
            postgres_server.start()
        assert postgres_server.password not in "".join(traceback.format_exception(failed.value))
        receipt = writer.append(EVENTS, producer_seq=1)
        assert writer.append(EVENTS, producer_seq=1) == receipt
        assert receipt.last_seq == ledger.run().head_seq == 2 * len(EVENTS)
        assert verify_ledger(ledger).ok


def test_a_server_that_comes_back_is_waited_for(
    tmp_path: Path, postgres_url: str, postgres_server: PostgresServer
) -> None:
    with open_ledger(tmp_path / "l", create=True, catalog=postgres_url) as ledger:
        ledger.create_run("run")
        writer = ledger.writer("run", producer="p")
        postgres_server.stop()
        restart = threading.Timer(0.3, postgres_server.start)
        restart.start()
        writer.append(EVENTS)
        restart.join()
        assert ledger.run().head_seq == len(EVENTS)


def test_a_server_that_would_forget_commits_is_refused(
    ledger: Ledger, tmp_path: Path, postgres_url: str
) -> None:
    for setting in ("off", "local"):
        other = f"{postgres_url}%20-csynchronous_commit%3D{setting}"
        if setting == "off":
            with pytest.raises(StorageFailed, match="a crash can take back"):
                open_ledger(tmp_path / "ledger", catalog=other)
        else:
            open_ledger(tmp_path / "ledger", catalog=other).close()
        with open_ledger(tmp_path / "ledger", catalog=other, read_only=True) as reading:
            assert reading.run().run_id == "run"


def test_ledgers_in_schemas_of_one_database(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    database = postgres_server.database()

    def of(schema: str) -> str:
        return f"{database}?options=-csearch_path%3D{schema}"

    with pytest.raises(InvalidArgument, match="CREATE SCHEMA"):
        open_ledger(tmp_path / "a", create=True, catalog=of("team_a"))
    for schema in ("team_a", "team_b"):
        postgres_server.execute(f"CREATE SCHEMA {schema}", database)
    ids = set()
    for name in ("a", "b"):
        with open_ledger(tmp_path / name, create=True, catalog=of(f"team_{name}")) as made:
            made.create_run("run")
            made.writer("run", producer=name).append(EVENTS)
            assert verify_ledger(made).ok
            ids.add(made.ledger_id)
    assert len(ids) == 2
    with open_ledger(tmp_path / "b", catalog=of("team_b")) as again:
        assert again.ledger_id in ids
    # a schema behind another on the path is not taken for one's own
    with pytest.raises(NotFound, match="ledger init"):
        open_ledger(tmp_path / "c", catalog=of("public,team_a"))
    with open_ledger(tmp_path / "c", create=True, catalog=of("public,team_a")) as made:
        assert made.runs() == []
    with pytest.raises(IncompatibleFormat, match="do not belong together"):
        open_ledger(tmp_path / "a", catalog=of("team_b"))


def test_a_catalog_of_another_ledger_or_program_is_refused(
    ledger: Ledger, tmp_path: Path, postgres_url: str, postgres_server: PostgresServer
) -> None:
    with pytest.raises(IncompatibleFormat, match="do not belong together"):
        open_ledger(tmp_path / "other", create=True, catalog=postgres_url)
    assert not (tmp_path / "other" / "ledger.json").exists()
    with pytest.raises(NotFound, match="ledger init"):
        open_ledger(tmp_path / "other", catalog=postgres_url)
    with pytest.raises(InvalidArgument, match=r"--catalog postgresql\+psycopg://"):
        open_ledger(tmp_path / "ledger")
    with pytest.raises(InvalidArgument, match=r"--catalog postgresql\+psycopg://"):
        open_ledger(tmp_path / "ledger", create=True)
    assert not list((tmp_path / "ledger").glob("catalog.*"))
    foreign = postgres_server.schema()
    postgres_server.execute("CREATE TABLE t (x int)", foreign)
    with pytest.raises(IncompatibleFormat, match="another program's"):
        open_ledger(tmp_path / "third", create=True, catalog=foreign)
    with pytest.raises(NotFound, match="rebuild-catalog"):
        open_ledger(tmp_path / "ledger", create=True, catalog=postgres_server.schema())


def test_a_session_says_who_it_is_and_does_not_wait_for_ever(
    ledger: Ledger, postgres_server: PostgresServer
) -> None:
    with ledger.catalog.read() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1
        rows = postgres_server.execute(
            "SELECT application_name FROM pg_stat_activity WHERE state = 'idle in transaction'"
        )
        assert ("trajectory-ledger",) in rows
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "1min"
        shown = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
        assert shown == "1min"


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url.replace("@127.0.0.1", "@host.invalid"),
        lambda url: url.replace("postgresql+psycopg", "postgresql+psycopg2"),
        lambda url: url.replace("/postgres?", "/nowhere?"),
        lambda url: url.replace("127.0.0.1:", "127.0.0.1:x"),
        lambda url: url + "&password=another-secret",
        lambda url: url.replace("ledger:", "stranger:"),
    ],
)
def test_no_error_shows_the_password(
    tmp_path: Path,
    postgres_url: str,
    postgres_server: PostgresServer,
    change: Callable[[str], str],
) -> None:
    with pytest.raises(LedgerError) as failed:
        open_ledger(tmp_path / "l", create=True, catalog=change(postgres_url))
    told = "".join(traceback.format_exception(failed.value))
    assert postgres_server.password not in told
    assert "another-secret" not in told


def test_the_address_may_be_short(tmp_path: Path, ledger: Ledger, postgres_url: str) -> None:
    short = postgres_url.replace("postgresql+psycopg://", "postgresql://")
    with open_ledger(tmp_path / "ledger", catalog=short) as again:
        assert again.ledger_id == ledger.ledger_id
        assert "[redacted]" in again.catalog.name
