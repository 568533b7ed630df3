"""The asynchronous fake keeps the promises that it stands in for: time, aborts, spans, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import pytest

from ledger.errors import Conflict, EngineFailed, InvalidArgument
from rollout.engines.scripted_async import (
    Failure,
    ManualClock,
    ScriptedAsyncEngine,
    length_script,
    trace_lengths,
)
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams

_T = TypeVar("_T")
PARAMS = SamplingParams(max_new_tokens=20, stop_token_ids=(2,))
PROMPT = [5, 6, 7]


def request(index: int, tokens: list[int] | None = None, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        index=index,
        tokens=np.array(tokens or PROMPT, dtype=np.int32),
        seed=100 + index,
        request_id=f"r{index}",
        **more,
    )


def engine(trace: list[int], clock: ManualClock | None, **more: Any) -> ScriptedAsyncEngine:
    script = length_script(trace_lengths(trace, prompt_tokens=len(PROMPT)))
    return ScriptedAsyncEngine(script, clock=clock, weight_version=3, **more)


def start(awaitable: Awaitable[_T]) -> asyncio.Task[_T]:
    return asyncio.ensure_future(awaitable)  # type: ignore[return-value]


def spans(result: GenerationResult) -> list[tuple[int, int, int]]:
    return list(
        zip(
            result.span_starts.tolist(),
            result.span_ends.tolist(),
            result.span_versions.tolist(),
            strict=True,
        )
    )


def test_lengths_come_from_the_trace_in_time() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([3, 30, 5], clock)
        tasks = [start(made.generate(request(i), PARAMS)) for i in range(4)]
        done = []
        for i, task in enumerate(tasks):
            task.add_done_callback(lambda _, i=i: done.append((i, clock.now)))
        await clock.advance(100)
        assert sorted(done) == [(0, 3.0), (1, 20.0), (2, 5.0), (3, 3.0)]
        results = [await task for task in tasks]
        assert [len(r.tokens) for r in results] == [3, 20, 5, 3]
        assert [r.finish_reason for r in results] == ["stop", "length", "stop", "stop"]
        assert results[0].tokens[-1] == 2
        assert 2 not in results[1].tokens

    asyncio.run(check())


def test_an_aborted_response_goes_on_as_it_would_have() -> None:
    async def check() -> None:
        clock = ManualClock()
        whole = await engine([9], None).generate(request(0), PARAMS)
        made = engine([9], clock, routing=(2, 2, 8))
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(4)
        assert made.running == {"r0": 4}
        await made.abort(["r0", "nobody"])
        part = await task
        assert (part.finish_reason, len(part.tokens)) == ("abort", 4)
        assert part.expert_ids is not None
        assert len(part.expert_ids) == len(PROMPT) + 3
        context = [*PROMPT, *part.tokens.tolist()]
        rows = len(part.expert_ids)
        task = start(made.generate(request(0, context, routing_start=rows), PARAMS))
        await clock.advance(5)
        rest = await task
        assert [*part.tokens, *rest.tokens] == whole.tokens.tolist()
        assert rest.expert_ids is not None
        assert rows + len(rest.expert_ids) == len(PROMPT) + 9 - 1

    asyncio.run(check())


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_new_weights_in_the_middle_of_a_request(mode: str) -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([9], clock, pause_mode=mode)
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(4)
        await made.update_weights(7, [])
        late = start(made.generate(request(1), PARAMS))
        await clock.advance(50)
        assert not late.done()
        with pytest.raises(Conflict):
            await made.release(8)
        await made.release(7)
        await clock.advance(9)
        result = await task
        if mode == "abort":
            assert (spans(result), result.finish_reason) == ([(0, 4, 3)], "abort")
        else:
            assert (spans(result), result.finish_reason) == ([(0, 4, 3), (4, 9, 7)], "stop")
        assert spans(await late) == [(0, 9, 7)]

    asyncio.run(check())


def test_weights_that_do_not_fit_leave_the_requests_running() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([9], clock)
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(4)
        with pytest.raises(InvalidArgument):
            await made.update_weights(7, [("extra", np.zeros(1))])
        await clock.advance(5)
        assert spans(await task) == [(0, 9, 3)]

    asyncio.run(check())


def test_places_are_given_in_the_order_of_arrival() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([5, 2, 4], clock, max_running=2)
        tasks = [start(made.generate(request(i), PARAMS)) for i in range(3)]
        await clock.advance(2)
        assert [task.done() for task in tasks] == [False, True, False]
        await made.abort(["r0"])
        assert len((await tasks[0]).tokens) == 2
        await clock.advance(4)
        assert (await tasks[2]).time_s == 6.0

    asyncio.run(check())


def test_an_abort_before_the_first_token_gives_none() -> None:
    async def check() -> None:
        made = engine([5], ManualClock(), max_running=1)
        tasks = [start(made.generate(request(i), PARAMS)) for i in range(2)]
        await asyncio.sleep(0)
        await made.abort()
        for task in tasks:
            result = await task
            assert (result.finish_reason, len(result.tokens), spans(result)) == ("abort", 0, [])

    asyncio.run(check())


def test_failures_come_where_they_are_ordered() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine(
            [5],
            clock,
            failures=lambda r, attempt: Failure(EngineFailed("gone"), 2) if attempt == 0 else None,
        )
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(2)
        with pytest.raises(EngineFailed, match="gone"):
            await task
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(5)
        assert len((await task).tokens) == 5

    asyncio.run(check())


def test_a_dead_engine_fails_its_requests_until_it_lives_again() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([5], clock)
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(1)
        made.kill()
        with pytest.raises(EngineFailed, match="dead"):
            await task
        with pytest.raises(EngineFailed, match="dead"):
            await made.generate(request(0), PARAMS)
        made.revive()
        task = start(made.generate(request(0), PARAMS))
        await clock.advance(5)
        assert len((await task).tokens) == 5
        await made.close()
        with pytest.raises(Conflict, match="closed"):
            await made.generate(request(0), PARAMS)

    asyncio.run(check())


def test_a_cancelled_caller_frees_its_place() -> None:
    async def check() -> None:
        clock = ManualClock()
        made = engine([5], clock, max_running=1)
        first = start(made.generate(request(0), PARAMS))
        second = start(made.generate(request(1), PARAMS))
        await clock.advance(1)
        first.cancel()
        await clock.advance(5)
        assert (await second).time_s == 6.0
        assert made.running == {}

    asyncio.run(check())
