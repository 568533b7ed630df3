"""Ids in, ids out: what a real server answers is what transformers computes of the same ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from tests.sglang import reference
from tests.sglang.asking import FREE, client_of, prompt, request
from tests.sglang.models import EOS_TOKEN_ID, VOCAB_SIZE
from tests.sglang.servers import Served


def ask(
    server: Served, requests: list[GenerationRequest], params: SamplingParams = FREE
) -> list[GenerationResult]:
    """The answers to requests that are sent together."""

    async def asking() -> list[GenerationResult]:
        async with client_of(server.address, server.model) as client:
            return await asyncio.gather(
                *(client.generate(one, params, rid=f"{one.request_id}~0~") for one in requests)
            )

    return asyncio.run(asking())


@pytest.fixture(params=["dense", "moe"])
def either(request: pytest.FixtureRequest) -> Served:
    """Both servers, one after the other."""
    server: Served = request.getfixturevalue(request.param)
    return server


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers(either: Served, temperature: float) -> None:
    """Float32 on both sides; kernels and batches differ: 1e-4 of a natural log-prob, seen 1e-5."""
    params = SamplingParams(temperature=temperature, max_new_tokens=24)
    asked = [request(i, tokens=prompt(i, 3 + 5 * i)) for i in range(6)]
    worst = 0.0
    for one, found in zip(asked, ask(either, asked, params), strict=True):
        assert found.index == one.index
        assert (found.tokens >= 0).all()
        assert (found.tokens < VOCAB_SIZE).all()
        assert len(found.tokens) == 24 or found.tokens[-1] == EOS_TOKEN_ID
        whole = np.concatenate([one.tokens, found.tokens])
        expected = reference.log_probs(either.model, whole, temperature=temperature)
        rows = np.arange(len(one.tokens) - 1, len(whole) - 1)
        worst = max(worst, float(np.abs(expected[rows, found.tokens] - found.log_probs).max()))
        assert found.log_probs.dtype == np.float32
        assert found.logprob_temperature == temperature
    assert worst < 1e-4


def test_greedy_takes_the_likeliest_token(either: Served) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=16)
    asked = [request(1), request(2)]
    for one, found in zip(asked, ask(either, asked, params), strict=True):
        whole = np.concatenate([one.tokens, found.tokens])
        likeliest = reference.log_probs(either.model, whole).argmax(axis=1)
        assert found.tokens.tolist() == likeliest[len(one.tokens) - 1 : -1].tolist()


def test_a_seed_decides_whatever_is_sampled_beside_it(either: Served) -> None:
    """Alone or among others, on an empty prefix cache or a full one: the same ids."""
    (alone,) = ask(either, [request(7)])
    among = ask(either, [request(i) for i in range(8)])
    (other,) = ask(either, [request(7, seed=5)])
    assert among[7].tokens.tolist() == alone.tokens.tolist()
    assert np.abs(among[7].log_probs - alone.log_probs).max() < 1e-4
    assert other.tokens.tolist() != alone.tokens.tolist()
    assert len({tuple(one.tokens.tolist()) for one in among}) == 8


def test_large_seeds_are_different_seeds(dense: Served) -> None:
    """Ours are 63 bits wide: none of them may be cut off on the way."""
    seeds = [3, 3 + 2**32, 3 + 2**62]
    found = ask(dense, [request(7, seed=s, request_id=f"run.main.7.{s}") for s in seeds])
    assert len({tuple(one.tokens.tolist()) for one in found}) == 3


def test_a_stop_id_ends_the_response_and_is_part_of_it(either: Served) -> None:
    (whole,) = ask(either, [request(3)])
    stop = int(whole.tokens[5])
    first = whole.tokens.tolist().index(stop)
    (cut,) = ask(either, [request(3)], SamplingParams(max_new_tokens=24, stop_token_ids=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.tokens.tolist() == whole.tokens[: first + 1].tolist()
    assert whole.finish_reason == "length"


def test_kept_sets_and_their_log_probs_are_those_of_the_nucleus(dense: Served) -> None:
    """`--rollout-logprob-mode processed`: ids that top-p and top-k left, log-probs over these.

    SGLang's torch sampler takes top-p of the whole distribution, whatever top-k cuts.
    """
    params = SamplingParams(
        temperature=0.8, top_p=0.7, top_k=20, max_new_tokens=16, logprob_mode="processed"
    )
    one = request(4)
    (found,) = ask(dense, [one], params)
    whole = np.concatenate([one.tokens, found.tokens])
    rows = reference.log_probs(dense.model, whole, temperature=0.8)[len(one.tokens) - 1 : -1]
    assert found.top_p_token_ids is not None
    assert found.top_p_token_offsets is not None
    sets = np.split(found.top_p_token_ids, found.top_p_token_offsets[1:-1])
    for row, kept, token, said in zip(rows, sets, found.tokens, found.log_probs, strict=True):
        order = np.argsort(-row, kind="stable")[:20]
        before = np.concatenate([[0.0], np.cumsum(np.exp(row[order].astype(np.float64)))[:-1]])
        # A token at the very edge may fall on either side.
        if np.abs(before - 0.7).min() > 1e-4:
            assert sorted(kept.tolist()) == sorted(order[before < 0.7].tolist())
        expected = row[token] - np.logaddexp.reduce(row[kept])
        assert abs(expected - said) < 1e-4


def test_an_id_outside_the_vocabulary_is_refused_here_and_the_server_lives(dense: Served) -> None:
    for bad in (VOCAB_SIZE, -1):
        with pytest.raises(InvalidArgument, match=rf"token ids in \[0, {VOCAB_SIZE}\)"):
            ask(dense, [request(1, tokens=[5, bad, 7])])
    assert dense.is_alive
    assert len(ask(dense, [request(1)])[0].tokens) == 24


def test_more_than_the_model_has_positions_for_is_refused_here(dense: Served) -> None:
    with pytest.raises(InvalidArgument, match="positions"):
        ask(dense, [request(1, tokens=prompt(1, 2040))])


def test_everything_else_that_the_answer_says_is_kept(either: Served, tmp_path: Path) -> None:
    (found,) = ask(either, [request(1)])
    assert found.report is not None
    assert {"e2e_latency", "num_retractions", "decode_throughput"} <= found.report.keys()
    assert found.engine_address == either.address
    assert found.cached_tokens is not None
    assert found.span_versions.tolist() == [0]
