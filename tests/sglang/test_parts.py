"""Requests that are cut and go on; the experts that a mixture chose for each of their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ledger.errors import EngineFailed
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from tests.sglang import reference
from tests.sglang.asking import FREE, client_of, prompt, request, until
from tests.sglang.proxy import proxy
from tests.sglang.servers import Served

LONG = SamplingParams(max_new_tokens=120)


def ask(server: Served, one: GenerationRequest, params: SamplingParams) -> GenerationResult:
    async def asking() -> GenerationResult:
        async with client_of(server.address, server.model) as client:
            return await client.generate(one, params, rid=f"{one.request_id}~0~")

    return asyncio.run(asking())


def cut(server: Served, one: GenerationRequest, *, every: bool) -> GenerationResult:
    """Its answer, aborted after at least ten tokens: by its name, or with all that run."""

    async def asking() -> GenerationResult:
        async with client_of(server.address, server.model) as client:
            began = server.decoded()
            rid = f"{one.request_id}~0~"
            call = asyncio.ensure_future(client.generate(one, LONG, rid=rid))
            await until(lambda: server.decoded() >= began + 10)
            await client.abort(None if every else rid)
            return await call

    return asyncio.run(asking())


def check_experts(
    server: Served, tokens: npt.NDArray[np.int32], found: npt.NDArray[Any], start: int = 0
) -> None:
    """`found` [rows, L, K] are the router's choices for tokens from position `start` on."""
    expected, margins = reference.chosen_experts(server.model, tokens)
    assert len(found) == len(tokens) - 1 - start
    clear = margins[start:-1] > 1e-4
    assert clear.mean() > 0.95
    assert (found[clear] == expected[start:-1][clear]).all()


@pytest.mark.parametrize("every", [False, True], ids=["by name", "all"])
def test_an_aborted_request_gives_what_it_has(dense: Served, every: bool) -> None:
    one = request(21)
    part = cut(dense, one, every=every)
    assert part.finish_reason == "abort"
    assert 10 <= len(part.tokens) < LONG.max_new_tokens
    whole = np.concatenate([one.tokens, part.tokens])
    rows = np.arange(len(one.tokens) - 1, len(whole) - 1)
    expected = reference.log_probs(dense.model, whole)[rows, part.tokens]
    assert np.abs(expected - part.log_probs).max() < 1e-4


def test_an_abort_takes_no_other_request(dense: Served) -> None:
    """SGLang aborts whatever name begins with the one given."""

    async def asking() -> list[GenerationResult]:
        async with client_of(dense.address, dense.model) as client:
            began = dense.decoded()
            calls = [
                asyncio.ensure_future(client.generate(request(i), LONG, rid=f"run.main.{i}.0~0~"))
                for i in (2, 21, 22)
            ]
            await until(lambda: dense.decoded() >= began + 10)
            await client.abort("run.main.2.0~0~")
            return await asyncio.gather(*calls)

    first, *others = asyncio.run(asking())
    assert first.finish_reason == "abort"
    assert [one.finish_reason for one in others] == ["length", "length"]


def test_cut_and_resumed_it_is_what_it_would_have_been(moe: Served) -> None:
    """Tokens by seed and position; experts of the second part from where those of the first end."""
    one = request(23)
    uncut = ask(moe, one, LONG)
    part = cut(moe, one, every=False)
    assert part.expert_ids is not None
    so_far = np.concatenate([one.tokens, part.tokens])
    rest = ask(
        moe,
        request(
            23,
            tokens=so_far,
            routing_start=len(part.expert_ids),
            request_id="run.main.23.1",
        ),
        SamplingParams(max_new_tokens=LONG.max_new_tokens - len(part.tokens)),
    )
    assert np.concatenate([part.tokens, rest.tokens]).tolist() == uncut.tokens.tolist()
    assert rest.expert_ids is not None
    assert uncut.expert_ids is not None
    joined = np.concatenate([part.expert_ids, rest.expert_ids])
    assert joined.shape == uncut.expert_ids.shape
    check_experts(moe, np.concatenate([so_far, rest.tokens]), joined)


def test_experts_are_those_that_transformers_chooses(moe: Served) -> None:
    """For prompt and response, all but the last token, which no layer has seen."""
    for number, length in ((1, 3), (2, 60)):
        one = request(number, tokens=prompt(number, length))
        found = ask(moe, one, FREE)
        assert found.expert_ids is not None
        assert found.expert_ids.dtype == np.uint8
        assert found.num_experts == 8
        check_experts(moe, np.concatenate([one.tokens, found.tokens]), found.expert_ids)


def test_experts_of_cached_tokens_are_there_too(moe: Served) -> None:
    """A prefix that the cache has is not computed again; its experts are reported all the same."""
    one = request(3, tokens=prompt(3, 100))
    first, second = ask(moe, one, FREE), ask(moe, one, FREE)
    assert second.cached_tokens
    assert first.expert_ids is not None
    assert second.expert_ids is not None
    assert (first.expert_ids == second.expert_ids).all()


def test_experts_that_do_not_come_are_an_error(moe: Served) -> None:
    """An answer without what was asked for is none: the trainer would route freely, unseen."""

    def edit(answer: dict[str, Any]) -> None:
        del answer["meta_info"]["routed_experts"]

    async def asking(address: str) -> None:
        async with client_of(address, moe.model) as client:
            await client.generate(request(1), FREE, rid="1~0~")

    with (
        proxy(moe.port, edit) as address,
        pytest.raises(EngineFailed, match="--enable-return-routed-experts"),
    ):
        asyncio.run(asking(address))
