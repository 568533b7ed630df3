"""What every place for bytes promises: one suite for local folders, memory and S3.

Each test runs on all three. The S3 server answers one request at a time, so exclusivity is its own
and not luck; parts are small here, and the server takes them, so that "large" is not.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.errors import Corrupt, LedgerError, NotFound
from ledger.hashing import file_hash
from ledger.storage import LocalStore, ObjectStore
from ledger.storage.memory import MemoryStore
from ledger.storage.probe import require_exclusive_create
from ledger.storage.s3 import S3Store
from tests.servers.s3 import S3Server

PART_BYTES = 1 << 16
LARGE_BYTES = 2 * PART_BYTES + 12_345
WRITERS = 6

Open = Callable[[], ObjectStore]
"""Opens the same empty place every time."""


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "local":
        yield lambda: LocalStore(tmp_path / "ledger")
    elif request.param == "memory":
        name = f"memory://{tmp_path.name}"
        yield lambda: MemoryStore(name)
        MemoryStore.forget(name)
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        uri = f"s3://{server.bucket()}/team/ledger"
        yield lambda: S3Store(uri, server.storage_options, part_bytes=PART_BYTES)


@pytest.fixture
def store(place: Open) -> Iterator[ObjectStore]:
    opened = place()
    yield opened
    opened.close()


def test_bytes_come_back_exactly(place: Open, store: ObjectStore) -> None:
    large = os.urandom(LARGE_BYTES)
    objects = {
        "runs/r/hot/k/one.arrow": b"1",
        "runs/r/hot/k/empty": b"",
        "runs/r/hot/l/large": large,
        "runs/r/producers/a%2Fb c=ü/1.json": bytes(range(256)),
    }
    store.put(list(objects.items()))
    again = place()
    for path, data in objects.items():
        for reader in (store, again, again):
            assert reader.read(path).to_pybytes() == data
        size_bytes, modified_ns, identity = store.stamp(path)
        assert size_bytes == len(data)
        assert modified_ns > 1_500_000_000 * 10**9
        assert (size_bytes, modified_ns, identity) == again.stamp(path)
    again.close()


@pytest.mark.parametrize("cuts", [[5, 5, 5], [1, 2 * PART_BYTES, 2 * PART_BYTES + 1]])
def test_pieces_become_one_object(store: ObjectStore, cuts: list[int]) -> None:
    data = memoryview(os.urandom(LARGE_BYTES))
    bounds = [0, *cuts, len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    [staged] = store.stage([("d", pieces)])
    assert list(store.list("d")) == []
    store.publish([("d/x", staged)])
    assert store.read("d/x").to_pybytes() == bytes(data)


names = st.text("abcü-_.%=+ ~()", min_size=1).filter(
    lambda name: name not in (".", "..") and not name.startswith(".tmp-")
)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(objects=st.dictionaries(names, st.binary(max_size=50), min_size=1, max_size=6))
def test_any_names_and_bytes(store: ObjectStore, objects: dict[str, bytes]) -> None:
    folder = secrets.token_hex(8)
    named = {f"{folder}/{name}": data for name, data in objects.items()}
    store.put(list(named.items()))
    assert sorted(store.list(folder)) == sorted(named)
    assert {path: store.read(path).to_pybytes() for path in named} == named


def test_a_listing_begins_after_a_name(store: ObjectStore) -> None:
    names = ["d/1", "d/10", "d/2", "d/3-x", "d/3-~", "d/e/0"]
    store.put([(name, b"") for name in [*names, "c/9", "e/0"]])
    for after in ("d", "d/0", "d/10", "d/15", "d/3-~", "d/e/0", "z"):
        assert sorted(store.list("d", after=after)) == [name for name in names if name > after]


def test_a_name_is_given_once(store: ObjectStore) -> None:
    for name, data in [("small", b"1"), ("large", b"1" * LARGE_BYTES), ("empty", b"")]:
        store.put([(f"d/{name}", data)])
        store.put([(f"d/{name}", data)])
        for other in (b"2", b"2" * LARGE_BYTES, data + b"3"):
            with pytest.raises(Corrupt, match="taken by other bytes") as refused:
                store.put([(f"d/{name}", other)])
            assert str(refused.value).count("blake3") == 2
        assert store.read(f"d/{name}").to_pybytes() == data
    assert list(store.sweep(0)) == []


def test_small_objects_that_are_named_by_their_bytes(place: Open, store: ObjectStore) -> None:
    objects = [(f"d/{file_hash(data).hex()}", data) for data in (b"", b"1", b"2" * 1000)]
    store.put_hashed(objects)
    place().put_hashed(objects)
    assert sorted(store.list("")) == sorted(path for path, _ in objects)
    for path, data in objects:
        assert place().read(path).to_pybytes() == data
    with pytest.raises(Corrupt, match="leaves the store"):
        store.put_hashed([("../x", b"1")])


@pytest.mark.parametrize("size_bytes", [1_000, LARGE_BYTES])
def test_of_racing_writers_with_other_bytes_one_wins(place: Open, size_bytes: int) -> None:
    contents = [bytes([i]) * size_bytes for i in range(WRITERS)]
    answers = race(place, lambda store, i: store.put([("d/x", contents[i])]))
    won = [i for i, error in enumerate(answers) if error is None]
    assert len(won) == 1
    assert all(isinstance(error, Corrupt) for error in answers if error is not None)
    store = place()
    assert store.read("d/x").to_pybytes() == contents[won[0]]
    assert list(store.list("")) == ["d/x"]
    assert list(store.sweep(0)) == []


@pytest.mark.parametrize("size_bytes", [1_000, LARGE_BYTES])
def test_racing_writers_with_the_same_bytes_all_succeed(place: Open, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    assert race(place, lambda store, _: store.put([("d/x", data)])) == [None] * WRITERS
    store = place()
    assert store.read("d/x").to_pybytes() == data
    assert list(store.sweep(0)) == []


def race(place: Open, write: Callable[[ObjectStore, int], None]) -> list[LedgerError | None]:
    """What each of the writers got, that began at one moment with a store of its own."""
    start = threading.Barrier(WRITERS)

    def writer(number: int) -> LedgerError | None:
        store = place()
        start.wait()
        try:
            write(store, number)
        except LedgerError as error:
            return error
        finally:
            store.close()
        return None

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(writer, range(WRITERS)))


def test_threads_share_a_store(store: ObjectStore) -> None:
    def work(number: int) -> bytes:
        data = bytes([number]) * 1000
        store.put([(f"d/{number}", data), (f"d/{number}-b", b"b")])
        return store.read(f"d/{number}").to_pybytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(12))) == [bytes([i]) * 1000 for i in range(12)]
    assert len(list(store.list("d"))) == 24


def test_what_is_missing_is_not_found(store: ObjectStore) -> None:
    store.put([("a/b", b"1")])
    for path in ("nowhere", "a/b2", "a/b/c" if store.root is None else "b/c"):
        with pytest.raises(NotFound, match=path):
            store.read(path)
        with pytest.raises(NotFound, match=path):
            store.stamp(path)
        store.delete(path)
    assert list(store.list("nowhere")) == []


OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "a/..", "a//b", "a/./b", "a/", "", ".", "a\\..\\b",
           "a\x00b", "a\nb", ".tmp-1", "a/.tmp-1/b"]  # fmt: skip


def test_no_path_leaves_the_root(store: ObjectStore) -> None:
    for path in OUTSIDE:
        calls: list[Callable[[], object]] = [
            lambda path=path: store.put([(path, b"1")]),
            lambda path=path: store.read(path),
            lambda path=path: store.stamp(path),
            lambda path=path: store.delete(path),
        ]
        if path:
            calls.append(lambda path=path: list(store.list(path)))
            calls.append(lambda path=path: store.stage([(path, [b"1"])]))
        for call in calls:
            with pytest.raises(Corrupt, match="leaves the store"):
                call()
    assert list(store.list("")) == []


def test_a_list_has_what_lies_below_a_folder(place: Open, store: ObjectStore) -> None:
    paths = ["a/1", "a/b/2", "ab/3", "c"]
    assert list(store.list("")) == []
    store.put([(path, path.encode()) for path in paths])
    for reader in (store, place()):
        assert sorted(reader.list("")) == paths
        assert sorted(reader.list("a")) == ["a/1", "a/b/2"]
        assert sorted(reader.list("a/b")) == ["a/b/2"]
        assert list(reader.list("c")) == []


def test_what_is_deleted_is_gone_and_can_be_made_again(place: Open, store: ObjectStore) -> None:
    other = place()
    store.put([("a/1", b"1"), ("a/2", b"2")])
    assert store.read("a/1").to_pybytes() == b"1"
    store.delete("a/1")
    store.delete("a/1")
    assert list(other.list("")) == ["a/2"]
    for reader in (store, other):
        with pytest.raises(NotFound):
            reader.read("a/1")
    store.put([("a/1", b"other")])
    assert other.read("a/1").to_pybytes() == b"other"


def test_staged_bytes_show_only_when_published(store: ObjectStore) -> None:
    kept, dropped = store.stage([("d", [b"12", b"34"]), ("d", [b"5"])])
    assert list(store.list("d")) == []
    store.publish([("d/kept", kept)])
    store.discard([kept, dropped])
    assert list(store.list("")) == ["d/kept"]
    assert store.read("d/kept").to_pybytes() == b"1234"
    assert list(store.sweep(0)) == []


def test_a_publication_that_fails_leaves_whole_objects_only(store: ObjectStore) -> None:
    large = os.urandom(LARGE_BYTES)
    store.put([("d/taken", b"first")])
    objects = [("d/taken", b"second"), ("d/large", large), ("d/small", b"3")]
    with pytest.raises(Corrupt):
        store.put(objects)
    expected = dict(objects) | {"d/taken": b"first"}
    for path in store.list(""):
        assert store.read(path).to_pybytes() == expected[path]
    assert list(store.sweep(0)) == []
    store.put(objects[1:])
    assert {path: store.read(path).to_pybytes() for path in expected} == expected


def test_a_leftover_becomes_young_when_it_is_written_again(
    place: Open, store: ObjectStore, age: Callable[[ObjectStore, str], None]
) -> None:
    """Else a sweep takes what a slow writer found there, and is about to refer to."""
    large = os.urandom(LARGE_BYTES)
    store.put([("d/x", b"1"), ("d/large", large)])
    for path, data in [("d/x", b"1"), ("d/large", large)]:
        age(store, path)
        before = store.stamp(path)
        place().put([(path, data)])
        after = place().stamp(path)
        assert after.modified_ns > before.modified_ns
        assert after.size_bytes == before.size_bytes
        assert place().read(path).to_pybytes() == data


@pytest.fixture
def age(request: pytest.FixtureRequest, place: Open) -> Callable[[ObjectStore, str], None]:
    """Makes an object older than it is, or has time pass."""

    def older(store: ObjectStore, path: str) -> None:
        if store.root is not None:
            os.utime(store.root / path, ns=(10**18, 10**18))
        elif isinstance(store, S3Store):
            server: S3Server = request.getfixturevalue("s3_server")
            server.age(store.uri.removeprefix("s3://") + "/" + path)

    return older


def test_the_place_is_asked_whether_names_are_given_once(store: ObjectStore) -> None:
    require_exclusive_create(store)
    assert list(store.list("")) == []


def test_a_closed_store_can_be_used_again(store: ObjectStore) -> None:
    store.put([("x", b"1")])
    store.close()
    assert store.read("x").to_pybytes() == b"1"
    store.close()
    store.put([("y", b"2")])
    assert sorted(store.list("")) == ["x", "y"]
