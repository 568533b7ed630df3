"""Folders that appear whole or not at all, and remember what they were made from."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ledger.errors import AlreadyExists, explain

__all__ = ["RECIPE_FILE", "already_made", "new_folder"]

RECIPE_FILE = "made_from.json"


def already_made(target: Path, recipe: Mapping[str, Any], *, what: str) -> bool:
    """Whether `target` was made from exactly `recipe`; False where nothing is there yet.

    Raises:
        AlreadyExists: the folder holds something else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    made = target / RECIPE_FILE
    found = json.loads(made.read_text()) if made.is_file() else None
    if found == json.loads(json.dumps(recipe)):
        return True
    if found is None:
        difference = "files that were not made here"
    else:
        names = sorted(k for k in recipe.keys() | found.keys() if recipe.get(k) != found.get(k))
        difference = "one made with another " + ", ".join(
            f"{name} ({found.get(name)!r} instead of {recipe.get(name)!r})" for name in names
        )
    raise AlreadyExists(
        explain(
            what,
            on=str(target),
            expected="no such folder, or one made with the same settings and versions",
            found=difference,
            do="remove the folder or name another one",
        )
    )


@contextmanager
def new_folder(target: Path, recipe: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target`, with `recipe` in it, on success.

    On any exception it is removed and `target` is as before.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        (temporary / RECIPE_FILE).write_text(json.dumps(recipe, indent=1, sort_keys=True) + "\n")
        if target.is_dir():
            target.rmdir()  # empty: `already_made` has looked
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
