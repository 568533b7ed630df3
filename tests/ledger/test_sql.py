"""Queries only read the views: nothing else on disk, network, in memory or in the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from ledger.errors import InvalidArgument
from ledger.sql import connect, run_query
from tests.ledger.factory import MemoryReader


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM samples",
        "WITH a AS (SELECT * FROM samples) SELECT count(*) FROM a",
        "FROM samples",
        "VALUES (1)",
        "TABLE samples",
        "DESCRIBE samples",
        "SUMMARIZE samples",
        "SHOW TABLES",
        "EXPLAIN SELECT * FROM tokens",
        "EXPLAIN ANALYZE SELECT count(*) FROM tokens",
        "PIVOT samples ON decision USING count(*) GROUP BY rollout_step",
        "PIVOT samples ON decision IN ('kept') USING count(*) GROUP BY rollout_step",
        "SELECT 1;",
    ],
)
def test_reading_is_answered(everything: MemoryReader, query: str) -> None:
    assert run_query(everything, query).num_rows >= 1


@pytest.mark.parametrize(
    "query",
    [
        "COPY samples TO '{out}'",
        "COPY (SELECT 1) TO '{out}' (FORMAT parquet)",
        "EXPORT DATABASE '{out}'",
        "ATTACH '{out}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "PRAGMA threads = 1",
        "CALL pragma_version()",
        "CREATE TABLE x AS SELECT 1",
        "CREATE VIEW x AS SELECT 1",
        "INSERT INTO samples VALUES (1)",
        "UPDATE samples SET reward = 1",
        "DELETE FROM samples",
        "DROP VIEW samples",
        "BEGIN",
        "CHECKPOINT",
        "PREPARE a AS SELECT 1",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
        "SELECT * FROM '{file}'",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM read_blob('{file}')",
        "SELECT * FROM read_parquet('{file}')",
        "SELECT * FROM read_json('{file}')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_text('https://example.org/')",
        "SELECT * FROM 's3://bucket/file.parquet'",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM arrow_scan(1, 2, 3)",
        'SELECT * FROM "arrow_scan" (1, 2, 3)',
        "EXPLAIN ANALYZE CREATE TABLE x AS SELECT 1",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
        "SELECT * FROM a_variable_of_the_caller",
        "SELECT * FROM enable_logging()",
    ],
)
def test_everything_else_is_refused(everything: MemoryReader, tmp_path: Path, query: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    a_variable_of_the_caller = pa.table({"a": [1]})
    with pytest.raises(InvalidArgument) as caught:
        run_query(
            everything,
            query.format(out=tmp_path / "out", file=secret, folder=tmp_path),
        )
    assert "running a query" in str(caught.value)
    assert list(tmp_path.iterdir()) == [secret]
    assert a_variable_of_the_caller.num_rows == 1


def test_a_connection_sees_no_variable_of_its_caller(everything: MemoryReader) -> None:
    hidden = pa.table({"a": [1]})
    with connect(everything) as con, pytest.raises(duckdb.CatalogException, match="hidden"):
        con.sql("SELECT * FROM hidden").fetchall()
    assert hidden.num_rows == 1


def test_an_error_has_duckdbs_message_and_the_views(everything: MemoryReader) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run_query(everything, "SELECT rewards FROM samples")
    assert "Binder Error" in str(caught.value)
    assert "trajectories" in str(caught.value)


def test_parameters_are_bound_by_place_and_by_name(everything: MemoryReader) -> None:
    query = "SELECT index FROM samples WHERE decision = {} AND index > {}"
    by_place = run_query(everything, query.format("?", "?"), ["surplus", 16])
    by_name = run_query(everything, query.format("$d", "$i"), {"d": "surplus", "i": 16})
    assert sorted(by_place["index"].to_pylist()) == [17, 18]
    assert sorted(by_name["index"].to_pylist()) == [17, 18]


def test_a_query_ends_when_its_time_is_over(everything: MemoryReader) -> None:
    endless = (
        "SELECT count(*) FROM range(100000000000) AS a, range(1000000) AS b "
        "WHERE a.range % 7 = b.range % 3"
    )
    with pytest.raises(InvalidArgument, match=r"within 0\.05 s"):
        run_query(everything, endless, timeout_s=0.05)


def test_a_query_ends_when_its_memory_is_used_up(everything: MemoryReader) -> None:
    with pytest.raises(InvalidArgument, match="--memory-limit"):
        run_query(everything, "SELECT list(range) FROM range(100000000)", memory_limit="40MB")
    with pytest.raises(InvalidArgument, match="such as 500MB"):
        run_query(everything, "SELECT 1", memory_limit="much")


def test_only_what_a_query_names_is_opened() -> None:
    class Watching(MemoryReader):
        def __init__(self) -> None:
            super().__init__({})
            self.opened: list[str] = []

        def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
            self.opened.append(kind)
            return super().table(kind, columns)

    reader = Watching()
    run_query(reader, "SELECT * FROM Groups")
    assert set(reader.opened) == {"prompt_issued", "sample_decided", "sample_scored"}
