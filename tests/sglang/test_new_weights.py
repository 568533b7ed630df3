"""What a real engine samples after the product brought it weights, or failed to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from ledger.errors import Diverged
from ledger.events import WeightsLoaded
from rollout.protocol import GenerationResult
from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings
from tests.sglang import reference
from tests.sglang.asking import FREE, client_of, request
from tests.sglang.proxy import proxy
from tests.sglang.servers import Served

BUFFER = 100_000
"""Bytes of a chunk: a version of these models is several of them."""


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, under canonical Hugging Face names."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@asynccontextmanager
async def updating(
    server: Served, address: str | None = None, **settings: Any
) -> AsyncIterator[tuple[WeightUpdater, EngineControl, list[WeightsLoaded]]]:
    """An updater of one engine, the engine, and the events that were recorded."""
    config = json.loads((server.model / "config.json").read_text())
    updater = WeightUpdater(WeightUpdateSettings(buffer_size=BUFFER, **settings), config)
    events: list[WeightsLoaded] = []

    async def record(some: Sequence[Any]) -> None:
        events.extend(some)

    updater.record = record
    engine = EngineControl(address or server.address, local=True)
    try:
        yield updater, engine, events
    finally:
        await updater.close()
        await engine.close()


async def sampled(server: Served, number: int) -> GenerationResult:
    async with client_of(server.address, server.model) as client:
        return await client.generate(request(number), FREE, rid=f"{number}~0~")


def check_sampled(found: GenerationResult, number: int, version: int, folder: Path) -> None:
    """It says this version, and has the log-probs of these weights."""
    assert found.span_versions.tolist() == [version]
    whole = np.concatenate([request(number).tokens, found.tokens])
    rows = np.arange(len(whole) - len(found.tokens) - 1, len(whole) - 1)
    expected = reference.log_probs(folder, whole)[rows, found.tokens]
    assert np.abs(expected - found.log_probs).max() < 1e-4


@pytest.mark.parametrize(
    ("transport", "kind"), [("tensor", "dense"), ("disk", "moe"), ("distributed", "moe")]
)
def test_what_is_sampled_after_an_update_is_sampled_from_the_new_weights(
    transport: str, kind: str, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """The engine's own checksums are those that the tensors give, and it samples from them.

    The same request before and after: what the prefix cache held of it is not used again.
    """
    server: Served = request.getfixturevalue(kind)
    new = folders[f"{kind}-1"]

    async def updates() -> tuple[list[GenerationResult], list[WeightsLoaded]]:
        async with updating(server, transport=transport) as (updater, engine, events):
            before = await sampled(server, 1)
            records = await updater.update([engine], 7, weights_of(new).items())
            assert {record.name for record in records} == set(weights_of(new))
            assert events == []
            await updater.release(7)
            after = await sampled(server, 1)
            return [before, after], events

    (before, after), (event,) = asyncio.run(updates())
    check_sampled(before, 1, 0, folders[f"{kind}-0"])
    check_sampled(after, 1, 7, new)
    assert event.weight_version == 7
    assert event.transport == transport
    assert server.call("/model_info")["weight_version"] == "7"
    whole = server.call("/weights_checker", {"action": "checksum"})["per_engine_checksum"]
    assert event.engine_checksum == whole


@pytest.mark.parametrize("served", ["its first weights", "a version of ours"])
def test_a_chunk_that_got_lost_is_found_and_the_old_version_served(
    served: str, dense: Served, folders: dict[str, Path]
) -> None:
    """Everybody said success: only the engine's checksums tell."""
    lost = {"count": 0, "from": 0}

    def swallow(path: str) -> bool:
        if path != "/update_weights_from_tensor":
            return False
        lost["count"] += 1
        return lost["count"] == lost["from"]

    async def updates(address: str) -> list[WeightsLoaded]:
        async with updating(dense, address, transport="tensor") as (updater, engine, events):
            if served == "a version of ours":
                await updater.update([engine], 1, weights_of(folders["dense-0"]).items())
                await updater.release(1)
            lost["from"] = lost["count"] + 2
            with pytest.raises(Diverged, match=r"model\.\S+ on rank 0 of 1: \w+ expected"):
                await updater.update([engine], 2, weights_of(folders["dense-1"]).items())
            assert updater.unusable == {}
            return events

    with proxy(dense.port, swallow=swallow) as address:
        events = asyncio.run(updates(address))
    version = 1 if served == "a version of ours" else 0
    assert [event.weight_version for event in events] == [1] * version
    assert dense.call("/model_info")["weight_version"] == str(version)
    check_sampled(asyncio.run(sampled(dense, 3)), 3, version, folders["dense-0"])
