"""A process that makes asynchronous rollouts until it is killed; see test_buffer_sigkill.py."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

from rollout.engines.scripted_async import ManualClock
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench


class WallClock(ManualClock):
    """A clock that goes by itself, a thousand times as fast."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 1000)
        self.now += seconds


async def main(uri: str, steps: int) -> None:
    bench = Bench(lambda index: 60 if index % 7 == 3 else 4 + index % 5, uri=uri)
    bench.clock = WallClock()
    bench.engine = bench.new_engine()
    coordinator: Any = bench.coordinator(
        RolloutShape(fully_async=True, max_weight_staleness=3), executor=None
    )
    for step in range(steps):
        await coordinator.rollout(step, step)
        print(f"step {step}", flush=True)
        named = [("w", np.full(1, step + 1, np.float32))]
        await coordinator.update_weights(step + 1, named)
        await coordinator.release(step + 1)
    await coordinator.close()
    bench.ledger.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
