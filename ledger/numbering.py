"""Numbers that are unique in a run, and on one branch depend on that branch alone.

Samples, groups and weight versions carry integers that no two branches of a run share. They are
not given out by a counter of the run: then what a branch gets, and with it its seeds, would depend
on what others do at the same time. Instead branch number b (0 for the run's first branch, then in
the order in which branches were forked) owns the numbers from b × span on, and counts in them from
where it left its parent. So the first branch has 0, 1, 2, …; and a fork with unchanged settings
gives its samples the same *local* numbers, and so the same seeds, as the branch that it left.
"""

from __future__ import annotations

from ledger.errors import InvalidArgument, explain

__all__ = ["SAMPLE_SPAN", "VERSION_SPAN", "local_number", "run_number"]

SAMPLE_SPAN = 10**12
"""Samples, and groups, that a branch can number."""

VERSION_SPAN = 10**6
"""Weight versions that a branch can number."""


def run_number(branch_number: int, local: int, span: int) -> int:
    """The number in the run of the branch's `local` number.

    Raises InvalidArgument where the branch has used up its numbers.
    """
    if not 0 <= local < span or branch_number < 0:
        raise InvalidArgument(
            explain(
                "numbering on a branch",
                on=f"branch number {branch_number}",
                expected=f"a local number below {span}",
                found=local,
                do="fork a branch, which has numbers of its own",
            )
        )
    return branch_number * span + local


def local_number(number: int, span: int) -> int:
    """The local number of a number in the run."""
    return number % span
