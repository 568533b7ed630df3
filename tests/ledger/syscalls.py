"""Records what an append asks of files and of SQLite, and what a power cut may leave of it.

`recording` notes every call of this process that changes files below a folder, and the transactions
of a catalog, in order. `PowerCut` replays a prefix of the log on a model in which nothing survives
that was not synced: bytes of a file only by fsync of the file, names only by fsync of their folder.
SQLite is taken at its word at the end of a COMMIT (synchronous=FULL); its own files are no part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa

from ledger import Ledger

CATALOG = ("catalog.", "lock")
"""Beginnings of names of files that are not the store's."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that was done: on a path, with bytes or a second path."""

    what: str
    """create, write, truncate, fsync, link, rename, unlink, mkdir, begin, commit, committed."""
    path: str = ""
    data: bytes = b""
    to: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.path} {self.to}".rstrip()


Hook = Callable[[str], None]


@contextlib.contextmanager
def recording(root: Path, before: Hook | None = None, after: Hook | None = None) -> Iterator[list]:
    """A list that grows by a Step for each change below `root`, as it ends.

    `before` and `after` are called around each, with what it is: to kill the process there.
    """
    log: list[Step] = []
    lock = threading.RLock()
    paths: dict[int, str] = {}
    real: dict[str, Any] = {
        name: getattr(os, name)
        for name in (
            *("open", "write", "fsync", "fdatasync", "ftruncate", "close"),
            *("link", "rename", "replace", "unlink", "mkdir"),
        )
    }

    def inside(path: Any) -> str | None:
        try:
            found = Path(os.fsdecode(path)).absolute().relative_to(root).as_posix()
        except (TypeError, ValueError):
            return None
        return None if found.startswith(CATALOG) else found

    def noted(what: str, step: Step | None, call: Callable[[], Any]) -> Any:
        if step is None:
            return call()
        with lock:
            if before:
                before(what)
            result = call()
            log.append(step)
            if after:
                after(what)
            return result

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        name = inside(path)
        made = name is not None and flags & os.O_CREAT and not os.path.lexists(path)
        step = Step("create", name or "") if made else None
        descriptor: int = noted("create", step, lambda: real["open"](path, flags, *rest, **more))
        if name is not None:
            paths[descriptor] = name
        return descriptor

    def closed(descriptor: int) -> None:
        paths.pop(descriptor, None)
        real["close"](descriptor)

    def written(descriptor: int, data: Any) -> int:
        if descriptor not in paths:
            return int(real["write"](descriptor, data))
        whole = bytes(memoryview(data).cast("B"))
        done = 0
        # In two halves: half a file is the likeliest thing for a crash to leave.
        for part in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
            if part or len(whole) < 2:
                step = Step("write", paths[descriptor], part)
                done += noted("write", step, lambda part=part: real["write"](descriptor, part))
        return done

    def on_descriptor(name: str, what: str) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            data = rest[0].to_bytes(8, "little") if rest else b""
            known = paths.get(descriptor)
            step = None if known is None else Step(what, known, data)
            return noted(what, step, lambda: real[name](descriptor, *rest))

        return call

    def on_path(name: str, what: str) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            known = inside(path)
            to = inside(rest[0]) if name in ("link", "rename", "replace") else ""
            step = None if known is None else Step(what, known, to=to or "")
            return noted(what, step, lambda: real[name](path, *rest, **more))

        return call

    patches = {
        "open": opened,
        "close": closed,
        "write": written,
        "fsync": on_descriptor("fsync", "fsync"),
        "fdatasync": on_descriptor("fdatasync", "fsync"),
        "ftruncate": on_descriptor("ftruncate", "truncate"),
        "link": on_path("link", "link"),
        "rename": on_path("rename", "rename"),
        "replace": on_path("replace", "rename"),
        "unlink": on_path("unlink", "unlink"),
        "mkdir": on_path("mkdir", "mkdir"),
    }
    with contextlib.ExitStack() as stack:
        for name, call in patches.items():
            stack.enter_context(mock.patch.object(os, name, call))
        yield log


@contextlib.contextmanager
def recording_catalog(
    ledger: Ledger, log: list[Step], before: Hook | None = None, after: Hook | None = None
) -> Iterator[None]:
    """Note the transactions of the catalog in `log`: begin, commit (about to), committed.

    Of SQLite those that write, by what SQLite itself reports; of PostgreSQL the commits of all.
    """
    engine = ledger.catalog.engine
    state = threading.local()

    def noted(what: str) -> None:
        if before:
            before(what)
        log.append(Step(what))
        if after:
            after(what)

    def statement(text: str) -> None:
        if text.startswith("BEGIN IMMEDIATE"):
            state.writes = True
            noted("begin")
        elif text.startswith("COMMIT") and getattr(state, "writes", False):
            state.writes, state.committed = False, True
            noted("commit")

    def checkout(connection: Any, record: Any, _: Any) -> None:
        if ledger.catalog.kind == "sqlite":
            connection.set_trace_callback(statement)
        elif "commit" not in record.info:
            record.info["commit"] = real = connection.commit

            def commit() -> None:
                noted("commit")
                real()
                noted("committed")

            connection.commit = commit

    def checkin(connection: Any, _: Any) -> None:
        if getattr(state, "committed", False):
            state.committed = False
            noted("committed")

    sa.event.listen(engine, "checkout", checkout)
    sa.event.listen(engine, "checkin", checkin)
    try:
        yield
    finally:
        sa.event.remove(engine, "checkout", checkout)
        sa.event.remove(engine, "checkin", checkin)
        engine.dispose()


@dataclasses.dataclass(eq=False)
class _File:
    data: bytearray = dataclasses.field(default_factory=bytearray)
    synced: bytes = b""


class PowerCut:
    """A model of a folder in which only what was synced is safe."""

    def __init__(self, root: Path) -> None:
        self._names: dict[str, _File | None] = {}  # None: a folder
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(CATALOG):
                if path.is_dir():
                    self._names[name] = None
                else:
                    data = path.read_bytes()
                    self._names[name] = _File(bytearray(data), data)
        self._durable = dict(self._names)
        self._pending: list[tuple[str, _File | None, bool]] = []  # name, what, whether it is there

    def apply(self, step: Step) -> None:
        """Do what a step did."""
        names = self._names
        if step.what in ("begin", "commit", "committed"):
            return
        if step.what == "create":
            self._enter(step.path, _File())
        elif step.what == "mkdir":
            self._enter(step.path, None)
        elif step.what == "link":
            self._enter(step.to, names[step.path])
        elif step.what == "rename":
            self._enter(step.to, names[step.path])
            self._leave(step.path)
        elif step.what == "unlink":
            self._leave(step.path)
        elif step.what == "write":
            self._file(step.path).data += step.data
        elif step.what == "truncate":
            del self._file(step.path).data[int.from_bytes(step.data, "little") :]
        elif step.what == "fsync":
            file = names.get(step.path)
            if file is not None:
                file.synced = bytes(file.data)
            else:
                self._sync_folder(step.path)

    def states(self) -> Iterator[dict[str, bytes | None]]:
        """What a power cut at this moment may leave, the worst cases of it: path → bytes."""
        for names in self._name_sets():
            for spoil in (_synced_only, _all_there, _zeros, _half):
                yield {
                    name: None if file is None else spoil(file)
                    for name, file in sorted(names.items())
                    if all(up in names for up in _parents(name))
                }

    def current(self) -> dict[str, bytes]:
        """The files as the kernel shows them."""
        return {name: bytes(f.data) for name, f in self._names.items() if f is not None}

    def _name_sets(self) -> Iterator[dict[str, _File | None]]:
        """No name that is not safe; all; and each lost alone, and there alone."""
        yield self._applied([])
        yield self._applied(self._pending)
        for one in range(len(self._pending)):
            yield self._applied([self._pending[one]])
            yield self._applied(self._pending[:one] + self._pending[one + 1 :])

    def _applied(self, pending: Sequence[tuple[str, _File | None, bool]]) -> dict[str, Any]:
        names = dict(self._durable)
        for name, what, there in pending:
            if there:
                names[name] = what
            else:
                names.pop(name, None)
        return names

    def _file(self, name: str) -> _File:
        file = self._names[name]
        if file is None:
            raise IsADirectoryError(name)
        return file

    def _enter(self, name: str, what: _File | None) -> None:
        self._names[name] = what
        self._pending.append((name, what, True))

    def _leave(self, name: str) -> None:
        self._pending.append((name, self._names.pop(name), False))

    def _sync_folder(self, folder: str) -> None:
        own = [one for one in self._pending if _folder_of(one[0]) == folder]
        self._durable = self._applied(own) if own else self._durable
        self._pending = [one for one in self._pending if _folder_of(one[0]) != folder]


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0] or "."


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    return ("/".join(parts[: n + 1]) for n in range(len(parts)))


def _synced_only(file: _File) -> bytes:
    return file.synced


def _all_there(file: _File) -> bytes:
    return bytes(file.data)


def _zeros(file: _File) -> bytes:
    """The length was written, the bytes were not."""
    return file.synced + bytes(max(0, len(file.data) - len(file.synced)))


def _half(file: _File) -> bytes:
    return file.synced + bytes(file.data[len(file.synced) :][: (len(file.data) + 1) // 2])


def lay_out(state: dict[str, bytes | None], folder: Path) -> None:
    """Make `state` in `folder`."""
    for name, data in state.items():
        path = folder / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def prefixes(log: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Every beginning of a log, the empty and the whole one included."""
    return (list(itertools.islice(log, n)) for n in range(len(log) + 1))
