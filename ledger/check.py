"""Checks the four invariants by queries over what is stored, and lists every violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ledger.check_digests import RECOMPUTED
from ledger.check_rules import RULES, Rule
from ledger.reader import Reader
from ledger.session import session
from ledger.sql import ask
from ledger.views import TableSource

__all__ = ["INVARIANTS", "CheckReport", "Finding", "check_ledger"]

INVARIANTS = ("I", "II", "III", "IV", "once")
"""The four of the design, and that a sample is trained once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One violation of one invariant."""

    invariant: str
    """One of INVARIANTS."""
    kind: str
    """The event that is wrong."""
    branch: str
    seq: int
    index: int | None
    """The sample; None where the event is not about one."""
    what: str
    """What is wrong, with expected and found."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """What was checked and what was found."""

    rules: int
    """Number of rules that were applied."""
    violations: int
    """Number of all violations, also of those that are not listed."""
    findings: tuple[Finding, ...]
    unchecked: int = 0
    """Samples and rules that could not be checked: retention has retired the rows for it."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.violations == 0

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": self.ok,
            "rules": self.rules,
            "violations": self.violations,
            "unchecked": self.unchecked,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def check_ledger(
    reader: TableSource, *, invariants: Collection[str] = INVARIANTS, limit: int = 100
) -> CheckReport:
    """Apply the rules of `check_rules` and `check_digests` to what `reader` sees.

    At most `limit` violations of each rule are listed; all are counted. Raises what the reader
    raises where stored bytes are not what was committed: such bytes are not checked further. What
    only seems wrong because retention has retired the rows for it is counted, not listed.
    """
    findings: list[Finding] = []
    violations = 0
    recomputed = [find for invariant, find in RECOMPUTED if invariant in invariants]
    for find in recomputed:
        wrong = find(reader)
        violations += len(wrong)
        findings.extend(Finding(*finding) for finding in wrong[:limit])
    rules = [rule for rule in RULES if rule.invariant in invariants]
    gone = _retired(reader)
    unchecked = 0
    with session(reader) as used:
        for rule in rules:
            ranges = [one for kind in rule.needs for one in gone.get(kind, ())]
            rows = ask(used, _listing(rule, ranges), [limit]).to_pylist()
            if ranges:
                (all_,) = ask(used, f"SELECT count(*) AS n FROM ({rule.sql})")["n"].to_pylist()
                unchecked += all_ - (rows[0]["violations"] if rows else 0)
            violations += rows[0]["violations"] if rows else 0
            findings.extend(
                Finding(
                    rule.invariant, rule.kind, row["branch"], row["seq"], row["index"], row["what"]
                )
                for row in rows
            )
    return CheckReport(len(rules) + len(recomputed), violations, tuple(findings), unchecked)


def _retired(reader: TableSource) -> dict[str, list[tuple[int, int]]]:
    """Kind → ranges of samples that may have had rows which retention has retired, disjoint."""
    if not isinstance(reader, Reader):
        return {}
    found: dict[str, list[tuple[int, int]]] = {}
    for s in reader.segments():
        if s.file is None:
            found.setdefault(s.kind, []).append(s.ranges.get("index", (0, 2**63 - 1)))
    return {kind: _merged(sorted(ranges)) for kind, ranges in found.items()}


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for low, high in ranges:
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return made


def _listing(rule: Rule, gone: list[tuple[int, int]]) -> str:
    """The rule's violations in order, each with the number of all; not of samples in `gone`."""
    kept = ""
    if gone:
        rows = ", ".join(f"({low}, {high})" for low, high in gone)
        kept = (
            f"WHERE NOT EXISTS (SELECT 1 FROM (VALUES {rows}) AS g(low, high)\n"
            "                  WHERE v.index BETWEEN g.low AND g.high)\n"
        )
    return (
        f"SELECT count(*) OVER () AS violations, v.branch, v.seq, v.index, v.what\n"
        f"FROM ({rule.sql}) AS v {kept}ORDER BY v.seq, v.index LIMIT $1"
    )
