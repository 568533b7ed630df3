"""JSON lines by number: one pass finds where the lines begin, a row is parsed when it is asked for.

Eight bytes a row stay in memory.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.errors import InvalidArgument, explain
from rollout.tasks.tables import FileState, read_chunks

__all__ = ["JsonLines"]

_NEWLINE, _RETURN = 10, 13


class JsonLines:
    """A file of one JSON object a line. Lines of no bytes are no rows."""

    def __init__(self, path: Path) -> None:
        """Index and digest the file. Raises NotFound."""
        self._path, self._state = path, FileState.of(path)
        self._starts, self.digest = _index(self._state)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Mapping[str, Any]:
        """As `Table.row`; every field."""
        self._state.check()
        line = self._line(number)
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._bad(number, f"{error}; the line begins {line[:60]!r}") from error
        if not isinstance(found, dict):
            raise self._bad(number, f"a {type(found).__name__}: {line[:60]!r}")
        return found

    def place(self, number: int) -> str:
        """The file and the line, counted from 1."""
        lines, left = 1, int(self._starts[number])
        for chunk in read_chunks(self._path):
            lines += chunk[:left].count(b"\n")
            left -= len(chunk)
            if left <= 0:
                break
        return f"{self._path}, line {lines}"

    def _line(self, number: int) -> bytes:
        start = int(self._starts[number])
        last = number + 1 == len(self._starts)
        end = self._state.size_bytes if last else int(self._starts[number + 1])
        return os.pread(self._file, end - start, start)  # moves no position that threads share

    def _bad(self, number: int, found: str) -> InvalidArgument:
        return InvalidArgument(
            explain(
                "reading prompt data",
                on=self.place(number),
                expected="a JSON object",
                found=found,
                do="correct the line, or leave it out",
            )
        )


@lru_cache(maxsize=16)
def _index(state: FileState) -> tuple[npt.NDArray[np.int64], bytes]:
    """[N] Where the rows begin, in bytes, and blake3 of the file; read once a process."""
    hasher = blake3(max_threads=blake3.AUTO)
    found: list[npt.NDArray[np.int64]] = []
    size, before = 0, _NEWLINE
    for chunk in read_chunks(state.path):
        hasher.update(chunk)
        data = np.frombuffer(chunk, np.uint8)
        # A row begins after a line's end, where there is something else than another end.
        after = np.empty(len(data), bool)
        after[0] = before == _NEWLINE
        np.equal(data[:-1], _NEWLINE, out=after[1:])
        begins = np.flatnonzero(after)
        begins = begins[(data[begins] != _NEWLINE) & (data[begins] != _RETURN)]
        found.append(begins + size)
        size, before = size + len(data), int(data[-1])
    starts = np.concatenate(found) if found else np.zeros(0, np.int64)
    state.check()
    return starts, hasher.digest()
