"""Every kind of place that a ledger can be in, for tests that must pass in all of them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ledger import Ledger, open_ledger

PLACES = ("local+sqlite", "memory+sqlite", "s3+sqlite", "local+postgres", "s3+postgres")
"""Store and catalog."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnyPlace:
    """Where a ledger is, and how it is opened."""

    name: str
    """One of PLACES."""
    uri: str
    catalog: str | None
    storage_options: Mapping[str, Any] | None

    def open(self, **options: Any) -> Ledger:
        """Open the ledger there; `options` are those of `open_ledger`."""
        given = {"catalog": self.catalog, "storage_options": self.storage_options} | options
        return open_ledger(self.uri, **given)


def make_place(name: str, fixture: Callable[[str], Any], folder: Path) -> AnyPlace:
    """A new place of the kind `name`. `fixture` gives a fixture's value by its name."""
    store, _, kind = name.partition("+")
    uri, options, catalog = str(folder / "ledger"), None, None
    if store == "memory":
        uri = f"memory://{secrets.token_hex(6)}"
    if store == "s3":
        server = fixture("s3_server")
        uri, options = f"s3://{server.bucket()}/ledger", server.storage_options
        catalog = f"sqlite:///{folder / 'catalog.sqlite'}"
    if kind == "postgres":
        catalog = fixture("postgres_url")
    return AnyPlace(name, uri, catalog, options)
