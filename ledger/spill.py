"""Where appends wait on local disk while the ledger cannot take them: one file an append.

    FOLDER/<ledger id>/<run>/<producer>/<epoch>-<number>.spill

A file is a line with two hashes, a line of JSON that says what it is, then for each kind an Arrow
IPC file, each beginning at a multiple of 64 bytes. It is written aside, synced, named, and its
folder synced, before anybody is told that it is there. Nothing in it is ever executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from ledger.canonical import canonical_json
from ledger.errors import Conflict, Corrupt, StorageFailed, explain
from ledger.hashing import file_hash
from ledger.schema import arrow_schema, table_kind, table_layout
from ledger.segment import Identity, serialise

__all__ = ["SpillFile", "SpillFolder", "Spilled"]

_MAGIC = b"ledger-spill 1"
_FIRST_LINE = len(_MAGIC) + 2 * 65 + 1
_ALIGN = 64
_SUFFIX = ".spill"
_GIVEN_UP = ".abandoned"
_ASIDE = "set-aside"


@dataclasses.dataclass(frozen=True, slots=True)
class SpillFile:
    """A file of the folder, by what its name says."""

    path: Path
    epoch: int
    number: int
    """The append's producer_seq."""
    size_bytes: int
    abandoned: bool
    """The caller gave it up; it waits only for the ledger to record that."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spilled:
    """What a spilled append says of itself."""

    branch: str
    epoch: int
    number: int
    spilled_at: int
    """Microseconds since 1970-01-01 UTC."""
    rows: Mapping[str, int]
    """Events by kind, in the order of the append."""


class SpillFolder:
    """The folder of one producer of one run. One process at a time may hold it."""

    def __init__(self, root: Path, ledger_id: str, run_id: str, producer: str) -> None:
        self.root = root.absolute()
        self.folder = self.root / ledger_id / run_id / quote(producer, safe="")
        self._run_id = run_id
        self._producer = producer
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder, take it for this process, and remove what interrupted writes left.

        Raises:
            Conflict: another process has it.
            StorageFailed: it cannot be made or read.
        """
        with _translated("a spill folder was not opened", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, *self.folder.parents):
                if folder.is_relative_to(self.root):
                    _sync(folder)
            _sync(self.root.parent)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(descriptor)
                raise Conflict(
                    explain(
                        "a spill folder was not opened: another process writes to it",
                        on=str(self.folder),
                        do="end that process first: what it spilled must be delivered under its "
                        "own epoch, which a new writer would end",
                    )
                ) from error
            self._lock = descriptor
            for path in self.folder.glob(".tmp-*"):
                path.unlink()

    def release(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def files(self) -> list[SpillFile]:
        """All that waits, in the order of the appends. Raises: StorageFailed."""
        found = []
        with _translated("a spill folder was not read", self.folder):
            for path in self.folder.iterdir():
                stem, abandoned = path.name, path.name.endswith(_GIVEN_UP)
                stem = stem.removesuffix(_GIVEN_UP)
                if stem.endswith(_SUFFIX):
                    epoch, _, number = stem.removesuffix(_SUFFIX).partition("-")
                    size = path.stat().st_size
                    found.append(SpillFile(path, int(epoch), int(number), size, abandoned))
        return sorted(found, key=lambda file: (file.epoch, file.number))

    def write(
        self, tables: Mapping[str, pa.Table], branch: str, epoch: int, number: int, now: int
    ) -> SpillFile:
        """Store an append durably. After an error nothing of it is there.

        Raises:
            StorageFailed: the folder did not take it.
        """
        body: list[Any] = []
        parts = []
        for part, (kind, table) in enumerate(tables.items()):
            identity = Identity(self._run_id, branch, self._producer, epoch, number, part)
            pieces = serialise(table, identity)
            size = sum(memoryview(piece).nbytes for piece in pieces)
            layout = table_layout(table)
            parts.append({"kind": kind, "layout": layout, "rows": table.num_rows, "bytes": size})
            body += [*pieces, bytes(-size % _ALIGN)]
        header = canonical_json(
            {
                "run_id": self._run_id,
                "branch": branch,
                "producer": self._producer,
                "epoch": epoch,
                "number": number,
                "spilled_at": now,
                "parts": parts,
            }
        ).encode()
        header += b" " * (-(_FIRST_LINE + len(header) + 1) % _ALIGN) + b"\n"
        first = b" ".join(
            [_MAGIC, file_hash(header).hex().encode(), file_hash(*body).hex().encode()]
        )
        name = f"{epoch:010d}-{number:012d}{_SUFFIX}"
        with _translated("events were not spilled to local disk", self.folder):
            size = self._write(name, [first + b"\n", header, *body])
        return SpillFile(self.folder / name, epoch, number, size, False)

    def _write(self, name: str, pieces: list[Any]) -> int:
        temporary = self.folder / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
        size = 0
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            try:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    size += view.nbytes
                    while view.nbytes:
                        view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        try:
            _sync(self.folder)
        except BaseException:
            # Nobody was told that it is there, so it must not be delivered by surprise.
            (self.folder / name).unlink(missing_ok=True)
            raise
        return size

    def describe(self, file: SpillFile) -> Spilled:
        """What the file says of itself, without its rows.

        Raises:
            Corrupt: that part of it is damaged.
            StorageFailed: it cannot be read.
        """
        with _translated("a spilled append was not read", file.path), file.path.open("rb") as data:
            first = data.read(_FIRST_LINE)
            return _header(file, first, data.readline())[0]

    def read(self, file: SpillFile) -> tuple[Spilled, dict[str, pa.Table]]:
        """The append as it was given.

        Raises:
            Corrupt: the file is not what was written.
            StorageFailed: it cannot be read.
        """
        with _translated("a spilled append was not read", file.path):
            raw = file.path.read_bytes()
        view = memoryview(raw)
        end = raw.find(b"\n", _FIRST_LINE) + 1
        spilled, body_hash, parts = _header(file, raw[:_FIRST_LINE], raw[_FIRST_LINE:end])
        if file_hash(view[end:]).hex() != body_hash:
            raise _damaged(file, f"blake3 {body_hash}", f"blake3 {file_hash(view[end:]).hex()}")
        tables = {}
        for part in parts:
            size = part["bytes"]
            table = pa.ipc.open_file(pa.py_buffer(view[end : end + size])).read_all()
            kind, layout = part["kind"], part["layout"]
            schema = arrow_schema(kind, layout)
            if (table_kind(table), table_layout(table)) != (kind, layout) or (
                not table.schema.equals(schema) or table.num_rows != part["rows"]
            ):
                raise _damaged(file, f"{part['rows']} rows of {kind}", f"{table.schema.names}")
            tables[kind] = table.replace_schema_metadata(schema.metadata)
            end += size + -size % _ALIGN
        return spilled, tables

    def remove(self, file: SpillFile) -> None:
        """Remove what the ledger has. Should it come back after a power cut, it does no harm."""
        with _translated("a spilled append was not removed", file.path):
            file.path.unlink(missing_ok=True)

    def give_up(self, file: SpillFile) -> SpillFile:
        """Note durably that the append will not be delivered. Raises: StorageFailed."""
        if file.abandoned:
            return file
        path = file.path.with_name(file.path.name + _GIVEN_UP)
        with _translated("a spilled append was not given up", file.path):
            os.rename(file.path, path)
            _sync(self.folder)
        return dataclasses.replace(file, path=path, abandoned=True)

    def set_aside(self, file: SpillFile) -> None:
        """Keep a file that is not to be delivered where nobody looks. Raises: StorageFailed."""
        aside = self.folder / _ASIDE
        with _translated("a spilled append was not set aside", file.path):
            aside.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(file.path, aside / file.path.name)
            _sync(aside)
            _sync(self.folder)


def _header(file: SpillFile, first: bytes, line: bytes) -> tuple[Spilled, str, list[Any]]:
    words = first.rstrip(b"\n").split(b" ")
    if b" ".join(words[:2]) != _MAGIC or len(words) != 4:
        raise _damaged(file, f"a file that begins with {_MAGIC.decode()!r}", repr(first[:24]))
    wanted, body_hash = (word.decode("ascii", "replace") for word in words[2:])
    if file_hash(line).hex() != wanted:
        raise _damaged(file, f"a header with blake3 {wanted}", f"blake3 {file_hash(line).hex()}")
    found = json.loads(line)
    if (found["epoch"], found["number"]) != (file.epoch, file.number):
        raise _damaged(
            file,
            f"epoch {file.epoch}, number {file.number}, as its name says",
            f"epoch {found['epoch']}, number {found['number']}",
        )
    rows = {part["kind"]: part["rows"] for part in found["parts"]}
    spilled = Spilled(found["branch"], file.epoch, file.number, found["spilled_at"], rows)
    return spilled, body_hash, found["parts"]


def _damaged(file: SpillFile, expected: str, found: str) -> Corrupt:
    return Corrupt(
        explain(
            "a spilled append is not what was written",
            on=str(file.path),
            expected=expected,
            found=found,
            do="it is not delivered; a gap_recorded event will say what the ledger lacks",
        )
    )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(tried: str, on: Path) -> Iterator[None]:
    try:
        yield
    except (Corrupt, StorageFailed, Conflict):
        raise
    except OSError as error:
        raise StorageFailed(
            explain(
                tried,
                on=str(on),
                found=f"{type(error).__name__}: {error}",
                do="free space or make the folder writable",
            )
        ) from error
