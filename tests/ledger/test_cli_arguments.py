"""Numbers on the command line of `ledger` that cannot work: refused before a ledger is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.cli import main
from ledger.errors import NotFound
from ledger.opening import open_ledger


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--limit", "-1"], "--limit: expected a whole number, at least 0, found '-1'"),
        (["check", "--limit", "many"], "at least 0, found 'many'"),
        (["check", "--limit", str(2**63)], "at least 0"),
        (["log", "--limit", "-1"], "--limit/-n: expected a whole number, at least 1, found '-1'"),
        (["log", "-n", "0"], "at least 1, found '0'"),
        (["log", "--as-of", "-1"], "--as-of: a point in time was not understood: '-1'"),
        (["sql", "select 1", "--as-of", "2026-11-30"], "expected: a time with its zone"),
        (["show", "1.5"], "INDEX: expected a whole number"),
        (["sql", "select 1", "--timeout", "-1"], "--timeout: expected seconds"),
        (["sql", "select 1", "--timeout", "0"], "a number above 0, found '0'"),
        (["sql", "select 1", "--timeout", "nan"], "a number above 0, found 'nan'"),
        (["sql", "select 1", "--timeout", "inf"], "a number above 0, found 'inf'"),
        (["sql", "select 1", "--timeout", "1e300"], "a number above 0, found '1e300'"),
        (["sql", "select 1", "--timeout", "soon"], "a number above 0, found 'soon'"),
    ],
)
def test_numbers_that_cannot_work(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--ledger", str(tmp_path / "none")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_which_run_is_said_with_the_flags_of_every_command(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("a")
        ledger.create_run("b")
        with pytest.raises(NotFound, match=r"--run \(in ledger-train: --run-id\)"):
            ledger.run(None)
