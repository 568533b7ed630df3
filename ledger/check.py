"""Checks the four invariants by queries over what is stored, and lists every violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ledger.check_digests import RECOMPUTED
from ledger.check_rules import RULES, Rule
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
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def check_ledger(
    reader: TableSource, *, invariants: Collection[str] = INVARIANTS, limit: int = 100
) -> CheckReport:
    """Apply the rules of `check_rules` and `check_digests` to what `reader` sees.

    At most `limit` violations of each rule are listed; all are counted. Raises what the reader
    raises where stored bytes are not what was committed: such bytes are not checked further.
    """
    findings: list[Finding] = []
    violations = 0
    recomputed = [find for invariant, find in RECOMPUTED if invariant in invariants]
    for find in recomputed:
        wrong = find(reader)
        violations += len(wrong)
        findings.extend(Finding(*finding) for finding in wrong[:limit])
    rules = [rule for rule in RULES if rule.invariant in invariants]
    with session(reader) as used:
        for rule in rules:
            rows = ask(used, _listing(rule), [limit]).to_pylist()
            violations += rows[0]["violations"] if rows else 0
            findings.extend(
                Finding(
                    rule.invariant, rule.kind, row["branch"], row["seq"], row["index"], row["what"]
                )
                for row in rows
            )
    return CheckReport(len(rules) + len(recomputed), violations, tuple(findings))


def _listing(rule: Rule) -> str:
    """The rule's violations in order, each with the number of all."""
    return (
        f"SELECT count(*) OVER () AS violations, v.branch, v.seq, v.index, v.what\n"
        f"FROM ({rule.sql}) AS v ORDER BY v.seq, v.index LIMIT $1"
    )
