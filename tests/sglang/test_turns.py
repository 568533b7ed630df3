"""Fifty turns with a real engine: each call stores its own tokens, and computes no prefix again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ledger import open_ledger
from rollout.episode import Episode
from rollout.sink import EventSink
from tests.rollout.agents import begun
from tests.rollout.test_worker import published
from tests.sglang.models import byte_tokenizer
from tests.sglang.servers import Served, pool_of
from tests.sglang.training import rows

TURNS, OBSERVED = 50, [7, 8, 9]


def test_fifty_turns_store_and_compute_each_token_once(moe: Served, tmp_path: Path) -> None:
    sizes: list[int] = []

    async def turns() -> Episode:
        pool = pool_of("", moe.model, tmp_path, urls=[moe.address])
        await pool.start()
        with open_ledger(tmp_path / "ledger", create=True) as ledger:
            ledger.create_run("run")
            with ledger.writer("run", producer="test") as writer:
                writer.append([published(0)])
                sink = EventSink(writer.append)
                episode = begun(byte_tokenizer(), pool, sink, max_new_tokens=4)
                for _ in range(TURNS):
                    await episode.generate()
                    await episode.observe(np.array(OBSERVED, np.int32), "environment")
                    stored = (tmp_path / "ledger").rglob("*.arrow")
                    sizes.append(sum(path.stat().st_size for path in stored))
                await sink.close()
        await pool.close()
        return episode

    episode = asyncio.run(turns())
    grown = np.diff(sizes)[5:]
    assert grown.max() - grown.min() <= 0.05 * grown.mean()
    with open_ledger(tmp_path / "ledger") as ledger:
        segments = rows(ledger, "select * from segment_generated order by segment")
        routed = rows(ledger, "select * from routing_recorded order by segment")
    prompt = len(episode.trajectory.prompt_tokens)
    assert len(segments) == len(routed) == TURNS
    fed = 0
    for segment, routing in zip(segments, routed, strict=True):
        new = len(segment["tokens"])
        assert segment["start"] == segment["turn"] * len(OBSERVED) + sum(
            len(one["tokens"]) for one in segments[: segment["segment"]]
        )
        # Rows of the experts begin where those of the turn before end: the last token's is new.
        assert (routing["start"], routing["rows"]) == (
            fed,
            prompt + segment["start"] + new - 1 - fed,
        )
        # The prefix cache had all that was fed before.
        assert segment["cached_tokens"] == fed
        fed += routing["rows"]
