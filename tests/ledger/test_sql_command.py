"""`ledger sql` as it is used: where the query comes from, what fills it, where the result goes."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledger import Ledger
from ledger.cli import main

_ENDLESS = "SELECT count(*) FROM range(10000000000) AS a, range(9) AS b WHERE a.range % 7 = b.range"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(story_ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(["sql", "--ledger", str(story_ledger.root), *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_parameters_have_types(run: Run) -> None:
    query = "SELECT typeof($a) AS t, $a AS v"
    for given, kind, value in (
        ("a=3", "INTEGER|BIGINT|TINYINT", 3),
        ("a=1.5", "DOUBLE", 1.5),
        ("a=true", "BOOLEAN", True),
        ("a=text", "VARCHAR", "text"),
        ("a=x=y", "VARCHAR", "x=y"),
        ('a:="3"', "VARCHAR", "3"),
        ("a:=[1,2]", r"(INTEGER|BIGINT)\[\]", [1, 2]),
        ("a:=null", '"NULL"|INTEGER|NULL', None),
    ):
        code, out, err = run(query, "--json", "--param", given)
        assert code == 0, err
        (row,) = json.loads(out)
        assert row["v"] == value, given
        assert re.fullmatch(kind, row["t"]), (given, row["t"])
    code, out, _ = run("SELECT $1 + $2 AS s", "--param", "1", "--param", "2", "--json")
    assert json.loads(out) == [{"s": 3}]
    # An equals sign in a value that is no NAME=… stays what it is.
    assert json.loads(run("SELECT ? AS s", "--param", "1=1", "--json")[1]) == [{"s": "1=1"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SELECT $a", "--param", "a:=text"], "NAME:=JSON"),
        (["SELECT $a", "--param", "a=1", "--param", "2"], "all with a name, or none"),
        (["SELECT $a", "--param", "a=1", "--param", "a=2"], "each name once"),
        (["SELECT $a", "--param", "b=1"], "--param NAME=VALUE for $NAME"),
        (["SELECT $a"], "--param NAME=VALUE for $NAME"),
        (["SELECT 1", "--param", "b=1"], "--param NAME=VALUE for $NAME"),
        (["SELECT * FROM sample"], "did you mean samples?"),
        (["SELECT * FROM '/etc/passwd'"], "`ledger views` lists the views"),
        (["SELECT rewrd FROM samples"], "`ledger views NAME` describes the columns"),
        (["SELCT 1"], "docs/queries.md has worked queries"),
        (["SELECT 1; SELECT 2"], "one question at a time"),
        (["DELETE FROM samples"], "only ever appended"),
        (["SELECT * FROM read_csv('x.csv')"], "--allow-external"),
        (["SELECT getenv('HOME')"], "reaches nothing of this process"),
        (["SELECT 1", "--describe", "samples"], "no query beside it"),
        (["SELECT 1", "--file", "query.sql"], "none, or several"),
        (["--file", "no-such-file.sql"], "a query in UTF-8"),
        ([], "none, or several"),
        (["SELECT 1", "--json", "--format", "csv"], "one of them"),
        (["SELECT 1", "--memory-limit", "much"], "such as 500MB"),
        (["SELECT 1", "--tokenizer", "no-such-folder"], "a tokenizer was not found"),
        (["SELECT token_text(1)"], "--tokenizer PATH"),
        (["SELECT 1", "--output", "no-such-folder/out.csv"], "a result was not written"),
        (["SELECT 1", "--output", "out.xyz"], "or --format"),
        ([_ENDLESS, "--timeout", "0.05"], "within 0.05 s"),
    ],
)
def test_what_cannot_be_asked_is_said(
    run: Run, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert os.listdir(tmp_path) == []


def test_the_query_comes_from_a_file_or_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "query.sql"
    file.write_text("-- how many\nSELECT count(*) AS n\nFROM samples;\n")
    assert json.loads(run("--file", str(file), "--json")[1]) == [{"n": 20}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(file.read_text()))
    assert json.loads(run("-", "--json")[1]) == [{"n": 20}]


def test_the_result_goes_to_a_file_whole(run: Run, tmp_path: Path) -> None:
    query = "SELECT index, rollout_log_probs FROM trajectories WHERE index IN (0, 9) ORDER BY index"
    expected = json.loads(run(query, "--json")[1])
    for name in ("r.parquet", "r.arrow", "r.json", "r.csv", "r.txt"):
        target = tmp_path / name
        target.write_text("before")
        assert run(query, "--output", str(target)) == (0, "", "")
    assert pq.read_table(tmp_path / "r.parquet").to_pylist() == expected
    with pa.ipc.open_file(tmp_path / "r.arrow") as file:
        assert file.read_all().to_pylist() == expected
    assert json.loads((tmp_path / "r.json").read_text()) == expected
    assert (tmp_path / "r.csv").read_text().splitlines()[0] == "index,rollout_log_probs"
    assert (tmp_path / "r.txt").read_text().splitlines()[0].split() == list(expected[0])
    # --format says more than the name; of a query that fails nothing is left.
    assert run(query, "-o", str(tmp_path / "r.csv"), "--format", "json")[0] == 0
    assert json.loads((tmp_path / "r.csv").read_text()) == expected
    assert run("SELECT nothing", "-o", str(tmp_path / "r.csv"))[0] == 2
    assert json.loads((tmp_path / "r.csv").read_text()) == expected
    assert len(os.listdir(tmp_path)) == 5


def test_columns_of_one_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "r.parquet"
    assert run("SELECT 1 AS a, 2 AS a", "-o", str(target))[0] == 0
    assert pq.read_table(target).to_pylist() == [{"a": 1, "a_1": 2}]


def test_files_are_read_when_that_is_allowed(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("index,note\n4,odd\n")
    query = f"SELECT s.index, m.note FROM samples AS s JOIN '{mine}' AS m ON s.index = m.index"
    assert run(query)[0] == 2
    code, out, err = run(query, "--allow-external", "--json")
    assert code == 0, err
    assert json.loads(out) == [{"index": 4, "note": "odd"}]
    assert run(f"COPY samples TO '{tmp_path}/out'", "--allow-external")[0] == 2
    assert os.listdir(tmp_path) == ["mine.csv"]
