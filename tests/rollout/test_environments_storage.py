"""Fifty turns: storage grows by the same for each, and the writer's memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import numpy as np

from ledger import open_ledger
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.turns import PlainTurns
from rollout.sink import EventSink
from tests.rollout.agents import begun, speaking
from tests.rollout.test_environments import Counting
from tests.rollout.test_worker import published

TURNS, FIRST = 50, 5
BEGIN, END = 15, 45
"""Turns between which memory is compared: by 15, caches are full."""


class Talks(Counting):
    """The same number of tokens each turn, and a look at what is stored by then."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def step(self, action):
        self.look()
        return super().step(action)


def test_fifty_turns_grow_linearly_and_memory_stays_flat(tokenizer, tmp_path, capsys):
    sizes, held = [], []

    def look():
        stored = [path.stat().st_size for path in (tmp_path / "l").rglob("*.arrow")]
        sizes.append(sum(stored))
        if len(sizes) == BEGIN:
            tracemalloc.start()
        if BEGIN <= len(sizes) <= END:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    async def main():
        with open_ledger(tmp_path / "l", create=True) as ledger:
            ledger.create_run("run")
            with ledger.writer("run", producer="test") as writer:
                writer.append([published(0)])
                sink = EventSink(writer.append)
                engine = speaking(tokenizer, "a" * 99, weight_version=0)
                engine.requests = Nothing()
                function = EnvironmentEpisode(
                    "test",
                    lambda: Talks(look),
                    PlainTurns(tokenizer),
                    EpisodeLimits(max_turns=TURNS),
                )
                episode = begun(tokenizer, engine, sink, max_new_tokens=100)
                try:
                    await function(episode)
                finally:
                    tracemalloc.stop()
                await sink.close()
                return episode.trajectory

    trajectory = asyncio.run(main())
    assert len(trajectory.segments) == TURNS
    grown = np.diff(sizes)[FIRST:]
    # The median: a statement that SQLAlchemy meets for the first time is kept, once.
    kept = float(np.median(np.diff(held)))
    # Ids and log-probs of the trajectory itself, which its driver holds.
    own = sum(len(piece.tokens) for piece in trajectory.pieces) * 8 / TURNS
    with capsys.disabled():
        print(
            f"\nbytes a turn: {grown.min()} to {grown.max()} stored; in memory "
            f"{kept:.0f}, of which ids and log-probs are {own:.0f}"
        )
    # Of 100 sampled tokens and some of the environment: the same in turn 5 and in turn 50.
    assert grown.max() - grown.min() <= 0.02 * grown.mean()
    # If each turn held the ids before it, it would be 12,000 in the middle of turns 15 to 45.
    assert kept < 6000


class Nothing(list):
    """Keeps no request: each has all tokens before it."""

    def append(self, one):
        pass
