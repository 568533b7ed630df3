"""A client and a pool of them against servers that misbehave: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from ledger.errors import Conflict, Diverged, EngineFailed, InvalidArgument
from ledger.events import UNKNOWN_VERSION
from rollout.engines.sglang import pool as pool_module
from rollout.engines.sglang.affinity import HashRing
from rollout.engines.sglang.client import Refused, SGLangClient, Unreachable
from rollout.engines.sglang.keeper import PoolSettings
from rollout.engines.sglang.member import Member
from rollout.engines.sglang.pool import SGLangPool
from rollout.engines.synchronous import SynchronousEngine
from rollout.event_loop import EventLoopThread
from rollout.protocol import GenerationRequest, SamplingParams
from tests.rollout.sglang_server import DENSE, MOE, FakeSGLang

_T = TypeVar("_T")
PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(2,))
QUICK = PoolSettings(
    attempts=3, backoff_s=0.001, health_interval_s=0.01, health_timeout_s=5.0, patience_s=20.0
)


def request(index: int = 0, tokens: Sequence[int] = (5, 6, 7), **more: Any) -> GenerationRequest:
    more.setdefault("request_id", f"r{index}")
    return GenerationRequest(
        index=index, tokens=np.array(tokens, np.int32), seed=100 + index, **more
    )


def start(work: Awaitable[_T]) -> asyncio.Task[_T]:
    return asyncio.ensure_future(work)  # type: ignore[return-value]


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; what does not come within seconds fails the test."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 20, "the condition does not come true"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def pool_of(
    *servers: FakeSGLang,
    settings: PoolSettings = QUICK,
    places: int = 64,
    updates: Any = None,
    **options: Any,
) -> AsyncIterator[SGLangPool]:
    """A started pool that is attached to servers, which are started too."""
    for server in servers:
        if not server.port:
            await server.__aenter__()
    model = servers[0].model
    members = [
        Member(
            number=number,
            connect=lambda address: SGLangClient(address, model, **options),
            slots=asyncio.Semaphore(places),
            url=server.address,
        )
        for number, server in enumerate(servers)
    ]
    made = SGLangPool(
        members,
        settings,
        model=model,
        updates=updates,
        control=None if updates is None else lambda member: FakeControl(member.address),
    )
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        for server in servers:
            await server.__aexit__()


def run(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())


# One server


def test_an_id_outside_the_vocabulary_is_refused_and_the_server_lives() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            client = server.client()
            await client.open()
            for tokens in ([5, 64], [5, -1], []):
                with pytest.raises(InvalidArgument):
                    await pool.generate(request(tokens=tokens), PARAMS)
                with pytest.raises(InvalidArgument):
                    await client.generate(request(tokens=tokens), PARAMS, rid="r")
            await client.close()
            with pytest.raises(InvalidArgument, match=r"121 \+ 6"):
                await pool.generate(request(tokens=[5] * 121), PARAMS)
            assert server.bodies == []
            longest = await pool.generate(request(tokens=[5] * 120), PARAMS)
            assert len(longest.tokens) == 6

    run(check)


def test_what_a_server_is_told_and_says() -> None:
    async def check() -> None:
        async with FakeSGLang(MOE) as server, pool_of(server) as pool:
            assert (pool.name, pool.version, pool.weight_version) == ("sglang", "0.5.23", 7)
            result = await pool.generate(request(session_id="s", routing_start=1), PARAMS)
            assert result.expert_ids is not None
            assert result.expert_ids.shape == (3 + 6 - 1 - 1, 2, 2)
            assert result.engine_address == server.address
            assert server.bodies[0]["rid"] == "r0~0~"
            assert server.bodies[0]["session_id"] == "s"

    run(check)


def test_a_model_with_experts_whose_server_does_not_report_them() -> None:
    async def check() -> None:
        server = FakeSGLang(MOE)
        server.info["enable_return_routed_experts"] = False
        async with pool_of(server) as pool:
            result = await pool.generate(request(), PARAMS)
            assert "return_routed_experts" not in server.bodies[0]
            assert result.expert_ids is None

    run(check)


def test_seeds_that_do_not_count_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        server = FakeSGLang()
        server.info["enable_deterministic_inference"] = False
        async with pool_of(server) as pool:
            for i in range(3):
                await pool.generate(request(i), PARAMS)

    with caplog.at_level(logging.WARNING):
        run(check)
    said = [r.getMessage() for r in caplog.records if "ignores the seeds" in r.getMessage()]
    assert len(said) == 1


def test_an_unknown_version_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        server = FakeSGLang(weight_version="default")
        async with pool_of(server) as pool:
            assert pool.weight_version == UNKNOWN_VERSION
            for i in range(3):
                result = await pool.generate(request(i), PARAMS)
                assert result.span_versions.tolist() == [UNKNOWN_VERSION]

    with caplog.at_level(logging.WARNING):
        run(check)
    assert len([r for r in caplog.records if "recorded as unknown" in r.getMessage()]) == 1


def test_a_request_for_control() -> None:
    async def check() -> None:
        async with FakeSGLang() as server:
            client = server.client()
            await client.open()
            assert await client.weight_version() == 7
            await client.pause("retract")
            await client.resume()
            await client.flush_cache()
            assert server.calls == ["/pause_generation", "/continue_generation", "/flush_cache"]
            with pytest.raises(Refused, match="said no"):
                await client.call("/refused", {})
            await client.health(generate=True)
            server.healthy = False
            with pytest.raises(Unreachable, match="503"):
                await client.health()
            await client.close()

    run(check)


# Answers that do not come


def times(count: int, do: Callable[[], Awaitable[web.StreamResponse | None]]) -> Any:
    """A server's `before` that does it for the first requests only."""
    left = [count]

    async def before(body: dict[str, Any]) -> web.StreamResponse | None:
        if left[0] > 0:
            left[0] -= 1
            return await do()
        return None

    return before


async def broken() -> web.StreamResponse:
    return web.Response(status=500, text="scheduler on fire")


async def busy() -> web.StreamResponse:
    return web.Response(status=503)


async def no_json() -> web.StreamResponse:
    return web.Response(text="<html>")


async def reset() -> web.StreamResponse:
    """The connection ends in the middle of the answer."""
    return Cut()


class Cut(web.StreamResponse):
    async def prepare(self, request: web.BaseRequest) -> Any:
        self.content_length = 1000
        await super().prepare(request)
        await self.write(b'{"output_ids": [1, 2')
        assert request.transport is not None
        request.transport.abort()


@pytest.mark.parametrize("fault", [broken, busy, no_json, reset], ids=lambda f: f.__name__)
def test_a_request_without_an_answer_is_sent_again_under_another_name(fault: Any) -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            plain = await pool.generate(request(), PARAMS)
            server.bodies.clear()
            server.before = times(2, fault)
            again = await pool.generate(request(), PARAMS)
            assert [body["rid"] for body in server.bodies] == ["r0~0~", "r0~1~", "r0~2~"]
            assert {body["sampling_params"]["sampling_seed"] for body in server.bodies} == {100}
            assert again.tokens.tolist() == plain.tokens.tolist()
            assert again.request_id == "r0"

    run(check)


def test_a_request_that_hangs_is_ended_before_it_is_sent_again() -> None:
    async def check() -> None:
        server = FakeSGLang()
        hangs = asyncio.Event()

        async def hang() -> None:
            await hangs.wait()

        server.before = times(1, hang)
        async with pool_of(server, request_timeout_s=0.1) as pool:
            result = await pool.generate(request(), PARAMS)
            assert len(result.tokens) == 6
            await until(lambda: server.aborts)
            assert server.aborts == ["r0~0~"]
            # The first one ends after all: nobody hears it.
            hangs.set()
            await until(lambda: not server.running)
            assert [body["rid"] for body in server.bodies] == ["r0~0~", "r0~1~"]

    run(check)


def test_after_all_attempts_each_one_is_told() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.before = times(99, broken)
            with pytest.raises(EngineFailed, match=r"(?s)request r0.*within 3 attempts") as failed:
                await pool.generate(request(), PARAMS)
            assert str(failed.value).count("scheduler on fire") == 3
            assert len(server.bodies) == 3
            server.before = None
            assert len((await pool.generate(request(), PARAMS)).tokens) == 6

    run(check)


def test_what_is_refused_is_not_asked_again() -> None:
    async def refuse() -> web.StreamResponse:
        return web.json_response({"error": {"message": "unknown field `x`"}}, status=400)

    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.before = times(99, refuse)
            with pytest.raises(Refused, match="unknown field"):
                await pool.generate(request(), PARAMS)
            assert len(server.bodies) == 1

    run(check)


def test_a_broken_promise_is_named_after_other_attempts() -> None:
    def forget(_: Any, answer: Any) -> Any:
        answer["meta_info"].pop("routed_experts")
        return answer

    async def check() -> None:
        async with FakeSGLang(MOE) as one, FakeSGLang(MOE) as other, pool_of(one, other) as pool:
            one.change = forget
            for i in range(6):
                result = await pool.generate(request(i), PARAMS)
                assert result.engine_address == other.address
            other.change = forget
            with pytest.raises(EngineFailed, match="--enable-return-routed-experts"):
                await pool.generate(request(9), PARAMS)

    run(check)


def test_the_request_of_a_process_that_died_is_ended_and_asked_anew() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.hold = asyncio.Event()
            before = server.client()
            await before.open()
            dead = start(before.generate(request(), PARAMS, rid="r0~0~"))
            await until(lambda: server.running)
            mine = start(pool.generate(request(), PARAMS))
            await until(lambda: "r0~1~" in server.running)
            assert "r0~0~" in server.aborts
            server.hold.set()
            assert len((await mine).tokens) == 6
            assert (await dead).finish_reason == "abort"
            await before.close()

    run(check)


# Aborts


def test_an_abort_ends_a_request_with_what_it_has() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.hold = asyncio.Event()
            tasks = [start(pool.generate(request(i), PARAMS)) for i in (1, 10)]
            await until(lambda: len(server.running) == 2)
            await pool.abort(["r1", "nobody"])
            part = await tasks[0]
            assert (part.finish_reason, len(part.tokens)) == ("abort", 3)
            # A name that begins with the aborted one goes on.
            assert not tasks[1].done()
            await pool.abort()
            assert len((await tasks[1]).tokens) == 3

    run(check)


def test_an_abort_that_a_server_forgets_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_AGAIN_S", 0.01)

    async def check() -> None:
        server = FakeSGLang()
        server.deaf = 3
        async with pool_of(server) as pool:
            server.hold = asyncio.Event()
            task = start(pool.generate(request(), PARAMS))
            await until(lambda: server.running)
            await pool.abort()
            assert (await task).finish_reason == "abort"
            assert server.aborts == ["r0~0~"] * 4

    run(check)


def test_an_abort_before_the_request_was_sent() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server, places=1) as pool:
            server.hold = asyncio.Event()
            tasks = [start(pool.generate(request(i), PARAMS)) for i in range(3)]
            await until(lambda: server.running)
            await pool.abort(["r1"])
            none = await tasks[1]
            assert (none.finish_reason, len(none.tokens), none.request_id) == ("abort", 0, "r1")
            assert len(server.bodies) == 1
            server.hold.set()
            assert [len((await tasks[i]).tokens) for i in (0, 2)] == [6, 6]

    run(check)


def test_a_cancelled_caller_ends_its_request() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server, places=1) as pool:
            server.hold = asyncio.Event()
            task, waiting = (start(pool.generate(request(i), PARAMS)) for i in (0, 1))
            await until(lambda: server.running)
            waiting.cancel()
            task.cancel()
            await until(lambda: server.aborts)
            assert server.aborts == ["r0~0~"]
            server.hold.set()
            assert len((await pool.generate(request(2), PARAMS)).tokens) == 6

    run(check)


def test_a_name_that_runs_is_not_taken_twice() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.hold = asyncio.Event()
            task = start(pool.generate(request(), PARAMS))
            await until(lambda: server.running)
            with pytest.raises(Conflict, match="r0"):
                await pool.generate(request(), PARAMS)
            server.hold.set()
            await task

    run(check)


def test_a_closed_pool_fails_what_runs() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            server.hold = asyncio.Event()
            task = start(pool.generate(request(), PARAMS))
            await until(lambda: server.running)
            await pool.close()
            with pytest.raises(EngineFailed, match="closed"):
                await task
            with pytest.raises(Conflict, match="closed"):
                await pool.generate(request(1), PARAMS)

    run(check)


def test_no_more_requests_run_than_there_are_places() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server, places=3) as pool:
            most = 0

            async def count(_: Any) -> None:
                nonlocal most
                most = max(most, len(server.running))
                await asyncio.sleep(0)

            server.before = count
            results = await asyncio.gather(*(pool.generate(request(i), PARAMS) for i in range(20)))
            assert [r.index for r in results] == list(range(20))
            assert most <= 3

    run(check)


# Several servers


def test_a_session_moves_only_where_its_engine_is_gone() -> None:
    ring = HashRing([f"engine-{i}" for i in range(8)])
    sessions = [f"rollout-{i}" for i in range(4000)]
    whole = {s: ring.owner(s, range(8)) for s in sessions}
    shares = Counter(whole.values())
    assert sorted(shares) == list(range(8))
    assert min(shares.values()) > 300
    rest = [i for i in range(8) if i != 3]
    without = {s: ring.owner(s, rest) for s in sessions}
    moved = {s for s in sessions if whole[s] != without[s]}
    assert moved == {s for s in sessions if whole[s] == 3}
    # Its sessions do not all fall upon one neighbour.
    assert len({without[s] for s in moved}) > 4
    assert ring.owner("s", []) is None
    assert HashRing([f"engine-{i}" for i in range(8)]).owner("s", rest) == ring.owner("s", rest)


def test_requests_of_a_dead_engine_go_to_another() -> None:
    async def check() -> None:
        async with FakeSGLang() as one, FakeSGLang() as other, pool_of(one, other) as pool:
            asked = [request(i, session_id=f"s{i % 8}") for i in range(16)]
            first = await asyncio.gather(*(pool.generate(r, PARAMS) for r in asked))
            homes = {r.session_id: a.engine_address for r, a in zip(asked, first, strict=True)}
            assert set(homes.values()) == {one.address, other.address}
            for r, a in zip(asked, first, strict=True):
                assert homes[r.session_id] == a.engine_address
            other.hold = asyncio.Event()
            tasks = [start(pool.generate(r, PARAMS)) for r in asked]
            lost = sum(address == other.address for address in homes.values()) * 2
            await until(lambda: len(other.running) == lost)
            await other.__aexit__()
            second = await asyncio.gather(*tasks)
            assert {a.engine_address for a in second} == {one.address}
            assert [a.tokens.tolist() for a in second] == [a.tokens.tolist() for a in first]

    run(check)


class FakeControl:
    """What the fake updates talk to."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def close(self) -> None:
        pass


class FakeUpdates:
    """Weights as a note of what was done; `fails` is raised by the next update."""

    def __init__(self) -> None:
        self.unusable: dict[str, str] = {}
        self.done: list[tuple[str, Any]] = []
        self.fails: Exception | None = None

    async def update(self, engines: Sequence[FakeControl], version: int, named: Any) -> list[Any]:
        self.done.append(("update", [engine.address for engine in engines]))
        if self.fails is not None:
            raise self.fails
        return []

    def loaded(self) -> list[Any]:
        return ["event"]

    async def release(self, version: int) -> None:
        self.done.append(("release", version))

    async def restore(self, engine: FakeControl) -> Any:
        self.done.append(("restore", engine.address))
        self.unusable.pop(engine.address, None)
        return "restored"

    async def close(self) -> None:
        self.done.append(("close", None))


def test_an_engine_that_comes_back_gets_its_weights_before_traffic() -> None:
    async def check() -> None:
        updates = FakeUpdates()
        async with FakeSGLang() as server, pool_of(server, updates=updates) as pool:
            await pool.update_weights(8, [])
            await pool.release(8)
            updates.done.clear()
            storing, stored = asyncio.Event(), asyncio.Event()

            async def store(events: Iterable[Any]) -> None:
                assert list(events) == ["restored"]
                storing.set()
                await stored.wait()

            pool.on_loaded = store
            await server.__aexit__()
            waiting = start(pool.generate(request(), PARAMS))
            await until(lambda: not pool.members[0].serves)
            await server.__aenter__()
            await until(storing.is_set)
            assert updates.done == [("restore", server.address)]
            assert server.bodies == []
            assert not waiting.done()
            stored.set()
            assert len((await waiting).tokens) == 6

    run(check)


def test_an_engine_that_hangs_is_given_up() -> None:
    async def check() -> None:
        async with FakeSGLang() as one, FakeSGLang() as other, pool_of(one, other) as pool:
            one.hold = other.hold = asyncio.Event()
            task = start(pool.generate(request(), PARAMS))
            await until(lambda: one.running or other.running)
            hung, well = (one, other) if one.running else (other, one)
            hung.runs_its_model = False
            await until(lambda: well.running)
            well.hold.set()
            assert (await task).engine_address == well.address

    run(check)


def test_where_nothing_helps_the_reason_is_told() -> None:
    settings = PoolSettings(attempts=3, backoff_s=0.001, health_interval_s=0.01, restarts=0)

    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server, settings=settings) as pool:
            await server.__aexit__()
            with pytest.raises(EngineFailed, match="Cannot connect"):
                await pool.generate(request(), PARAMS)
            await until(lambda: pool.members[0].lost is not None)
            with pytest.raises(EngineFailed, match=r"(?s)engine that serves.*Cannot connect"):
                await pool.generate(request(1), PARAMS)

    run(check)


# Weights


def test_requests_wait_for_the_release_of_new_weights() -> None:
    async def check() -> None:
        updates = FakeUpdates()
        async with FakeSGLang() as one, FakeSGLang() as other:
            async with pool_of(one, other, updates=updates) as pool:
                await pool.update_weights(8, [])
                assert pool.loaded() == ["event"]
                tasks = [start(pool.generate(request(i), PARAMS)) for i in range(2)]
                for _ in range(50):
                    await asyncio.sleep(0)
                await pool.abort(["r1"])
                assert (await tasks[1]).finish_reason == "abort"
                assert one.bodies == other.bodies == []
                await pool.release(8)
                assert len((await tasks[0]).tokens) == 6
                assert pool.weight_version == 8
            assert updates.done == [
                ("update", [one.address, other.address]),
                ("release", 8),
                ("close", None),
            ]

    run(check)


def test_an_update_that_fails_leaves_the_old_version_served() -> None:
    async def check() -> None:
        updates = FakeUpdates()
        one, other = FakeSGLang(), FakeSGLang()
        async with pool_of(one, other, updates=updates) as pool:
            await pool.update_weights(8, [])
            await pool.release(8)
            updates.fails = Diverged("checksums")
            updates.unusable[other.address] = "half an update"
            with pytest.raises(Diverged):
                await pool.update_weights(9, [])
            assert pool.weight_version == 8
            results = await asyncio.gather(*(pool.generate(request(i), PARAMS) for i in range(8)))
            assert {r.engine_address for r in results[:1]} == {one.address}
            # The other one is given the version again before it serves.
            await until(lambda: pool.members[1].serves)
            assert ("restore", other.address) in updates.done

    run(check)


def test_a_pool_for_sampling_alone_takes_no_weights() -> None:
    async def check() -> None:
        async with FakeSGLang() as server, pool_of(server) as pool:
            with pytest.raises(Conflict, match="sampling alone"):
                await pool.update_weights(8, [])
            assert len((await pool.generate(request(), PARAMS)).tokens) == 6

    run(check)


# For callers that wait


def test_a_caller_that_waits_gets_a_list() -> None:
    loop = EventLoopThread("test")
    server, updates = FakeSGLang(), FakeUpdates()
    stack = pool_of(server, updates=updates)
    pool = loop.call(_entered(stack))
    engine = SynchronousEngine(pool, loop, check=pool.check)
    asked = [request(i) for i in range(5)]
    assert [r.index for r in engine.generate(asked, PARAMS)] == list(range(5))
    server.bodies.clear()
    with pytest.raises(InvalidArgument, match="sample 9"):
        engine.generate([*asked, request(9, tokens=[99])], PARAMS)
    assert server.bodies == []
    assert engine.update_weights(8, []) == []
    with pytest.raises(Conflict, match="version 8 is loaded"):
        engine.generate(asked, PARAMS)
    engine.release(8)
    assert (engine.weight_version, engine.version) == (8, "0.5.23")
    server.before = times(99, broken)
    with pytest.raises(EngineFailed, match="3 attempts"):
        engine.generate(asked, PARAMS)
    loop.call(server.__aexit__())
    engine.close()
    engine.close()


async def _entered(stack: Any) -> SGLangPool:
    found: SGLangPool = await stack.__aenter__()
    return found


def test_models_that_do_not_fit_end_the_start() -> None:
    async def check() -> None:
        server = FakeSGLang(MOE)
        async with server:
            wrong = Member(
                number=0,
                connect=lambda address: SGLangClient(address, DENSE),
                slots=asyncio.Semaphore(1),
                url=server.address,
            )
            pool = SGLangPool([wrong], QUICK, model=DENSE)
            with pytest.raises(InvalidArgument, match="qwen3_moe"):
                await pool.start()

    run(check)
