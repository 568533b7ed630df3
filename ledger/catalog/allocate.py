"""Giving out numbers that nobody else gets: samples, groups, weight versions."""

from __future__ import annotations

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.commit import lock_run, raise_counter
from ledger.errors import Conflict, InvalidArgument, explain

__all__ = ["allocate"]

_COUNTER = {"group": "group_index", "rollout": "rollout_id"}
"""Short names of counters that columns use under a longer one."""

# Built once, as those of a commit.
_GIVEN = sa.select(t.allocations.c.first, t.allocations.c.count).where(
    t.allocations.c.run_id == sa.bindparam("of_run"),
    t.allocations.c.name == sa.bindparam("of_name"),
    t.allocations.c.key == sa.bindparam("of_key"),
)
_GIVE = t.allocations.insert()


def allocate(connection: sa.Connection, run_id: str, name: str, key: str, count: int) -> int:
    """The first of `count` consecutive numbers, from 0, unique in the run under `name`.

    Asking again with the same key gives the same numbers. They lie above all that events
    use.

    Raises:
        InvalidArgument: `count` below 1.
        Conflict: the key was asked for with another count.
        NotFound: no such run.
    """
    if count < 1:
        raise InvalidArgument(
            explain(
                "numbers were not given out", on=name, expected="a count of 1 or more", found=count
            )
        )
    name = _COUNTER.get(name, name)
    lock_run(connection, run_id)
    given = connection.execute(_GIVEN, {"of_run": run_id, "of_name": name, "of_key": key}).first()
    if given is not None:
        first, had = int(given[0]), int(given[1])
        if had != count:
            raise Conflict(
                explain(
                    "numbers were not given out: the key was used with another count",
                    on=f"run {run_id!r}, {name}, key {key!r}",
                    expected=had,
                    found=count,
                )
            )
        return first
    first = raise_counter(connection, run_id, name, 0)
    raise_counter(connection, run_id, name, first + count)
    connection.execute(
        _GIVE, {"run_id": run_id, "name": name, "key": key, "first": first, "count": count}
    )
    return first
