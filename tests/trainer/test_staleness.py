"""The bound on staleness is held against the recorded tokens, whatever the decisions say."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench
from trainer.staleness import require_fresh


def test_a_batch_with_a_token_that_is_too_old_is_refused() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5 if index < 4 else 40)
        coordinator = bench.coordinator(
            RolloutShape(partial_rollout=True), over_sampling_batch_size=4
        )
        await bench.run(coordinator.rollout(0, 0))
        await bench.new_version(coordinator, 3)
        await bench.run(coordinator.rollout(1, 3))
        reader = bench.ledger.reader("run")
        kept = np.arange(4, 8)
        # Their first tokens are of version 0, the others of version 3.
        require_fresh(reader, kept, consumer_version=3, bound=3)
        with pytest.raises(InvalidArgument, match=r"tokens of version 0, 3 versions older"):
            require_fresh(reader, kept, consumer_version=3, bound=2)
        require_fresh(reader, np.arange(4), consumer_version=0, bound=0)
        await coordinator.close()
        bench.engine = bench.new_engine(weight_version=-1)
        nameless = bench.coordinator()
        summary = await bench.run(nameless.rollout(2, 4))
        with pytest.raises(InvalidArgument, match="did not say"):
            require_fresh(
                bench.ledger.reader("run"), summary.kept_indices, consumer_version=4, bound=9
            )
        await nameless.close()
        bench.ledger.close()

    asyncio.run(go())
