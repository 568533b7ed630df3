"""Two engines that the product starts: sessions; one is killed while it samples, or is updated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from ledger.events import WeightsLoaded
from rollout.engines.sglang.member import Member
from rollout.engines.sglang.pool import PoolSettings, SGLangPool
from rollout.event_loop import EventLoopThread
from rollout.protocol import GenerationResult, SamplingParams
from rollout.weights import EngineControl, WeightUpdateSettings
from tests.sglang import reference
from tests.sglang.asking import FREE, request, until
from tests.sglang.servers import ARGUMENTS, START_TIMEOUT_S, pool_of

LONG = SamplingParams(max_new_tokens=150)


@dataclass
class Engines:
    """A pool of two, in a loop that lives as long as they do."""

    pool: SGLangPool
    loop: EventLoopThread
    loaded: list[WeightsLoaded] = field(default_factory=list)
    folders: dict[int, Path] = field(default_factory=dict)
    """Weights of each version."""

    async def take(self, version: int, folder: Path) -> None:
        """New weights, as the trainer brings them."""
        self.folders[version] = folder
        await self.pool.update_weights(version, load_file(folder / "model.safetensors").items())
        self.loaded += self.pool.loaded()
        await self.pool.release(version)

    async def both_serve(self) -> None:
        members = self.pool.members
        await until(lambda: all(member.serves for member in members), limit_s=START_TIMEOUT_S)

    def check(self, found: GenerationResult, version: int) -> None:
        """The log-probs are those of the version that it says."""
        assert found.span_versions.tolist() == [version]
        whole = np.concatenate([request(found.index).tokens, found.tokens])
        rows = np.arange(len(whole) - len(found.tokens) - 1, len(whole) - 1)
        expected = reference.log_probs(self.folders[version], whole)[rows, found.tokens]
        assert np.abs(expected - found.log_probs).max() < 1e-4


def kill(member: Member) -> None:
    """Its server and all of its processes, at once."""
    assert member.process is not None
    assert member.process.pid is not None
    os.killpg(member.process.pid, signal.SIGKILL)


def decoded(member: Member) -> int:
    assert member.process is not None
    return member.process.plan.log.read_bytes().count(b"Decode batch")


@pytest.fixture(scope="module")
def engines(
    sglang_python: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    loop = EventLoopThread("two engines")
    pool = pool_of(
        sglang_python,
        folders["dense-0"],
        tmp_path_factory.mktemp("two-engines"),
        *ARGUMENTS,
        engines=2,
        settings=PoolSettings(backoff_s=0.1),
        updates=WeightUpdateSettings(transport="tensor"),
    )
    made = Engines(pool, loop)

    async def on_loaded(events: Sequence[WeightsLoaded]) -> None:
        made.loaded += events

    async def start() -> None:
        pool.on_loaded = on_loaded
        await pool.start()
        await made.take(1, folders["dense-1"])

    try:
        loop.call(start())
        yield made
    finally:
        loop.call(pool.close())
        loop.close()


def test_a_session_stays_on_its_engine(engines: Engines) -> None:
    """And the engine has the prefix of its last turn: nothing of it is computed again."""

    async def asking() -> list[tuple[GenerationResult, GenerationResult]]:
        async def two_turns(number: int) -> tuple[GenerationResult, GenerationResult]:
            one = request(number, session_id=f"session-{number}")
            first = await engines.pool.generate(one, FREE)
            more = request(
                number,
                tokens=np.concatenate([one.tokens, first.tokens, [7, 8, 9]]),
                session_id=f"session-{number}",
                request_id=f"run.main.{number}.1",
            )
            return first, await engines.pool.generate(more, FREE)

        return await asyncio.gather(*(two_turns(number) for number in range(8)))

    found = engines.loop.call(asking())
    assert len({first.engine_address for first, _ in found}) == 2
    for first, second in found:
        assert second.engine_address == first.engine_address
        # All that was fed before: the last sampled token was not.
        assert second.cached_tokens == 12 + len(first.tokens) - 1
        engines.check(first, 1)


def test_requests_of_a_killed_engine_are_answered_once_by_the_other(engines: Engines) -> None:
    """The same ids as ever: seed and position decide. It comes back with the weights of others."""
    victim, other = engines.pool.members
    before = len(engines.loaded)

    async def sampling(suffix: str) -> list[GenerationResult]:
        calls = [
            engines.pool.generate(request(i, request_id=f"run.main.{i}.{suffix}"), LONG)
            for i in range(8)
        ]
        return await asyncio.gather(*calls)

    async def killing() -> list[GenerationResult]:
        counts = decoded(victim), decoded(other)
        running = asyncio.ensure_future(sampling("killed"))
        await until(lambda: decoded(victim) >= counts[0] + 10 and decoded(other) >= counts[1] + 10)
        kill(victim)
        return await running

    async def asking() -> tuple[list[GenerationResult], list[GenerationResult]]:
        undisturbed = await sampling("undisturbed")
        found = await killing()
        await engines.both_serve()
        return undisturbed, found

    undisturbed, found = engines.loop.call(asking())
    assert len({one.engine_address for one in undisturbed}) == 2
    assert {one.engine_address for one in found} == {other.address}
    for one, same in zip(found, undisturbed, strict=True):
        assert one.index == same.index
        assert one.tokens.tolist() == same.tokens.tolist()
        assert one.finish_reason == same.finish_reason
        engines.check(one, engines.pool.weight_version)
    assert [(one.reason, one.engine_address) for one in engines.loaded[before:]] == [
        ("restored", victim.address)
    ]
    again = engines.loop.call(sampling("again"))
    assert {one.engine_address for one in again} == {victim.address, other.address}
    for one in again:
        engines.check(one, engines.pool.weight_version)


def test_an_engine_killed_in_an_update_gets_the_version_before_traffic(
    engines: Engines, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has it, so that the update holds."""
    victim = engines.pool.members[1]
    version = engines.pool.weight_version + 1
    before = len(engines.loaded)
    killed: list[str] = []
    post = EngineControl.post

    async def killing(self: EngineControl, path: str, *arguments: Any) -> Any:
        if path == "/update_weights_from_tensor" and self.address == victim.address:
            kill(victim)
            killed.append(self.address)
        return await post(self, path, *arguments)

    monkeypatch.setattr(EngineControl, "post", killing)

    async def asking() -> list[GenerationResult]:
        await engines.take(version, folders["dense-0"])
        monkeypatch.undo()
        await engines.both_serve()
        return await asyncio.gather(*(engines.pool.generate(request(i), FREE) for i in range(8)))

    found = engines.loop.call(asking())
    assert len(killed) == 1
    assert [(one.reason, one.weight_version) for one in engines.loaded[before:]] == [
        ("published", version),
        ("restored", version),
    ]
    assert {one.engine_address for one in found} == {m.address for m in engines.pool.members}
    for one in found:
        engines.check(one, version)
