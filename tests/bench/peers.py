"""The same tokens and log-probs by the habits of today: dumps that frameworks write."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ledger.events import SegmentGenerated
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import emptied, generated, write_durably

__all__ = ["peer_figures"]

GROUP = "today's habits, same data"


def peer_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Dump and sync, then load into arrays, against the bare bytes of the arrays."""
    raw = emptied(folder / "raw")
    events = generated((1 if quick else 4) << 20)
    bare = [np.concatenate([e.tokens for e in events]).tobytes()]
    bare.append(np.concatenate([e.rollout_log_probs for e in events]).tobytes())
    size = sum(len(piece) for piece in bare)
    number = itertools.count()
    dump = {name: write for name, (write, _) in _PEERS.items()}
    writes: dict[str, Callable[[], Any]] = {
        "raw": lambda: write_durably(raw, f"{next(number)}", bare)
    }
    for name, write in dump.items():
        writes[name] = lambda write=write, name=name: _synced(raw, name, write, events)  # type: ignore[misc]
    written = interleaved(writes, 3)
    file = write_durably(raw, "bare", bare)
    reads: dict[str, Callable[[], Any]] = {"raw": file.read_bytes}
    for name, (_, load) in _PEERS.items():
        reads[name] = lambda load=load, name=name: load(raw / _file(name))  # type: ignore[misc]
    read = interleaved(reads, 3)
    for what, against, times in (
        ("write", "write + fsync of the bare arrays", written),
        ("read", "warm read() of the bare arrays", read),
    ):
        for name in _PEERS:
            one = times[name]
            yield Figure(
                group=GROUP,
                name=f"{what}: {name}",
                against=against,
                ratio=times["raw"].seconds / one.seconds,
                mb_per_s=size / 1e6 / one.seconds,
                mb_per_cpu_s=size / 1e6 / one.cpu_seconds,
                note=f"{one.seconds * 1e3:.0f} ms against {times['raw'].seconds * 1e3:.1f} for "
                f"{size / 1e6:.0f} MB; file {(raw / _file(name)).stat().st_size / size:.2f} ×",
                details={"peer_s": one.seconds, "raw_s": times["raw"].seconds},
            )


def _file(name: str) -> str:
    return name.split(",")[0].replace(" ", "-")


def _synced(folder: Path, name: str, write: Any, events: Sequence[SegmentGenerated]) -> None:
    """With the same discipline as everything else: these formats do not sync by themselves."""
    target = folder / _file(name)
    temporary = target.with_name(f".tmp-{target.name}")
    with temporary.open("wb") as out:
        write(out, events)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(target)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


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


def _arrays(samples: Sequence[dict[str, Any]]) -> int:
    return sum(
        len(np.asarray(s["tokens"], np.int32)) + len(np.asarray(s["rollout_log_probs"], np.float32))
        for s in samples
    )


def _write_torch(out: Any, events: Sequence[SegmentGenerated]) -> None:
    torch.save({"samples": [_as_lists(e) for e in events]}, out)


def _read_torch(path: Path) -> int:
    return _arrays(torch.load(path, weights_only=False)["samples"])


def _write_jsonl(out: Any, events: Sequence[SegmentGenerated]) -> None:
    for event in events:
        out.write(json.dumps(_as_lists(event)).encode() + b"\n")


def _read_jsonl(path: Path) -> int:
    with path.open("rb") as lines:
        return _arrays([json.loads(line) for line in lines])


def _write_pickle(out: Any, events: Sequence[SegmentGenerated]) -> None:
    pickle.dump([_as_arrays(e) for e in events], out, protocol=pickle.HIGHEST_PROTOCOL)


def _read_pickle(path: Path) -> int:
    return _arrays(pickle.loads(path.read_bytes()))


_PEERS: dict[str, tuple[Any, Any]] = {
    "torch.save, dicts of lists (slime's dump)": (_write_torch, _read_torch),
    "JSONL, ids and log-probs (verl's dump)": (_write_jsonl, _read_jsonl),
    "pickle, numpy arrays": (_write_pickle, _read_pickle),
}
