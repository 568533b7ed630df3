"""Queries only read the views: nothing else on disk, network, in memory or in the process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledger import open_ledger
from ledger.errors import Corrupt, InvalidArgument
from ledger.sandbox import forbidden_functions, refuse_changes
from ledger.session import Session
from ledger.sql import connect, run_query
from tests.ledger.factory import RUN, MemoryReader


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
        "SELECT * FROM query/* a comment hides */('SELECT 1')",
        'SELECT * FROM main."QUERY"($$SELECT 1$$)',
        "SELECT * FROM query_table('samples')",
        "FROM samples, LATERAL (FROM read_text('{file}'))",
        "SELECT (SELECT max(content) FROM read_text('{file}'))",
        "SELECT 1 ORDER BY (SELECT count(*) FROM glob('{folder}/*'))",
        "SELECT 1 LIMIT (SELECT count(*) FROM glob('{folder}/*'))",
        "WITH a AS MATERIALIZED (FROM read_blob('{file}')) FROM a",
        "WITH RECURSIVE a(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM a, glob('*')) FROM a",
        "SELECT 1 UNION ALL BY NAME SELECT count(*) FROM sniff_csv('{file}')",
        "PIVOT (FROM glob('{folder}/*')) ON file USING count(*)",
        "PIVOT (FROM query/**/('SELECT 1 AS a')) ON a USING count(*)",
        "WITH p AS (PIVOT (FROM read_text ('{file}')) ON size USING count(*)) FROM p",
        "DESCRIBE SELECT * FROM read_csv('{file}')",
        "SUMMARIZE SELECT * FROM query('SELECT 1')",
        "EXPLAIN ANALYZE SELECT * FROM read_csv('{file}')",
        "EXPLAIN (FORMAT json) SELECT * FROM query('SELECT 1')",
        "SELECT * FROM read_duckdb('{file}')",
        "SELECT * FROM parquet_metadata('{file}')",
        "SELECT * FROM pandas_scan(1, 2, 3)",
        "SELECT * FROM python_map_function(1)",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
        "SELECT * FROM enable_profiling()",
        "SELECT * FROM force_checkpoint()",
        "SELECT * FROM add_grammar_extension('a')",
        "SELECT * FROM create_external_resource('a')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM duckdb_logs()",
        "SELECT * FROM which_secret('s3://bucket', 's3')",
        "SELECT * FROM test_all_types()",
        "SELECT list_transform([1], lambda x: write_log('a'))",
        "SELECT write_log('a')",
        "SELECT current_setting('home_directory')",
        "SELECT getenv('HOME')",
        "SELECT nextval('a')",
        "SELECT sleep_ms(1)",
        "SET VARIABLE a = 1",
        "RESET threads",
        "USE memory",
        "DETACH memory",
        "EXECUTE a",
        "DEALLOCATE a",
        "CREATE MACRO f(x) AS x",
        "CREATE TEMP TABLE x (a INTEGER)",
        "CREATE SECRET (TYPE s3)",
        "IMPORT DATABASE '{folder}'",
        "EXPLAIN ANALYZE SET threads = 1",
        "EXPLAIN EXPLAIN SELECT 1",
        "VACUUM",
        "ANALYZE",
        "COMMENT ON VIEW samples IS 'a'",
        "ALTER TABLE samples ADD COLUMN x INTEGER",
        "MERGE INTO samples USING samples AS s ON false WHEN MATCHED THEN DELETE",
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


def test_no_table_function_of_this_duckdb_was_overlooked() -> None:
    """What is allowed is a list: all else that DuckDB has is refused, whatever it is called."""
    with duckdb.connect() as con:
        forbidden = forbidden_functions(con)
        known = con.execute(
            "SELECT DISTINCT lower(function_name) FROM duckdb_functions() "
            "WHERE function_type IN ('table', 'table_macro')"
        ).fetchall()
        names = sorted(name for (name,) in known if name in forbidden)
        assert len(names) > 40
        for name in names:
            with pytest.raises(InvalidArgument, match=f"the function {name}"):
                refuse_changes(con, f"SELECT * FROM {name}()", forbidden)
            with pytest.raises(InvalidArgument, match=f"the function {name}"):
                refuse_changes(con, f"PIVOT (FROM {name} /**/ ()) ON a USING count(*)", forbidden)


def test_what_reading_files_would_give_is_said_and_is_given_when_allowed(
    everything: MemoryReader, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"index": pa.array([0, 4]), "note": ["good", "bad"]}), mine)
    query = (
        "SELECT m.note, s.reward FROM samples AS s "
        f"JOIN read_parquet('{mine}') AS m ON s.index = m.index ORDER BY m.note"
    )
    with pytest.raises(InvalidArgument, match="--allow-external"):
        run_query(everything, query)
    found = run_query(everything, query, allow_external=True)
    assert found.to_pylist() == [{"note": "bad", "reward": 0.0}, {"note": "good", "reward": 1.0}]
    assert run_query(everything, f"FROM '{mine}'", allow_external=True).num_rows == 2


@pytest.mark.parametrize(
    "query",
    [
        "COPY samples TO '{out}'",
        "ATTACH '{out}'",
        "EXPORT DATABASE '{out}'",
        "CREATE TABLE x AS SELECT 1",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM read_text('https://example.org/')",
        "SELECT * FROM 's3://bucket/file.parquet'",
        "SELECT * FROM read_duckdb('{out}')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM arrow_scan(1, 2, 3)",
        "SET python_enable_replacements = true",
    ],
)
def test_files_allowed_means_reading_files_and_nothing_more(
    everything: MemoryReader, tmp_path: Path, query: str
) -> None:
    with pytest.raises(InvalidArgument):
        run_query(everything, query.format(out=tmp_path / "out"), allow_external=True)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_of_its_own_reaches_nothing_outside(
    everything: MemoryReader, tmp_path: Path
) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    out = tmp_path / "out"
    with connect(everything) as con:
        assert con.sql("SELECT count(*) FROM samples").fetchall() == [(20,)]
        for statement in (
            f"COPY samples TO '{out}'",
            f"ATTACH '{out}'",
            f"SELECT * FROM read_csv('{tmp_path}/secret.csv')",
            "SET enable_external_access = true",
            "SET python_enable_replacements = true",
            "LOAD httpfs",
        ):
            with pytest.raises(duckdb.Error):
                con.execute(statement)
    assert not out.exists()


def test_what_stored_bytes_raise_comes_out_as_it_was(everything: MemoryReader) -> None:
    class Broken(MemoryReader):
        def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
            raise Corrupt("a segment is not what was committed")

    for query in ("SELECT count(*) FROM samples", "SELECT * FROM mismatch WHERE index = 1"):
        with pytest.raises(Corrupt, match="not what was committed"):
            run_query(Broken({}), query)


def test_readers_of_a_ledger_share_connections_and_see_their_own_state(
    story_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Session] = []
    real = Session.__init__

    def count_(self: Session, **options: object) -> None:
        made.append(self)
        real(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "__init__", count_)
    with open_ledger(story_path) as ledger:
        head = ledger.run(RUN).head_seq
        first, all_ = ledger.reader(RUN, None, as_of=3), ledger.reader(RUN, None)
        count = "SELECT count(*) AS n FROM events"
        for _ in range(3):
            assert first.sql(count)["n"].to_pylist() == [3]
            assert all_.sql(count)["n"].to_pylist() == [head]
        assert len(made) == 1
        # An error costs the connection; what asks for limits has its own.
        with pytest.raises(InvalidArgument):
            all_.sql("SELECT nothing FROM samples")
        assert ledger.sql(count, memory_limit="200MB").rows() == [{"n": head}]
        assert len(made) == 2
        with ThreadPoolExecutor(8) as pool:
            found = list(
                pool.map(lambda i: (first if i % 2 else all_).sql(count)["n"][0].as_py(), range(32))
            )
        assert found == [head, 3] * 16
    for session in made:
        with pytest.raises(duckdb.ConnectionException):
            session.connection.execute("SELECT 1")


def test_a_connection_sees_no_variable_of_its_caller(everything: MemoryReader) -> None:
    hidden = pa.table({"a": [1]})
    with connect(everything) as con, pytest.raises(duckdb.CatalogException, match="hidden"):
        con.sql("SELECT * FROM hidden").fetchall()
    assert hidden.num_rows == 1


def test_an_error_has_duckdbs_message_and_the_views(everything: MemoryReader) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run_query(everything, "SELECT rewards FROM samples")
    assert "Binder Error" in str(caught.value)
    assert '"reward"' in str(caught.value)
    with pytest.raises(InvalidArgument) as caught:
        run_query(everything, "SELECT * FROM sample")
    assert "Catalog Error" in str(caught.value)
    assert "trajectories" in str(caught.value)
    assert "did you mean samples?" in str(caught.value)
    assert "pg_" not in str(caught.value)


def test_parameters_are_bound_by_place_and_by_name(everything: MemoryReader) -> None:
    query = "SELECT index FROM samples WHERE decision = {} AND index > {}"
    by_place = run_query(everything, query.format("?", "?"), ["surplus", 16])
    by_name = run_query(everything, query.format("$d", "$i"), {"d": "surplus", "i": 16})
    assert sorted(by_place["index"].to_pylist()) == [17, 18]
    assert sorted(by_name["index"].to_pylist()) == [17, 18]


def test_sums_of_integers_are_integers_where_they_fit(everything: MemoryReader) -> None:
    found = run_query(
        everything,
        "SELECT sum(sampled_tokens) AS tokens, sum(sampled_tokens) FILTER (false) AS nothing,\n"
        "  1::HUGEINT << 100 AS large, 1.5::DECIMAL(38, 0) AS exact FROM samples",
    )
    assert [str(field.type) for field in found.schema][:2] == ["int64", "int64"]
    (row,) = found.to_pylist()
    assert isinstance(row["tokens"], int)
    assert row["nothing"] is None
    assert (row["large"], row["exact"]) == (Decimal(2**100), Decimal(2))


def test_a_query_ends_when_its_time_is_over(everything: MemoryReader) -> None:
    endless = (
        "SELECT count(*) FROM range(100000000000) AS a, range(1000000) AS b "
        "WHERE a.range % 7 = b.range % 3"
    )
    with pytest.raises(InvalidArgument, match=r"within 0\.05 s"):
        run_query(everything, endless, timeout_s=0.05)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_query_needs_time(everything: MemoryReader, timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        run_query(everything, "SELECT 1", timeout_s=timeout_s)


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
