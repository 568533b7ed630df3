"""Up to 1,000 engines of 256 requests each: what saturates first, the writer, the catalog or the
store.

What the engines offer is computed from a trace of lengths and a speed; what a writer, the catalog
and the store take is measured here, with real appends of the sizes that such a rollout makes. Then
the sink gets the load of a part of the engines, at the times at which they would end their samples,
to see that it holds below the computed limit and falls behind above it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ledger import Ledger
from ledger.events import SampleDecided, SegmentGenerated
from ledger.fields import Event
from ledger.writer import Writer
from rollout.sink import EventSink
from tests.bench.crowds import segments
from tests.bench.figures import Figure
from tests.bench.samples import emptied, new_ledger, scored, write_durably
from tests.bench.simulated import read_lengths

__all__ = ["Capacity", "Offer", "engine_figures"]

GROUP = "1,000 engines × 256 requests"
ENGINES, REQUESTS, TOKEN_S = 1000, 256, 0.02
"""A request of a full engine gets 50 tokens a second: 12,800 tokens a second and engine."""
_BYTES_PER_TOKEN = 8
_SHARD_ENGINES = 8
"""Engines of one writer, where there are many: those of a machine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one engine makes in a second."""

    samples: float
    tokens: float

    @property
    def bytes(self) -> float:
        """Of ids and log-probs."""
        return self.tokens * _BYTES_PER_TOKEN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What was measured on this machine."""

    append_s: float
    """Seconds of an append of one sample."""
    sample_s: float
    """Seconds a sample, its segment, its score and its decision, in a large append."""
    commit_s: float
    """Seconds that the catalog is busy with a commit among many, which share its transaction."""
    store_bytes_per_s: float

    def writer(self, offer: Offer) -> float:
        """Engines at which one writer is always busy: its appends are large then."""
        return 1 / self.sample_s / offer.samples

    def store(self, offer: Offer) -> float:
        """Engines at which the store is always busy."""
        return self.store_bytes_per_s / offer.bytes

    def catalog(self, offer: Offer, engines_a_writer: float) -> float:
        """Engines at which the catalog is always busy, with a writer for so many engines.

        A writer appends again when its last append is stored: the busier it is the fewer appends
        it makes. An append takes the time that it took, and holds what came meanwhile.
        """
        a_writer = engines_a_writer * offer.samples
        busy = a_writer * self.sample_s
        if busy >= 1:
            return float("inf")  # the writers are full before
        # n samples an append: n = rate · (append_s + n · sample_s), never less than one.
        samples = a_writer * self.append_s / (1 - busy)
        commits = a_writer / max(samples, 1.0)
        return engines_a_writer / (commits * self.commit_s)


def engine_figures(folder: Path, lengths_file: Path | None, *, quick: bool) -> Iterator[Figure]:
    """One writer for all engines; a writer for each eight; and the load played on the real sink."""
    lengths = read_lengths(lengths_file)
    mean = float(np.mean(lengths))
    tokens = REQUESTS / TOKEN_S
    offer = Offer(samples=tokens / mean, tokens=tokens)
    found = _measure(folder, round(mean), quick)
    one = {
        "writer": found.writer(offer),
        "store": found.store(offer),
        "catalog": found.catalog(offer, ENGINES),
    }
    per_writer = min(_SHARD_ENGINES, one["writer"])
    many = {
        "writers": float("inf"),
        "store": found.store(offer),
        "catalog": found.catalog(offer, per_writer),
    }
    details = dataclasses.asdict(found) | {
        "samples_per_engine_s": offer.samples,
        "tokens_per_engine_s": offer.tokens,
        "events_per_engine_s": 3 * offer.samples,
        "mean_tokens": mean,
    }
    for name, limits in (
        ("one writer for all", one),
        (f"a writer for each {per_writer:.0f} engines", many),
    ):
        first = min(limits, key=limits.__getitem__)
        said = ", ".join(f"{k} {_count(v)}" for k, v in sorted(limits.items(), key=lambda x: x[1]))
        yield Figure(
            group=GROUP,
            name=name,
            against=f"{ENGINES:,} engines",
            ratio=limits[first] / ENGINES,
            note=f"{first} saturates first, at {_count(limits[first])} engines ({said}); "
            f"{ENGINES:,} offer {3 * offer.samples * ENGINES:,.0f} events and "
            f"{offer.bytes * ENGINES / 1e6:,.0f} MB a second, samples of {mean:,.0f} tokens",
            details=details | {f"{k}_engines": v for k, v in limits.items() if np.isfinite(v)},
        )
    yield from _played(folder, lengths, offer, min(one["writer"], one["store"]), quick)


def _count(engines: float) -> str:
    return f"{engines:,.0f}" if np.isfinite(engines) else "none"


def _events(like: Sequence[SegmentGenerated], numbers: Iterator[int]) -> list[Event]:
    """What the end of a sample adds: its segment, its score, its decision."""
    made: list[Event] = []
    for one in like:
        index = next(numbers)
        made += [
            dataclasses.replace(one, index=index, rollout_id=index, group_index=index // 8),
            scored(index),
            SampleDecided(
                index=index,
                rollout_id=index,
                group_index=index // 8,
                rollout_step=0,
                decision="kept",
                reason="",
                rule="bench",
            ),
        ]
    return made


def _measure(folder: Path, tokens: int, quick: bool) -> Capacity:
    sizes = (1, 16) if quick else (1, 256)
    repetitions = 3 if quick else 7
    numbers = itertools.count()
    like = segments(8, tokens)
    times: dict[int, float] = {}
    with new_ledger(emptied(folder / "appends")) as (_, writer):
        for size in sizes:
            taken = []
            for _ in range(repetitions):
                events = _events(list(itertools.islice(itertools.cycle(like), size)), numbers)
                began = time.perf_counter()
                writer.append(events)
                taken.append(time.perf_counter() - began)
            times[size] = min(taken[1:])  # what the machine can, when nobody else uses it
    small, large = sizes
    return Capacity(
        append_s=times[small],
        sample_s=times[large] / large,
        commit_s=_commit_s(folder / "commits", 128 if quick else 1024),
        store_bytes_per_s=_store_bytes_per_s(emptied(folder / "raw"), 2 if quick else 8),
    )


def _commit_s(folder: Path, count: int) -> float:
    """Seconds of a commit among many of one transaction, as writers of many machines make them."""
    from ledger.appending import Appending, by_kind, hash_packed, pack
    from ledger.catalog.commit import commit_all

    with new_ledger(emptied(folder)) as (ledger, writer):
        appends = [Appending(writer, i + 1, events=by_kind([scored(i)])) for i in range(count)]
        packs, _ = pack(appends, ledger.lookup(writer.run_id))
        for one in packs:
            ledger.store.put_hashed([(path, b"".join(pieces)) for path, pieces in one.files])
            hash_packed(one)
        pending = [one.pending for one in appends if one.pending is not None]
        taken = []
        for at in range(0, count, 64):
            began = time.perf_counter()
            commit_all(ledger.catalog, writer.run_id, pending[at : at + 64])
            taken.append((time.perf_counter() - began) / len(pending[at : at + 64]))
    return min(taken)


def _store_bytes_per_s(folder: Path, count: int) -> float:
    """What the disk takes in files of 16 MB that are synced; of 1 MB in a few."""
    data = os.urandom((1 if count < 4 else 16) << 20)
    taken = []
    for number in range(count):
        began = time.perf_counter()
        write_durably(folder, f"{number}", [data])
        taken.append(time.perf_counter() - began)
    return len(data) / min(taken)


def _played(
    folder: Path, lengths: Sequence[int], offer: Offer, limit: float, quick: bool
) -> Iterator[Figure]:
    """The real sink under the load of half, and of twice, the engines that it should hold."""
    seconds = 0.2 if quick else 4.0
    for part in (0.5, 2.0):
        engines = limit * part
        with new_ledger(emptied(folder / f"played-{part}")) as (ledger, writer):
            behind, done, busy = asyncio.run(
                _play(ledger, writer, lengths, engines * offer.samples, seconds)
            )
        yield Figure(
            group=GROUP,
            name=f"played: {engines:,.0f} engines, {part:g} × the limit",
            against="samples offered meanwhile",
            ratio=done,
            note=f"{done:.0%} of the samples were stored when the last one was offered; the queue "
            f"grew by {behind:,.0f} a second; {busy:,.0f} samples a commit",
            details={"engines": engines, "stored_share": done, "queue_growth_per_s": behind},
        )


async def _play(
    ledger: Ledger, writer: Writer, lengths: Sequence[int], rate: float, seconds: float
) -> tuple[float, float, float]:
    """Growth of the queue a second, the share that was stored in time, and samples a commit."""
    sink = EventSink(writer.append)
    numbers = itertools.count()
    count = max(8, int(rate * seconds))
    kinds = [segments(1, length)[0] for length in lengths[:64]]
    random = np.random.default_rng(3)
    due = np.sort(random.uniform(0, seconds, count))
    waiting: set[asyncio.Task[None]] = set()
    stored = [0]

    async def one(events: list[Event]) -> None:
        await sink.append(events)
        stored[0] += 1

    events = [_events([kinds[i % len(kinds)]], numbers) for i in range(count)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    for at, sample in zip(due.tolist(), events, strict=True):
        await asyncio.sleep(max(0.0, began + at - loop.time()))
        task = asyncio.ensure_future(one(sample))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    took = max(loop.time() - began, seconds)
    in_time = stored[0]
    await asyncio.gather(*waiting)
    await sink.close()
    return (count - in_time) / took, in_time / count, count / max(1, sink.appends)
