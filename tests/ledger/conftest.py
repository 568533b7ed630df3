"""What the tests of reading share: one stored story, and the same as tables in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger import Ledger
from tests.ledger.factory import MemoryReader, story_tables, write_story


@pytest.fixture(scope="session")
def story_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A stored ledger with the story of the factory. Nobody may write to it."""
    with write_story(tmp_path_factory.mktemp("story") / "ledger") as ledger:
        yield ledger


@pytest.fixture
def story_path(story_ledger: Ledger) -> Path:
    return story_ledger.root


@pytest.fixture
def everything() -> MemoryReader:
    """The story on all branches, in memory."""
    return MemoryReader(story_tables())
