"""What the tests of reading share: one stored story, and the same as tables in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger import Ledger
from tests.ledger.factory import MemoryReader, story_tables, write_story
from tests.ledger.places import PLACES, AnyPlace, make_place
from tests.servers.postgres import PostgresServer
from tests.servers.postgres import postgres_server as start_postgres_server
from tests.servers.s3 import S3Server
from tests.servers.s3 import s3_server as start_s3_server


@pytest.fixture(scope="session")
def story_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A stored ledger with the story of the factory. Nobody may write to it."""
    with write_story(tmp_path_factory.mktemp("story") / "ledger") as ledger:
        yield ledger


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A new folder, in memory where the machine has such a place: it is as good against kills."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def story_path(story_ledger: Ledger) -> Path:
    return story_ledger.root


@pytest.fixture
def everything() -> MemoryReader:
    """The story on all branches, in memory."""
    return MemoryReader(story_tables())


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server for the whole session; ask it for a bucket of your own."""
    with start_s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole session; ask it for a schema of your own."""
    with start_postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The address of a new, empty schema of its own."""
    return postgres_server.schema()


@pytest.fixture(params=PLACES)
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPlace:
    """A new place for a ledger, of every kind of store and catalog in turn."""
    return make_place(request.param, request.getfixturevalue, tmp_path)
