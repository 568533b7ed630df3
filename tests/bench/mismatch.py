"""The question that joins two events token by token, as docs/queries.md asks it, against numpy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ledger import open_ledger
from ledger.reader import Reader
from tests.bench.episodes import make_step, text
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import RUN, emptied, new_ledger

__all__ = ["documented_query", "mismatch_figures", "same_answer", "write_training"]

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_QUERIES = Path(__file__).parents[2] / "docs" / "queries.md"


def documented_query(about: str) -> str:
    """The first SQL under the first heading of docs/queries.md that contains `about`."""
    found = re.search(
        rf"^## [^\n]*{about}.*?^```sql\n(.*?)^```", _QUERIES.read_text(), re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise LookupError(f"no SQL under a heading with {about!r} in {_QUERIES}")
    return found.group(1)


def write_training(
    folder: Path, steps: int, different: int, *, samples: int = 128, response: int = 2000
) -> None:
    """A ledger of `steps` steps, each of `samples` responses of about `response` tokens.

    `different` of the tokens are drawn; then the same come again.
    """
    random = np.random.default_rng(0)
    source = text(different, random)
    with new_ledger(folder) as (_, writer):
        for number in range(steps):
            step = make_step(number, source, random, samples=samples, response=response)
            for events in step.appends():
                writer.append(events)


def mismatch_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """The 20 samples with the largest mismatch, of a ledger that is open and has been read."""
    root = emptied(folder / "ledger")
    write_training(root, 1 if quick else 4, 1 << 17)
    query = documented_query("mismatch")
    with open_ledger(root) as ledger:
        bare = same_answer(ledger.reader(RUN), query)
        times = interleaved(
            {
                "numpy": lambda: _by_numpy(*bare),
                "ledger": lambda: ledger.reader(RUN).sql(query),
            },
            3 if quick else 9,
        )
    one, numpy = times["ledger"], times["numpy"]
    tokens = len(bare[0])
    yield Figure(
        group="a question that joins two events",
        name=f"the 20 largest mismatches, {tokens / 1e6:.1f} M tokens",
        against="numpy on bare arrays",
        ratio=numpy.seconds / one.seconds,
        goal=0.15,
        mb_per_s=9 * tokens / 1e6 / one.seconds,
        mb_per_cpu_s=9 * tokens / 1e6 / one.cpu_seconds,
        note=f"{one.seconds * 1e3:.0f} ms against {numpy.seconds * 1e3:.0f}, CPU "
        f"{one.cpu_seconds * 1e3:.0f} ms against {numpy.cpu_seconds * 1e3:.0f}; the query of "
        "docs/queries.md, same answer; ledger open and read before",
        details={
            "ledger_s": one.seconds,
            "numpy_s": numpy.seconds,
            "ledger_cpu_s": one.cpu_seconds,
            "numpy_cpu_s": numpy.cpu_seconds,
            "tokens": tokens,
        },
    )


def same_answer(reader: Reader, query: str) -> Arrays:
    """The bare arrays that numpy answers from. Raises RuntimeError where SQL says otherwise."""
    bare = _bare_arrays(reader)
    answer, wanted = reader.sql(query), _by_numpy(*bare)
    for name in ("index", "largest", "tokens"):
        found = answer.column(name).to_numpy()
        if not np.array_equal(found, wanted[name]):
            raise RuntimeError(f"{name}: SQL says {found}, numpy says {wanted[name]}")
    if not np.allclose(answer.column("mean").to_numpy(), wanted["mean"]):
        raise RuntimeError("the means differ")
    return bare


def _bare_arrays(reader: Reader) -> Arrays:
    """[N] log-probs of engine (NaN where nothing was sampled) and trainer, [N] mask, [S] starts."""
    signals = reader.table("signal_recorded").combine_chunks()
    lengths = np.diff(_offsets(signals, "loss_mask"))
    starts = np.cumsum(lengths) - lengths
    trained = _flat(signals, "log_probs")
    mask = _flat(signals, "loss_mask")
    engine = np.full(len(mask), np.nan, np.float32)
    pieces = reader.table("segment_generated").combine_chunks()
    values, offsets = _flat(pieces, "rollout_log_probs"), _offsets(pieces, "rollout_log_probs")
    place = dict(zip(signals.column("index").to_pylist(), starts.tolist(), strict=True))
    for row, (index, start) in enumerate(
        zip(pieces.column("index").to_pylist(), pieces.column("start").to_pylist(), strict=True)
    ):
        piece = values[offsets[row] : offsets[row + 1]]
        engine[place[index] + start : place[index] + start + len(piece)] = piece
    return engine, trained, mask, starts


def _flat(table: pa.Table, name: str) -> np.ndarray:
    values: np.ndarray = table.column(name).chunk(0).flatten().to_numpy()
    return values


def _offsets(table: pa.Table, name: str) -> np.ndarray:
    offsets: np.ndarray = table.column(name).chunk(0).offsets.to_numpy()
    return offsets


def _by_numpy(
    engine: np.ndarray, trained: np.ndarray, mask: np.ndarray, starts: np.ndarray
) -> dict[str, Any]:
    differences = np.abs(trained - engine)
    valid = (mask == 1) & np.isfinite(differences)
    differences[~valid] = 0
    largest = np.maximum.reduceat(differences, starts)
    counts = np.add.reduceat(valid, starts, dtype=np.int64)
    means = np.add.reduceat(differences, starts, dtype=np.float64) / counts
    top = np.lexsort((np.arange(len(starts)), -largest))[:20]
    return {"index": top, "largest": largest[top], "mean": means[top], "tokens": counts[top]}
