"""What is S3's own: answers on a bad day, uploads in parts, requests, credentials, memory."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import (
    Corrupt,
    InvalidArgument,
    LedgerError,
    MissingDependency,
    NotFound,
    StorageFailed,
)
from ledger.storage import open_store
from ledger.storage.probe import require_exclusive_create
from ledger.storage.s3 import S3Store
from tests.servers.s3 import S3Server

PART_BYTES = 1 << 16
LARGE = bytes(range(256)) * 1000  # four parts
SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.bucket()


@pytest.fixture
def store(s3_server: S3Server, bucket: str) -> Iterator[S3Store]:
    opened = S3Store(f"s3://{bucket}/l", s3_server.storage_options, part_bytes=PART_BYTES)
    yield opened
    opened.close()


def requests(server: S3Server, bucket: str) -> list[str]:
    return [f"{a.method} {a.path.removeprefix(f'/{bucket}')}" for a in server.asked(bucket)]


def test_what_it_costs_in_requests(s3_server: S3Server, bucket: str, store: S3Store) -> None:
    s3_server.asked(bucket)
    store.put([("d/x", b"1"), ("d/y", b"2")])
    assert sorted(requests(s3_server, bucket)) == ["PUT /l/d/x", "PUT /l/d/y"]
    assert store.read("d/x").to_pybytes() == b"1"
    assert requests(s3_server, bucket) == ["GET /l/d/x"]
    store.stamp("d/x")
    store.read("d/x")
    assert requests(s3_server, bucket) == ["HEAD /l/d/x"]
    store.put([("d/z", LARGE)])
    assert len(requests(s3_server, bucket)) == 6  # begun, four parts, completed
    store.read("d/z")
    assert len(requests(s3_server, bucket)) == 4
    assert list(store.list("d")) == ["d/x", "d/y", "d/z"]
    assert requests(s3_server, bucket) == ["GET "]


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("status", "code", "done"),
    [
        (409, "ConditionalRequestConflict", False),
        (500, "InternalError", True),
        (503, "SlowDown", False),
        (412, "PreconditionFailed", True),
    ],
)
def test_a_creation_survives_races_and_lost_acknowledgements(
    s3_server: S3Server, store: S3Store, data: bytes, status: int, code: str, done: bool
) -> None:
    method, query = ("PUT", "") if data == b"small" else ("POST", "uploadId=")
    s3_server.fail(method, "/l/d/x", status=status, code=code, query=query, done=done)
    store.put([("d/x", data)])
    assert store.read("d/x").to_pybytes() == data
    assert store.sweep(0) == []


def test_an_upload_that_is_gone_is_begun_again(s3_server: S3Server, store: S3Store) -> None:
    s3_server.fail("POST", "/l/d/x", status=404, code="NoSuchUpload", query="uploadId=")
    store.put([("d/x", LARGE)])
    assert store.read("d/x").to_pybytes() == LARGE


def test_races_do_not_go_on_for_ever(
    s3_server: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledger.storage.s3_objects._FIRST_WAIT_S", 1e-4)
    s3_server.fail("PUT", "/l/d/x", status=409, code="ConditionalRequestConflict", times=8)
    with pytest.raises(StorageFailed, match="8 attempts were overtaken"):
        store.put([("d/x", b"1")])
    assert list(store.list("")) == []
    store.put([("d/x", b"1")])


def test_an_upload_that_fails_shows_nothing_and_is_swept(
    s3_server: S3Server, bucket: str, store: S3Store
) -> None:
    part = {"status": 403, "code": "AccessDenied", "query": "partNumber=3"}
    s3_server.fail("PUT", "/l/d/x", **part)  # type: ignore[arg-type]
    with pytest.raises(StorageFailed, match="AccessDenied"):
        store.put([("d/x", LARGE)])
    assert list(store.list("")) == []
    assert store.sweep(0) == []

    # As a killed writer leaves it: nobody aborts the upload.
    s3_server.fail("PUT", "/l/d/x", **part)  # type: ignore[arg-type]
    s3_server.fail("DELETE", "/l/d/x", status=403, code="AccessDenied")
    with pytest.raises(StorageFailed, match="AccessDenied"):
        store.put([("d/x", LARGE)])
    other = S3Store(f"s3://{bucket}/l2", s3_server.storage_options)
    assert other.sweep(0) == []
    assert store.sweep(3600) == []
    [orphan] = store.sweep(0, dry_run=True)
    assert orphan.startswith("d/x (")
    assert store.sweep(0) == [orphan]
    assert store.sweep(0) == []
    assert list(store.list("")) == []
    store.put([("d/x", LARGE)])


def test_names_come_a_page_at_a_time(s3_server: S3Server, bucket: str) -> None:
    store = S3Store(f"s3://{bucket}/l", s3_server.storage_options, page=2)
    names = [f"d/{i}" for i in range(5)]
    store.put([(name, b"1") for name in names])
    s3_server.asked(bucket)
    assert list(store.list("d")) == names
    assert len(s3_server.asked(bucket)) == 3


def test_others_objects_are_seen_at_once(s3_server: S3Server, bucket: str, store: S3Store) -> None:
    assert list(store.list("d")) == []
    other = open_store(f"s3://{bucket}/l", s3_server.storage_options)
    for name in ("1", "2"):
        other.put([(f"d/{name}", b"1")])
        assert f"d/{name}" in list(store.list("d"))
    with pytest.raises(NotFound):
        store.stamp("d/3")
    other.put([("d/3", b"3")])
    assert store.stamp("d/3").size_bytes == 1


def test_what_is_kept_in_memory_is_bounded_and_never_stale(
    s3_server: S3Server, bucket: str, store: S3Store
) -> None:
    small = S3Store(
        f"s3://{bucket}/l", s3_server.storage_options, part_bytes=PART_BYTES, cache_bytes=1000
    )
    store.put([(f"d/{i}", bytes([i]) * 300) for i in range(6)] + [("d/large", LARGE)])
    for i in range(6):
        assert small.read(f"d/{i}").to_pybytes() == bytes([i]) * 300
        small.read("d/large")
        assert small.cached_bytes <= 1000
    assert small.cached_bytes == 900
    s3_server.asked(bucket)
    small.read("d/5")
    assert requests(s3_server, bucket) == []
    # No object changes; if one does, the stamp tells, and the next read gives what is there.
    store.delete("d/5")
    store.put([("d/5", b"changed")])
    small.stamp("d/5")
    assert small.read("d/5").to_pybytes() == b"changed"
    store.delete("d/5")
    with pytest.raises(NotFound):
        small.stamp("d/5")
    with pytest.raises(NotFound):
        small.read("d/5")


# Newer Pythons warn about forks of processes with threads. The child here starts its own.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_connects_anew(s3_server: S3Server, store: S3Store) -> None:
    store.put([("x", b"1")])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put([("y", store.read("x").to_pybytes() + b"2")])
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read("y").to_pybytes() == b"12"


def test_a_service_that_overwrites_is_refused(
    s3_server: S3Server, bucket: str, store: S3Store
) -> None:
    s3_server.forget_conditions(bucket)
    with pytest.raises(StorageFailed, match="overwrites objects"):
        require_exclusive_create(store)
    assert list(store.list("")) == []


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment that knows no credentials."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    # fsspec remembers filesystems by their options, not by the environment.
    monkeypatch.setattr("s3fs.S3FileSystem._cache", {})
    return monkeypatch


def refused(uri: str, options: dict[str, Any] | None = None) -> LedgerError:
    """The error of a read, which can be pickled and holds no secret."""
    with pytest.raises(LedgerError) as caught:
        open_store(uri, options).read("x")
    error = caught.value
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert SECRET not in str(error)
    assert "do:" in str(error)
    return error


def test_credentials_come_as_aws_and_fsspec_users_know_them(
    s3_server: S3Server, bucket: str, bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = f"s3://{bucket}/l"
    error = refused(uri, {"endpoint_url": s3_server.endpoint})
    assert isinstance(error, StorageFailed)
    assert "AWS_ACCESS_KEY_ID" in str(error)

    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[team]\naws_access_key_id = testing\naws_secret_access_key = testing\n"
    )
    with bare.context() as patch:
        patch.setenv("AWS_PROFILE", "team")
        patch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
        open_store(uri).put([("by/profile", b"1")])
    with bare.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        patch.setattr("s3fs.S3FileSystem._cache", {})
        open_store(uri).put([("by/environment", b"1")])
    with bare.context() as patch:
        patch.setitem(sys.modules["fsspec.config"].conf, "s3", s3_server.storage_options)
        patch.setattr("s3fs.S3FileSystem._cache", {})
        found = sorted(open_store(uri).list("by"))
    assert found == ["by/environment", "by/profile"]
    bare.setenv("AWS_PROFILE", "nobody")
    bare.setattr("s3fs.S3FileSystem._cache", {})
    assert "nobody" in str(refused(uri))


def test_what_s3_refuses_is_our_error(s3_server: S3Server, bucket: str, store: S3Store) -> None:
    options = s3_server.storage_options
    error = refused("s3://no-such-bucket-here/l", options)
    assert isinstance(error, StorageFailed)
    assert "make the bucket" in str(error)
    for code, advice in [
        ("AccessDenied", "rights of these credentials"),
        ("InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ("RequestTimeTooSkewed", "clock"),
    ]:
        s3_server.fail("GET", f"/{bucket}/l/x", status=403, code=code)
        error = refused(f"s3://{bucket}/l", options)
        assert isinstance(error, StorageFailed)
        assert code in str(error)
        assert advice in str(error)
    s3_server.fail("HEAD", f"/{bucket}/l/x", status=403, code="")
    with pytest.raises(StorageFailed, match="ListBucket"):
        store.stamp("x")
    s3_server.fail("DELETE", f"/{bucket}/l/x", status=403, code="AccessDenied")
    with pytest.raises(StorageFailed, match="not removed"):
        store.delete("x")


def test_a_server_that_is_not_there_or_silent_is_our_error(bare: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        options = {
            "key": "AKIAIOSFODNN7EXAMPLE",
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "config_kwargs": {"read_timeout": 0.2, "connect_timeout": 0.2},
        }
        error = refused("s3://bucket/l", options)
        assert isinstance(error, StorageFailed)
        assert "endpoint" in str(error)
        silent.listen()
        error = refused("s3://bucket/l", options)
        assert isinstance(error, StorageFailed)
        assert "imeout" in str(error)


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/l",
        f"s3://bucket/l?token={SECRET}",
        "s3://",
        "s3:///l",
        "s3://bucket/../other",
        "s3://bucket//l",
        "gs://bucket/l",
        "file://elsewhere/l",
        "memory://",
    ],
)
def test_places_that_cannot_be_are_refused(uri: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_store(uri)
    assert SECRET not in str(caught.value)


def test_places_are_read_as_they_are_written(s3_server: S3Server, tmp_path: Path) -> None:
    options = s3_server.storage_options
    assert open_store("s3://bucket/a/b/", options).uri == "s3://bucket/a/b"
    assert open_store("s3://bucket", options).uri == "s3://bucket"
    arn = "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/name"
    assert open_store(f"{arn}/a", options).uri == f"{arn}/a"
    spaced = tmp_path / "a b"
    for uri in (spaced, str(spaced), spaced.as_uri()):
        opened = open_store(uri)
        assert (opened.root, opened.uri) == (spaced, spaced.as_uri())
    assert open_store("memory://m").uri == "memory://m"
    for uri in ("memory://m", spaced):
        with pytest.raises(InvalidArgument, match="storage_options"):
            open_store(uri, options)


def test_options_and_settings_that_are_not_known(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="no_such_option") as caught:
        open_store("s3://bucket/l", {"no_such_option": 1, "secret": SECRET, "key": "k"})
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("LEDGER_CACHE_BYTES", "much")
    with pytest.raises(InvalidArgument, match="LEDGER_CACHE_BYTES"):
        open_store("s3://bucket/l", s3_server.storage_options)


def test_without_s3fs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingDependency, match=r"pip install 'trajectory-ledger\[s3\]'"):
        open_store("s3://bucket/l")


def test_corrupt_is_not_taken_for_a_race(store: S3Store) -> None:
    store.put([("x", LARGE)])
    with pytest.raises(Corrupt, match="taken by other bytes"):
        store.put([("x", LARGE[:-1] + b"!")])
    assert store.sweep(0) == []
