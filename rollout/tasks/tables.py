"""Rows of files on disk, by number, without holding the files in memory.

JSON lines, Parquet, and what Hugging Face's `Dataset.save_to_disk` writes; one file, or a folder of
files of one kind in the order of their names. Opening reads every byte once, for the digest.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from ledger.errors import Conflict, InvalidArgument, NotFound, explain

__all__ = [
    "FileState",
    "Table",
    "TableSlice",
    "file_digest",
    "open_table",
    "parse_slice",
    "read_chunks",
]

CHUNK_BYTES = 1 << 24
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]$")


class Table(Protocol):
    """Rows of a file or of several."""

    digest: bytes
    """blake3 of the bytes of the file; of the digests of the files, where there are several."""

    def __len__(self) -> int:
        """The number of rows."""

    def row(self, number: int) -> Mapping[str, Any]:
        """The fields of row `number`, from 0. May leave out fields that were not asked for.

        Raises:
            InvalidArgument: the row is not one; the message names the file and the place.
            Conflict: the file is not the one that was opened any more.
        """

    def place(self, number: int) -> str:
        """Where row `number` stands, for messages: the file, and the line or row in it."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells whether a file was written to since it was opened."""

    path: Path
    size_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The file as it is now. Raises NotFound."""
        try:
            found = os.stat(path)
        except OSError as error:
            raise NotFound(
                explain("reading prompt data", on=str(path), expected="a file", found=str(error))
            ) from error
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)

    def check(self) -> None:
        """Raises Conflict where the file has changed."""
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        same = found is not None and (found.st_size, found.st_mtime_ns, found.st_ino) == (
            self.size_bytes,
            self.modified_ns,
            self.inode,
        )
        if not same:
            now = FileState.of(self.path)
            raise Conflict(
                explain(
                    "reading prompt data",
                    on=str(self.path),
                    expected="the file as it was when it was opened: a run's prompts are those of "
                    "one content",
                    found=f"{now.size_bytes} bytes in place of {self.size_bytes}"
                    if now.size_bytes != self.size_bytes
                    else "a file that was written again",
                    do="put the old content back and start the command again, or go on with the "
                    "new one in a branch: --from-version K --data fresh --prompt-data PATH",
                )
            )


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, some megabytes at a time. Raises NotFound."""
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise NotFound(
            explain(
                "reading prompt data",
                on=str(path),
                expected="a file that can be read",
                found=str(error),
            )
        ) from error


@lru_cache(maxsize=1024)
def file_digest(state: FileState) -> bytes:
    """blake3 of a file's bytes, computed once a process. Raises NotFound or Conflict."""
    hasher = blake3(max_threads=blake3.AUTO)
    for chunk in read_chunks(state.path):
        hasher.update(chunk)
    state.check()
    return hasher.digest()


class Joined:
    """Tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        """`tables` in order; at least one."""
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))
        self.digest = blake3(b"".join(table.digest for table in tables)).digest()

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, number: int) -> tuple[Table, int]:
        at = bisect_right(self._ends, number)
        return self._tables[at], number - (self._ends[at - 1] if at else 0)

    def row(self, number: int) -> Mapping[str, Any]:
        """As `Table.row`."""
        table, own = self._find(number)
        return table.row(own)

    def place(self, number: int) -> str:
        """As `Table.place`."""
        table, own = self._find(number)
        return table.place(own)


@dataclass(frozen=True, slots=True)
class TableSlice:
    """A path, and which of its rows are meant: slime's `PATH@[start:end]`."""

    path: Path
    start: int | None = None
    end: int | None = None

    def rows(self, size: int) -> range:
        """The rows of a table of `size` rows, as Python slices a list."""
        return range(size)[slice(self.start, self.end)]


def parse_slice(path: str) -> TableSlice:
    """Take `PATH` or `PATH@[start:end]` apart; either end may be missing or negative."""
    found = _SLICE.match(path)
    if found is None:
        return TableSlice(Path(path))
    start, end = (None if found[name] is None else int(found[name]) for name in ("start", "end"))
    return TableSlice(Path(found["path"]), start, end)


def open_table(path: Path, columns: Sequence[str]) -> Table:
    """Open what lies at `path`; of files with columns, only `columns` are read.

    Raises:
        NotFound: there is nothing.
        InvalidArgument: it is none of the formats, or cannot be read as the one it seems to be.
    """
    from rollout.tasks.columns import ArrowFile, ParquetTable
    from rollout.tasks.json_lines import JsonLines

    def of_kind(suffix: str, files: Sequence[Path]) -> Table:
        if suffix == ".jsonl":
            tables: list[Table] = [JsonLines(file) for file in files]
        elif suffix == ".parquet":
            tables = [ParquetTable(file, columns) for file in files]
        else:
            tables = [ArrowFile(file, columns) for file in files]
        if not sum(len(table) for table in tables):
            raise InvalidArgument(
                explain("opening prompt data", on=str(path), expected="rows", found="none")
            )
        return tables[0] if len(tables) == 1 else Joined(tables)

    if path.is_file():
        if path.suffix in (".jsonl", ".parquet"):
            return of_kind(path.suffix, [path])
        raise _unknown(path, f"a file named {path.name}")
    if not path.is_dir():
        raise NotFound(
            explain(
                "opening prompt data",
                on=str(path),
                expected="a file, or a folder of them",
                found="nothing there",
            )
        )
    if (path / "state.json").is_file():
        return of_kind(".arrow", _saved_files(path))
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
        raise InvalidArgument(
            explain(
                "opening prompt data",
                on=str(path),
                expected="one data set",
                found=f"a dictionary of the splits {', '.join(splits)}",
                do=f"name one of them: {path / (splits or ['train'])[0]}",
            )
        )
    files = sorted(entry for entry in path.iterdir() if entry.suffix in (".jsonl", ".parquet"))
    kinds = {file.suffix for file in files}
    if len(kinds) != 1:
        raise _unknown(path, f"a folder with files of {len(kinds)} of these kinds")
    return of_kind(kinds.pop(), files)


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `Dataset.save_to_disk` wrote, in order."""
    try:
        state = json.loads((folder / "state.json").read_text())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            explain(
                "opening prompt data",
                on=str(folder / "state.json"),
                expected="what Dataset.save_to_disk writes: a list of files by _data_files",
                found=f"{type(error).__name__}: {error}",
            )
        ) from error
    if not files:
        raise _unknown(folder, "a data set without rows")
    return files


def _unknown(path: Path, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "opening prompt data",
            on=str(path),
            expected="a .jsonl or .parquet file, a folder of files of one of these kinds, or a "
            "folder that Hugging Face's Dataset.save_to_disk wrote",
            found=found,
        )
    )
