"""The engine of this process for many callers: batches, aborts between tokens, new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from ledger.errors import Conflict, EngineFailed, InvalidArgument
from rollout.engines import decoding
from rollout.engines.batching import BatchingEngine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from tests.rollout.engine_contract import REQUESTS, same

_T = TypeVar("_T")
PARAMS = SamplingParams(max_new_tokens=9)
NAMED = [replace(r, request_id=f"r{r.index}") for r in REQUESTS]


def start(awaitable: Awaitable[_T]) -> asyncio.Task[_T]:
    return asyncio.ensure_future(awaitable)  # type: ignore[return-value]


def at_token(
    monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], Awaitable[Any]]
) -> None:
    """Once `number` tokens of a batch are sampled, let the event loop run `do` to its end."""
    loop, sampled, count = asyncio.get_running_loop(), decoding.sample_tokens, iter(range(10**6))

    def counting(*args: Any, **options: Any) -> Any:
        if next(count) == number:
            asyncio.run_coroutine_threadsafe(_run(do), loop).result()
        return sampled(*args, **options)

    monkeypatch.setattr(decoding, "sample_tokens", counting)


async def _run(do: Callable[[], Awaitable[Any]]) -> None:
    await do()


@pytest.mark.parametrize("options", [{}, {"recompute_logprobs_via_prefill": True}])
def test_what_is_asked_at_once_is_one_batch(tiny_dense: Path, options: dict[str, Any]) -> None:
    alone = TransformersEngine(tiny_dense, **options).generate(REQUESTS, PARAMS)

    async def check() -> None:
        engine = BatchingEngine(TransformersEngine(tiny_dense, **options))
        together = await asyncio.gather(*(engine.generate(r, PARAMS) for r in NAMED))
        assert all(same(a, b) for a, b in zip(alone, together, strict=True))
        assert [r.batch_rows for r in together] == [r.batch_rows for r in alone]
        assert [r.request_id for r in together] == [r.request_id for r in NAMED]
        await engine.close()

    asyncio.run(check())


def test_other_parameters_are_another_batch(tiny_dense: Path) -> None:
    async def check() -> None:
        engine = BatchingEngine(TransformersEngine(tiny_dense), max_batch_rows=2)
        greedy = replace(PARAMS, temperature=0.0)
        asked = [PARAMS, greedy, PARAMS, PARAMS]
        results = await asyncio.gather(
            *(engine.generate(r, p) for r, p in zip(NAMED, asked, strict=False))
        )
        assert [r.batch_rows for r in results] == [2, 1, 2, 1]
        await engine.close()

    asyncio.run(check())


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("prefill", [False, True])
def test_an_abort_between_tokens_loses_none(
    kind: str, prefill: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TransformersEngine(
        request.getfixturevalue(f"tiny_{kind}"), recompute_logprobs_via_prefill=prefill
    )
    params = replace(PARAMS, top_k=20, logprob_mode="processed")
    whole = made.generate(REQUESTS, params)

    async def check() -> None:
        engine = BatchingEngine(made)
        with monkeypatch.context() as patch:
            at_token(patch, 3, lambda: engine.abort(["r1", "r3"]))
            results = await asyncio.gather(*(engine.generate(r, params) for r in NAMED))
        for i, (result, uncut) in enumerate(zip(results, whole, strict=True)):
            cut = i in (1, 3)
            new = 4 if cut else len(uncut.tokens)
            assert result.tokens.tolist() == uncut.tokens[:new].tolist()
            assert result.finish_reason == ("abort" if cut else uncut.finish_reason)
            assert result.span_ends.tolist() == [new]
            assert len(result.log_probs) == new
            assert np.abs(result.log_probs - uncut.log_probs[:new]).max() < 1e-5
            assert result.top_p_token_offsets is not None
            assert len(result.top_p_token_offsets) == new + 1
            if kind == "moe":
                assert result.expert_ids is not None
                assert len(result.expert_ids) == len(REQUESTS[i].tokens) + new - 1
        tail = replace(NAMED[1], tokens=np.concatenate([NAMED[1].tokens, results[1].tokens]))
        rows = 0
        if kind == "moe":
            assert results[1].expert_ids is not None
            rows = len(results[1].expert_ids)
        rest = await engine.generate(
            replace(tail, routing_start=rows), replace(params, max_new_tokens=5)
        )
        assert rest.tokens.tolist() == whole[1].tokens[4:].tolist()
        if kind == "moe":
            assert rest.expert_ids is not None
            assert whole[1].expert_ids is not None
            assert rows + len(rest.expert_ids) == len(whole[1].expert_ids)
        await engine.close()

    asyncio.run(check())


def test_an_abort_before_the_first_token_gives_none(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        engine = BatchingEngine(TransformersEngine(tiny_moe), max_batch_rows=4)
        running = [start(engine.generate(r, PARAMS)) for r in NAMED]

        async def cut() -> None:
            # The batch of four has run a token; two wait for their turn.
            await engine.abort(["r4", "r5", "nobody"])
            assert [task.done() for task in running] == [False] * 4 + [True] * 2
            await engine.abort()

        with monkeypatch.context() as patch:
            at_token(patch, 0, cut)
            results = await asyncio.gather(*running)
        assert [len(r.tokens) for r in results] == [1] * 4 + [0] * 2
        assert {r.finish_reason for r in results} == {"abort"}
        assert [len(r.span_starts) for r in results] == [1] * 4 + [0] * 2
        await engine.close()

    asyncio.run(check())


def test_a_whole_batch_that_is_aborted_at_once_runs_nothing(tiny_moe: Path) -> None:
    engine = TransformersEngine(tiny_moe, recompute_logprobs_via_prefill=True)
    kept = replace(PARAMS, top_k=5, logprob_mode="processed")
    for params in (PARAMS, kept):
        results = engine.generate(REQUESTS, params, aborted=lambda _: True)
        assert [(r.finish_reason, len(r.tokens), len(r.log_probs)) for r in results] == [
            ("abort", 0, 0)
        ] * len(REQUESTS)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_new_weights_come_between_batches(
    tiny_dense: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = TransformersEngine(tiny_dense, weight_version=3)
    named = {name: view.clone() * 0.5 for name, view in inner._views.items()}

    async def check() -> None:
        engine = BatchingEngine(inner, pause_mode=mode)
        first = start(engine.generate(NAMED[0], PARAMS))
        updating: list[asyncio.Task[Any]] = []

        async def update() -> None:
            updating.append(start(engine.update_weights(7, named.items())))
            await asyncio.sleep(0)

        with monkeypatch.context() as patch:
            at_token(patch, 2, update)
            old = await first
        await updating[0]
        assert old.span_versions.tolist() == [3]
        assert (old.finish_reason, len(old.tokens)) == (
            ("length", 9) if mode == "wait" else ("abort", 3)
        )
        late = start(engine.generate(NAMED[1], PARAMS))
        with pytest.raises(Conflict):
            await engine.release(8)
        assert not late.done()
        await engine.release(7)
        assert (await late).span_versions.tolist() == [7]
        assert engine.weight_version == 7
        with pytest.raises(InvalidArgument):
            await engine.update_weights(9, [])
        assert (await engine.generate(NAMED[2], PARAMS)).span_versions.tolist() == [7]
        await engine.close()

    asyncio.run(check())


def test_a_cancelled_caller_ends_its_request(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        engine = BatchingEngine(TransformersEngine(tiny_dense), max_batch_rows=1)
        calls = [start(engine.generate(r, PARAMS)) for r in NAMED[:3]]

        async def cancel() -> None:
            calls[0].cancel()
            calls[1].cancel()
            await asyncio.sleep(0)

        with monkeypatch.context() as patch:
            at_token(patch, 1, cancel)
            results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in results] == [True, True, False]
        assert isinstance(results[2], GenerationResult)
        await engine.close()

    asyncio.run(check())


def test_what_is_refused_and_what_fails(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        inner = TransformersEngine(tiny_dense)
        engine = BatchingEngine(inner)
        wrong = GenerationRequest(index=7, tokens=np.array([999], np.int32), seed=1)
        with pytest.raises(InvalidArgument, match="sample 7"):
            await engine.generate(wrong, PARAMS)
        twice = [start(engine.generate(NAMED[0], PARAMS)) for _ in range(2)]
        with pytest.raises(Conflict, match="r0"):
            await twice[1]
        await twice[0]
        with monkeypatch.context() as patch:
            patch.setattr(inner, "_decode", lambda *_: 1 / 0)
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                await engine.generate(NAMED[0], PARAMS)
        again = start(engine.generate(NAMED[0], PARAMS))
        waits = start(engine.generate(NAMED[1], replace(PARAMS, temperature=0.0)))
        await asyncio.sleep(0)
        await engine.close()
        for task in (again, waits):
            with pytest.raises(EngineFailed, match="closed"):
                await task
        with pytest.raises(Conflict, match="closed"):
            await engine.generate(NAMED[0], PARAMS)

    asyncio.run(check())
