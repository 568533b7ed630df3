"""The local store: exclusive, whole, durable in the right order, in our errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import Corrupt, NotFound, StorageFailed
from ledger.storage import LocalStore


def test_objects_come_back_and_are_never_overwritten(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    large = os.urandom(1 << 17)
    store.put([("a/b/one", b"1"), ("a/b/two", b""), ("a/c/large", large)])
    assert store.read("a/b/one").to_pybytes() == b"1"
    assert store.read("a/b/two").to_pybytes() == b""
    assert store.read("a/c/large").to_pybytes() == large
    assert sorted(store.list("a")) == ["a/b/one", "a/b/two", "a/c/large"]
    store.put([("a/b/one", b"1")])
    with pytest.raises(Corrupt, match="taken by other bytes"):
        store.put([("a/b/one", b"2")])
    assert store.read("a/b/one").to_pybytes() == b"1"
    assert [p.name for p in (tmp_path / "a" / "b").iterdir() if p.name.startswith(".")] == []
    with pytest.raises(NotFound):
        store.read("a/b/three")
    with pytest.raises(NotFound):
        store.stamp("nowhere/x")


def test_a_mapped_object_holds_no_file_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put([("x", b"7" * (1 << 17))])
    before = len(os.listdir("/proc/self/fd"))
    kept = [store.read("x") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert kept[0].to_pybytes() == b"7" * (1 << 17)


def test_file_then_name_then_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "link")}

    def recorded_open(path: Any, *args: Any) -> int:
        descriptor: int = real["open"](path, *args)
        names[descriptor] = str(path)
        return descriptor

    def recorded_fsync(descriptor: int) -> None:
        calls.append(("fsync", names[descriptor]))
        real["fsync"](descriptor)

    def recorded_link(source: Any, target: Any) -> None:
        calls.append(("link", str(target)))
        real["link"](source, target)

    def recorded_write(descriptor: int, data: Any) -> int:
        calls.append(("write", names[descriptor]))
        # A short write, as a kernel may make, must not lose the rest.
        written: int = real["write"](descriptor, data[:2])
        return written

    monkeypatch.setattr(os, "open", recorded_open)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    monkeypatch.setattr(os, "write", recorded_write)
    LocalStore(tmp_path).put([("new/dir/x", b"12345")])
    target = tmp_path / "new" / "dir"
    steps = [(what, "tmp" if ".tmp-" in on else on) for what, on in calls]
    assert steps[:5] == [("write", "tmp")] * 3 + [("fsync", "tmp"), ("link", str(target / "x"))]
    synced = {Path(on) for what, on in steps[5:] if what == "fsync"}
    assert synced == {target, target.parent, tmp_path}
    assert (target / "x").read_bytes() == b"12345"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_or_broken_disk_is_our_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failing(descriptor: int, data: Any) -> int:
        raise OSError(code, os.strerror(code))

    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        with pytest.raises(StorageFailed, match=os.strerror(code)):
            store.put([("d/x", b"1"), ("d/y", b"2")])
    assert list((tmp_path / "d").iterdir()) == []
    store.put([("d/x", b"1"), ("d/y", b"2")])
    assert sorted(store.list("d")) == ["d/x", "d/y"]


def test_staged_bytes_show_only_when_published(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    kept, dropped = store.stage([("d", [b"12", b"34"]), ("d", [b"5"])])
    assert list(store.list("d")) == []
    store.publish([("d/kept", kept)])
    store.discard([kept, dropped])
    assert list(store.list("d")) == ["d/kept"]
    assert store.read("d/kept").to_pybytes() == b"1234"
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["kept"]


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put([("d/x", b"1")])
    old, young = store.stage([("d", [b"1"]), ("d", [b"2"])])
    os.utime(old.written.result(), (1, 1))
    young.written.result()
    os.utime(tmp_path / "d" / "x", (1, 1))
    swept = store.sweep(3600, dry_run=True)
    assert [Path(p).name for p in swept] == [old.written.result().name]
    assert old.written.result().exists()
    assert store.sweep(3600) == swept
    assert store.sweep(3600) == []
    store.publish([("d/young", young)])
    assert sorted(store.list("")) == ["d/x", "d/young"]
    with pytest.raises(StorageFailed, match="was not stored"):
        store.publish([("d/old", old)])
    assert sorted(store.list("")) == ["d/x", "d/young"]


def test_an_object_that_is_removed_while_it_is_found_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection takes a leftover in the moment in which a writer finds it there."""
    store = LocalStore(tmp_path)
    real = os.link
    for moment in ("link", "utime"):
        store.put([("d/x", b"1")])

        def removed(*args: Any, moment: str = moment, **kwargs: Any) -> None:
            monkeypatch.undo()
            if moment == "link":
                with pytest.raises(FileExistsError):
                    real(*args)
            (tmp_path / "d" / "x").unlink()
            if moment == "link":
                raise FileExistsError

        monkeypatch.setattr(os, moment, removed)
        store.put([("d/x", b"1")])
        assert store.read("d/x").to_pybytes() == b"1"
        assert [p.name for p in (tmp_path / "d").iterdir()] == ["x"]


def test_a_deletion_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put([("d/x", b"1")])
    synced: list[Path] = []
    monkeypatch.setattr("ledger.storage.local._sync_directory", synced.append)
    store.delete("d/x")
    store.delete("d/x")  # whoever removed it may have been killed before it synced the directory
    assert synced == [tmp_path / "d"] * 2


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put([("d/x", b"1")])

    def denied(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(StorageFailed, match="denied"):
        list(store.list("d"))
    with pytest.raises(StorageFailed, match="denied"):
        store.sweep(0)


def test_small_objects_are_named_before_they_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged only when the bytes and the way to them are durable; leftovers are replaced."""
    calls: list[tuple[str, Path]] = []
    names: dict[int, Path] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace")}

    def recorded_open(path: Any, *args: Any) -> int:
        descriptor: int = real["open"](path, *args)
        names[descriptor] = Path(path)
        return descriptor

    def recorded(name: str) -> Any:
        def call(descriptor: int, *args: Any) -> Any:
            calls.append((name, names[descriptor]))
            return real[name](descriptor, *args)

        return call

    def recorded_replace(source: Any, target: Any) -> None:
        calls.append(("replace", Path(target)))
        real["replace"](source, target)

    monkeypatch.setattr(os, "open", recorded_open)
    monkeypatch.setattr(os, "replace", recorded_replace)
    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, recorded(name))
    store = LocalStore(tmp_path)
    store.put_hashed([("d/x", b"12345")])
    folder = tmp_path / "d"
    assert calls[:2] == [("write", folder / "x"), ("fsync", folder / "x")]
    assert set(calls[2:]) == {("fsync", folder), ("fsync", tmp_path)}
    # What a crash left under the name of these bytes.
    (folder / "y").write_bytes(b"123")
    calls.clear()
    store.put_hashed([("d/y", b"12345")])
    steps = [(what, on if on in (folder, folder / "y") else "aside") for what, on in calls]
    assert steps == [
        ("write", "aside"),
        ("fsync", "aside"),
        ("replace", folder / "y"),
        ("fsync", folder),
    ]
    assert [store.read(f"d/{name}").to_pybytes() for name in "xy"] == [b"12345"] * 2
    assert sorted(p.name for p in folder.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_small_object_that_does_not_fit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = LocalStore(tmp_path)
    store.put_hashed([("d/x", b"1")])

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(StorageFailed, match="No space"):
            store.put_hashed([("d/y", b"12345")])
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["x"]
    store.put_hashed([("d/y", b"12345")])
    assert store.read("d/y").to_pybytes() == b"12345"


def test_what_cannot_be_read_is_not_answered_with_advice_to_writers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no folder")
    store = LocalStore(tmp_path)
    for use in (store.read, store.stamp):
        with pytest.raises(StorageFailed, match="may read") as caught:
            use("file/object")
        assert "acknowledged" not in str(caught.value)
    with pytest.raises(StorageFailed, match="free space"):
        store.put([("file/object", b"x")])
