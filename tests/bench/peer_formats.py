"""Tokens and log-probs in the formats of others: write to a folder, read into torch.

Each is used as its own documentation or its framework uses it; columns that are Arrow on both sides
are handed to torch without a copy, as the ledger's are.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pickle
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ledger.events import SegmentGenerated
from tests.bench.scans import touched

__all__ = ["PEERS", "Peer"]

Events = Sequence[SegmentGenerated]


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One format."""

    name: str
    write: Callable[[Path, Events], None]
    """Into an empty folder."""
    read: Callable[[Path], int]
    """The number of values, after a look at each."""
    module: str = "torch"
    package: str = "torch"

    @property
    def installed(self) -> bool:
        """Whether its module is there."""
        return importlib.util.find_spec(self.module) is not None


def _as_lists(event: SegmentGenerated) -> dict[str, Any]:
    return {
        "index": event.index,
        "group_index": event.group_index,
        "tokens": event.tokens.tolist(),
        "rollout_log_probs": event.rollout_log_probs.tolist(),
        "status": event.finish_reason,
    }


def _as_arrays(event: SegmentGenerated) -> dict[str, Any]:
    return {
        "index": event.index,
        "group_index": event.group_index,
        "tokens": event.tokens,
        "rollout_log_probs": event.rollout_log_probs,
        "status": event.finish_reason,
    }


def _as_table(events: Events) -> pa.Table:
    offsets = np.cumsum([0, *(len(e.tokens) for e in events)], dtype=np.int32)
    columns = {
        "index": pa.array([e.index for e in events]),
        "group_index": pa.array([e.group_index for e in events]),
        "tokens": pa.ListArray.from_arrays(offsets, np.concatenate([e.tokens for e in events])),
        "rollout_log_probs": pa.ListArray.from_arrays(
            offsets, np.concatenate([e.rollout_log_probs for e in events])
        ),
        "status": pa.array([e.finish_reason for e in events]),
    }
    return pa.table(columns)


def _lists(samples: Iterable[dict[str, Any]]) -> int:
    """Tensors of every sample's lists or arrays."""
    count = 0
    for sample in samples:
        for name, dtype in (("tokens", torch.int32), ("rollout_log_probs", torch.float32)):
            count += len(torch.as_tensor(sample[name], dtype=dtype))
    return count


def _columns(table: pa.Table) -> int:
    """Tensors on the memory of a table."""
    return sum(
        touched(chunk)
        for name in ("tokens", "rollout_log_probs")
        for chunk in table.column(name).chunks
    )


def _write_torch(folder: Path, events: Events) -> None:
    torch.save({"samples": [_as_lists(e) for e in events]}, folder / "samples.pt")


def _read_torch(folder: Path) -> int:
    return _lists(torch.load(folder / "samples.pt", weights_only=False)["samples"])


def _write_jsonl(folder: Path, events: Events) -> None:
    with (folder / "samples.jsonl").open("w") as out:
        for event in events:
            out.write(json.dumps(_as_lists(event)) + "\n")


def _read_jsonl(folder: Path) -> int:
    with (folder / "samples.jsonl").open() as lines:
        return _lists(json.loads(line) for line in lines)


def _write_pickle(folder: Path, events: Events) -> None:
    with (folder / "samples.pkl").open("wb") as out:
        pickle.dump([_as_arrays(e) for e in events], out, protocol=pickle.HIGHEST_PROTOCOL)


def _read_pickle(folder: Path) -> int:
    count = 0
    for sample in pickle.loads((folder / "samples.pkl").read_bytes()):
        for name in ("tokens", "rollout_log_probs"):
            tensor = torch.from_numpy(sample[name])
            np.bitwise_or.reduce(tensor.view(torch.int32).numpy())
            count += len(tensor)
    return count


def _write_datasets(folder: Path, events: Events) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(_as_table(events)).save_to_disk(folder / "set")


def _read_datasets(folder: Path) -> int:
    import datasets

    return _columns(datasets.load_from_disk(folder / "set").data.table)


def _write_lance(folder: Path, events: Events) -> None:
    import lance

    lance.write_dataset(_as_table(events), folder / "set.lance")


def _read_lance(folder: Path) -> int:
    import lance

    table = lance.dataset(folder / "set.lance").to_table(["tokens", "rollout_log_probs"])
    return _columns(table)


def _write_delta(folder: Path, events: Events) -> None:
    import deltalake

    deltalake.write_deltalake(folder / "set", _as_table(events))


def _read_delta(folder: Path) -> int:
    import deltalake

    table = deltalake.DeltaTable(folder / "set").to_pyarrow_table(
        columns=["tokens", "rollout_log_probs"]
    )
    return _columns(table)


def _write_sqlite(folder: Path, events: Events) -> None:
    con = sqlite3.connect(folder / "samples.sqlite")
    try:
        con.execute("PRAGMA journal_mode = WAL")
        con.execute("PRAGMA synchronous = FULL")
        con.execute(
            "CREATE TABLE samples (number INTEGER PRIMARY KEY, group_index INT, tokens BLOB,"
            " log_probs BLOB, status TEXT)"
        )
        con.executemany(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
            (
                (e.index, e.group_index, e.tokens.data, e.rollout_log_probs.data, e.finish_reason)
                for e in events
            ),
        )
        con.commit()
    finally:
        con.close()


def _read_sqlite(folder: Path) -> int:
    con = sqlite3.connect(folder / "samples.sqlite")
    try:
        count = 0
        for row in con.execute("SELECT tokens, log_probs FROM samples ORDER BY number"):
            for blob, dtype in zip(row, (torch.int32, torch.float32), strict=True):
                tensor = torch.frombuffer(bytearray(blob), dtype=dtype)
                np.bitwise_or.reduce(tensor.view(torch.int32).numpy())
                count += len(tensor)
        return count
    finally:
        con.close()


PEERS = (
    Peer("torch.save, list of dicts (slime's dump)", _write_torch, _read_torch),
    Peer("JSONL, ids and log-probs (verl's dump)", _write_jsonl, _read_jsonl),
    Peer("pickle of numpy arrays", _write_pickle, _read_pickle),
    Peer("Hugging Face save_to_disk", _write_datasets, _read_datasets, "datasets", "datasets"),
    Peer("Lance", _write_lance, _read_lance, "lance", "pylance"),
    Peer("Delta", _write_delta, _read_delta, "deltalake", "deltalake"),
    Peer("SQLite blobs, WAL, FULL", _write_sqlite, _read_sqlite),
)
