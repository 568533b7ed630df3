"""A catalog on a real PostgreSQL server."""

from __future__ import annotations

from pathlib import Path

from ledger import open_ledger
from ledger.verify import verify_ledger


def test_it_opens(tmp_path: Path, postgres_url: str) -> None:
    with open_ledger(tmp_path / "l", create=True, catalog=postgres_url) as ledger:
        ledger.create_run("r")
    with open_ledger(tmp_path / "l", catalog=postgres_url) as ledger:
        assert verify_ledger(ledger).ok
