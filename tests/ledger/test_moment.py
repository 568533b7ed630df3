"""Points in time: a number, a weight version, a time of day; and that all readers take them."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from ledger import Ledger
from ledger.catalog import tables as t
from ledger.cli import main
from ledger.errors import InvalidArgument, NotFound
from ledger.moment import Moment, parse_moment, sequence_at
from tests.ledger.factory import RUN, write_story

UTC = datetime.UTC


@pytest.mark.parametrize(
    ("moment", "meaning"),
    [
        (42, ("seq", 42)),
        ("42", ("seq", 42)),
        (" 0 ", ("seq", 0)),
        ("v7", ("version", 7)),
        ("V7", ("version", 7)),
        ("version:7", ("version", 7)),
        ("1970-01-01T00:00:01Z", ("time", 1_000_000)),
        ("1970-01-01T01:00:00.000001+01:00", ("time", 1)),
        ("1969-12-31T23:59:59Z", ("time", -1_000_000)),
        ("20261130T120000Z", ("time", 1_796_040_000_000_000)),
        (datetime.datetime(1970, 1, 2, tzinfo=UTC), ("time", 86_400_000_000)),
    ],
)
def test_what_a_moment_means(moment: Moment, meaning: tuple[str, int]) -> None:
    assert parse_moment(moment) == meaning


@pytest.mark.parametrize(
    "moment",
    [
        *("", "now", "-1", "1.5", "v", "v-1", "version 7", "7v", "²", "2026-13-01T00:00Z", "12:00"),
        *(-1, 2**63, True, 1.0, None),
    ],
)
def test_what_means_nothing_is_refused(moment: Moment) -> None:
    with pytest.raises(InvalidArgument, match="a weight version"):
        parse_moment(moment)


@pytest.mark.parametrize(
    "moment", ["2026-11-30", "2026-11-30T12:00:00", datetime.datetime(2026, 11, 30)]
)
def test_a_time_without_zone_is_refused(moment: Moment) -> None:
    with pytest.raises(InvalidArgument, match="no zone"):
        parse_moment(moment)


@pytest.fixture
def timed(tmp_path: Path) -> Ledger:
    """The story, its commits one second apart from 1970-01-01T00:00:01Z on."""
    ledger = write_story(tmp_path / "ledger")
    with ledger.catalog.write() as connection:
        firsts = connection.execute(sa.select(t.commits.c.first_seq).order_by("first_seq")).all()
        for number, (first,) in enumerate(firsts, start=1):
            connection.execute(
                t.commits.update()
                .where(t.commits.c.first_seq == first)
                .values(committed_at=number * 1_000_000)
            )
    return ledger


def test_each_kind_of_moment_finds_the_state_that_was(timed: Ledger) -> None:
    with timed as ledger:
        head = ledger.run(RUN).head_seq
        # Commit 1 is run_started, commit 2 version 0 with its checkpoint: events 1 to 3.
        assert sequence_at(ledger, RUN, "v0") == 3
        for moment in ("v0", 3, "3", "1970-01-01T00:00:02Z", "1970-01-01T00:00:02.9Z"):
            reader = ledger.reader(RUN, None, as_of=moment)
            assert reader.sql("SELECT max(seq) AS s FROM events")["s"].to_pylist() == [3]
            found = ledger.sql("SELECT max(seq) AS s FROM events", as_of=moment)
            assert found["s"].to_pylist() == [3], moment
        assert ledger.reader(RUN, as_of="1970-01-01T00:00:00Z").head_seq == 0
        assert ledger.sql("SELECT 1 AS one FROM events", as_of=0).rows() == []
        assert ledger.reader(RUN, as_of=datetime.datetime(9999, 1, 1, tzinfo=UTC)).head_seq == head
        # In the very commit that published version 1, it is not there yet; then it is.
        seen = ledger.sql("SELECT max(weight_version) AS v FROM versions", as_of="v1")
        assert seen["v"].to_pylist() == [1]
        before = sequence_at(ledger, RUN, "v1") - 1
        seen = ledger.sql("SELECT max(weight_version) AS v FROM versions", as_of=before)
        assert seen["v"].to_pylist() == [0]
        # A version of a branch, seen from the branch and from all.
        assert ledger.reader(RUN, "rloo", as_of="v3").head_seq == head
        on_main = ledger.sql("SELECT max(weight_version) AS v FROM versions", branch="main")
        assert on_main["v"].to_pylist() == [2]
        with pytest.raises(NotFound, match="version 9"):
            ledger.reader(RUN, as_of="v9")
        with pytest.raises(NotFound, match=f"0 to {head}"):
            ledger.reader(RUN, as_of=head + 1)
        with pytest.raises(NotFound, match="no-such-run"):
            ledger.reader("no-such-run", as_of="1970-01-01T00:00:02Z")


def test_the_command_line_takes_them_all(timed: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--ledger", str(timed.root), "--format", "csv"]
    timed.close()
    for moment in ("3", "v0", "version:0", "1970-01-01T00:00:02Z"):
        assert main(["sql", "SELECT max(seq) AS s FROM events", "--as-of", moment, *where]) == 0
        assert capsys.readouterr().out == "s\n3\n"
    assert main(["sql", "SELECT 1", "--as-of", "v9", *where]) == 2
    assert "0 to 3" in capsys.readouterr().err
