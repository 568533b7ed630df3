"""The command `ledger`, as a person and as a script use it."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledger.cli import FAILED, main
from ledger.commands.common import FOUND
from ledger.views import view_names

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(
    story_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """`run("log", …)` gives exit code, standard output and standard error."""
    monkeypatch.setenv("LEDGER_URI", str(story_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_init_makes_a_ledger_once_and_again(tmp_path: Path, run: Run) -> None:
    for _ in range(2):
        code, out, _ = run("init", "--ledger", str(tmp_path / "new"))
        assert code == 0
        assert str(tmp_path / "new") in out
    code, out, _ = run("init", str(tmp_path / "other"), "--json")
    assert json.loads(out) == {"uri": (tmp_path / "other").as_uri(), "runs": 0}
    code, out, _ = run("runs", "--ledger", str(tmp_path / "new"), "--json")
    assert (code, json.loads(out)) == (0, [])


def test_runs(run: Run) -> None:
    code, out, _ = run("runs")
    assert code == 0
    assert "main@1" in out
    (found,) = json.loads(run("runs", "--json")[1])
    assert found["run_id"] == "run"
    assert found["events"] == 102
    assert [(b["name"], b["fork_version"], b["versions"]) for b in found["branches"]] == [
        ("main", None, 3),
        ("rloo", 1, 1),
    ]


def test_log(run: Run) -> None:
    code, out, _ = run("log")
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "● 3",
        "│ ● 2",
        "├─╯",
        "● 1",
        "● 0",
    ]
    assert "(rloo)" in out.splitlines()[0]
    assert run("log", "--ascii")[1].isascii()
    found = json.loads(run("log", "--json", "--branch", "main")[1])
    assert [entry["weight_version"] for entry in found] == [2, 1, 0]
    assert found[0]["head_of"] == "main"
    assert len(json.loads(run("log", "--json", "-n", "1")[1])) == 1


def test_a_point_in_time(run: Run) -> None:
    found = json.loads(run("log", "--json", "--as-of", "50")[1])
    assert [entry["weight_version"] for entry in found] == [0]
    code, _, err = run("log", "--as-of", "100000")
    assert code == FAILED
    assert "0 to 102" in err


def test_show(run: Run) -> None:
    code, out, _ = run("show", "9")
    assert code == 0
    assert "rollout 8" in out
    found = json.loads(run("show", "1", "--json")[1])
    assert [t["rollout_log_prob"] for t in found["tokens"]][3:] == [-0.0, "-inf", "nan"]
    code, out, err = run("show", "99")
    assert (code, out) == (FAILED, "")
    assert "samples 0 to 19" in err


def test_sql_formats(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "SELECT index, reward, response_text FROM samples WHERE index IN (0, 19) ORDER BY index"
    code, out, _ = run("sql", query)
    assert code == 0
    assert out.splitlines() == [
        "index  reward  response_text",
        "    0     1.0  response 0",
        "   19    NULL  NULL",
        "(2 rows)",
    ]
    rows = list(csv.reader(io.StringIO(run("sql", query, "--format", "csv")[1])))
    assert rows == [
        ["index", "reward", "response_text"],
        ["0", "1.0", "response 0"],
        ["19", "", ""],
    ]
    expected = [
        {"index": 0, "reward": 1.0, "response_text": "response 0"},
        {"index": 19, "reward": None, "response_text": None},
    ]
    assert json.loads(run("sql", query, "--json")[1]) == expected
    for name, read in (
        ("parquet", lambda b: pq.read_table(pa.BufferReader(b))),
        ("arrow", lambda b: pa.ipc.open_file(b).read_all()),
    ):
        assert (
            read(binary_output(monkeypatch, "sql", query, "--format", name)).to_pylist() == expected
        )


def binary_output(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> bytes:
    raw = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
        assert main(arguments) == 0
        sys.stdout.flush()
        return raw.getvalue()


def test_the_query_may_come_from_a_file_or_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "query.sql"
    file.write_text("SELECT count(*) AS n FROM samples", encoding="utf-8")
    assert json.loads(run("sql", "--file", str(file), "--json")[1]) == [{"n": 20}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("SELECT 1 AS one"))
    assert json.loads(run("sql", "-", "--json")[1]) == [{"one": 1}]


def test_parameters(run: Run) -> None:
    query = "SELECT count(*) AS n FROM samples WHERE decision = $d AND index < $i"
    out = run("sql", query, "--param", "d=kept", "--param", "i=3", "--json")[1]
    assert json.loads(out) == [{"n": 3}]
    out = run("sql", "SELECT $1 AS a, $2 AS b", "--param", "x", "--param", "2.5", "--json")[1]
    assert json.loads(out) == [{"a": "x", "b": 2.5}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sql", "SELECT * FROM nothing"), "trajectories"),
        (("sql", "DROP VIEW samples"), "only reads"),
        (("sql",), "--file"),
        (("sql", "SELECT 1", "--file", "x"), "several"),
        (("sql", "--file", "/does/not/exist.sql"), "No such file"),
        (("sql", "SELECT 1", "--json", "--format", "csv"), "one of them"),
        (("sql", "SELECT $a", "--param", "a=1", "--param", "2"), "all with a name"),
        (("sql", "SELECT 1", "--memory-limit", "much"), "500MB"),
        (("log", "--branch", "nothing"), "rloo"),
        (("log", "--run", "nothing"), "run"),
        (("log", "--ledger", "/does/not/exist"), "ledger init"),
        (("log", "--ledger", "ftp://host/x"), "not known"),
        (("views", "nothing"), "trajectories"),
        (("digest", "--branch", "nothing"), "rloo"),
    ],
)
def test_an_error_is_one_explanation_on_standard_error(
    run: Run, arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (FAILED, "")
    assert err.startswith(f"ledger {arguments[0]}: ")
    assert says in err
    assert "Traceback" not in err


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("nothing")[0] == 2
    assert run()[0] == 2
    assert run("--help")[0] == 0


def test_views_lists_all_and_describes_one(run: Run) -> None:
    code, out, _ = run("views")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(view_names())
    code, out, _ = run("views", "samples")
    assert "What the estimator gets" in out
    assert run("sql", "--describe", "samples")[1] == out
    assert json.loads(run("views", "trajectories", "--json")[1])["columns"]["tokens"].startswith(
        "[T]"
    )


def test_check_and_verify_of_a_sound_ledger(run: Run) -> None:
    code, out, _ = run("check")
    assert code == 0
    assert "0 violations" in out
    assert json.loads(run("check", "--json", "--invariant", "II")[1])["ok"] is True
    code, out, _ = run("verify")
    assert code == 0
    assert "102 events" in out
    assert "3 checkpoints: all as committed" in out
    assert json.loads(run("verify", "--json")[1])["findings"] == []
    code, out, _ = run("verify", "--no-checkpoints")
    assert code == 0
    assert "no checkpoint compared" in out
    assert json.loads(run("verify", "--no-checkpoints", "--json")[1])["checkpoints"] is None


def test_check_finds_a_violation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ledger import check
    from ledger.check_rules import Rule

    wrong = Rule(
        "I",
        "run_started",
        "SELECT branch, seq, NULL::BIGINT AS index, 'bad' AS what FROM run_started",
    )
    monkeypatch.setattr(check, "RULES", (wrong,))
    code, out, _ = run("check", "--invariant", "I")
    assert code == FOUND
    assert "invariant I: run_started seq 1 on main: bad" in out
    code, out, _ = run("check", "--json")
    assert (code, json.loads(out)["violations"]) == (FOUND, 1)


def test_verify_finds_a_flipped_bit_and_nothing_is_read_from_it(run: Run, tmp_path: Path) -> None:
    from tests.ledger.factory import write_story

    with write_story(tmp_path / "own") as ledger:
        segments = ledger.reader("run", None).segments("sample_scored")
        assert segments[0].file is not None
        file = ledger.root / segments[0].file.path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    where = ("--ledger", str(tmp_path / "own"))
    code, out, _ = run("verify", *where)
    assert code == FOUND
    assert file.name in out
    code, out, err = run("sql", "SELECT avg(reward) FROM rewards", *where)
    assert (code, out) == (FAILED, "")
    assert file.name in err
    assert run("sql", "SELECT count(*) FROM prompts", *where)[0] == 0


def test_digest(run: Run) -> None:
    found: dict[str, Any] = json.loads(run("digest", "--json")[1])
    assert found["head_seq"] == 102
    assert len(found["content"]) == len(found["chain"]) == 64
    other = json.loads(run("digest", "--branch", "rloo", "--json")[1])
    assert other["chain"] == found["chain"]
    assert other["content"] != found["content"]
    assert found["content"] in run("digest")[1]


def test_a_closed_pipe_is_no_error(story_path: Path) -> None:
    command = f"{sys.executable} -m ledger.cli sql 'SELECT * FROM tokens' | head -n 1"
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, "LEDGER_URI": str(story_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("run_id")
    assert done.stderr == ""
