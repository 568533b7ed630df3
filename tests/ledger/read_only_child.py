"""Reads a ledger without any right to write; a module of its own for processes that begin here."""

from __future__ import annotations

import os
import pwd
import traceback
from pathlib import Path
from typing import Any

from ledger import open_ledger
from ledger.errors import StorageFailed
from ledger.verify import verify_ledger

NOBODY = "nobody"


def main(folder: str, answer: Any) -> None:
    """Send what was read, or what went wrong, to the connection `answer`."""
    try:
        with open_ledger(folder, read_only=True) as ledger:  # loads what is loaded at first use
            verify_ledger(ledger)
            ledger.reader("run", None).sql("select 1")
        answer.send("ready")
        answer.recv()
        if os.getuid() == 0:
            nobody = pwd.getpwnam(NOBODY)
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
        found: dict[str, Any] = {"writable": os.access(folder, os.W_OK)}
        with open_ledger(folder) as ledger:
            found["head"] = ledger.run().head_seq
            found["ok"] = verify_ledger(ledger).ok
            rows = ledger.reader("run", None).sql("select count(*) from events").to_pylist()
            found["events"] = next(iter(rows[0].values()))
            try:
                ledger.writer("run", producer="p")
            except StorageFailed as error:
                found["refused"] = str(error)
            answer.send("open")
            answer.recv()
            found["head later"] = ledger.run().head_seq
        try:
            open_ledger(folder, create=True)
        except StorageFailed as error:
            found["not made"] = str(error)
        found["files"] = sorted(p.name for p in Path(folder).iterdir())
        answer.send(found)
    except BaseException:
        answer.send(traceback.format_exc())
