"""A point in time of a run, as a person names it: a number, a weight version, or a time of day.

42                      after the event with this number
v7, version:7           right after version 7 was published
2026-11-30T12:00:00Z    after the last commit at or before this time
"""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, NoReturn

from ledger.errors import InvalidArgument, NotFound, explain

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Moment", "parse_moment", "sequence_at"]

Moment = int | str | datetime.datetime
"""What names a point in time; see the module."""

_SEQ = re.compile(r"\d+", re.ASCII)
_VERSION = re.compile(r"(?:v|version:)(\d+)", re.ASCII | re.IGNORECASE)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_LARGEST = 2**63 - 1


def parse_moment(moment: Moment) -> tuple[str, int]:
    """What `moment` means: ('seq', number), ('version', number) or ('time', µs since 1970 UTC).

    Raises InvalidArgument where it means nothing, or a time without a zone: the same words would
    mean other moments on other machines.
    """
    if isinstance(moment, datetime.datetime):
        return "time", _microseconds(moment, str(moment))
    if isinstance(moment, int) and not isinstance(moment, bool):
        return "seq", _number(moment, moment)
    if not isinstance(moment, str):
        _refuse(moment)
    text = moment.strip()
    if _SEQ.fullmatch(text):
        return "seq", _number(int(text), moment)
    version = _VERSION.fullmatch(text)
    if version is not None:
        return "version", _number(int(version.group(1)), moment)
    try:
        parsed = datetime.datetime.fromisoformat(text)
    except ValueError:
        _refuse(moment)
    return "time", _microseconds(parsed, text)


def sequence_at(ledger: Ledger, run_id: str, moment: Moment) -> int:
    """The number of the last event that the run had at `moment`.

    A version means the whole commit that published it. Before the first commit it is 0; a time to
    come means now.

    Raises:
        InvalidArgument: see `parse_moment`.
        NotFound: no such run; a number above its head; a version that was not published.
    """
    what, value = parse_moment(moment)
    if what == "seq":
        head = ledger.run(run_id).head_seq
        if value > head:
            raise NotFound(
                explain(
                    "a point in time was not found",
                    on=f"run {run_id!r}, seq {value}",
                    expected=f"0 to {head}",
                )
            )
        return value

    from ledger.catalog.moments import last_seq_at, last_seq_of_commit

    if what == "version":
        seq = ledger.version(run_id, value).seq
        with ledger.catalog.read() as connection:
            return last_seq_of_commit(connection, run_id, seq)
    ledger.run(run_id)
    with ledger.catalog.read() as connection:
        return last_seq_at(connection, run_id, value)


def _number(value: int, given: object) -> int:
    if not 0 <= value <= _LARGEST:
        _refuse(given)
    return value


def _microseconds(time: datetime.datetime, given: str) -> int:
    if time.tzinfo is None:
        raise InvalidArgument(
            explain(
                "a point in time was not understood",
                on=given,
                expected="a time with its zone, such as 2026-11-30T12:00:00Z or …+01:00",
                found="no zone: on another machine it would be another moment",
            )
        )
    return (time - _EPOCH) // datetime.timedelta(microseconds=1)


def _refuse(given: object) -> NoReturn:
    raise InvalidArgument(
        explain(
            "a point in time was not understood",
            on=repr(given),
            expected="a sequence number (42), a weight version (v7 or version:7), or a time "
            "(2026-11-30T12:00:00Z)",
        )
    )
