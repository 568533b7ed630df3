"""The OpenAI endpoint before a real SGLang: what was sampled is recorded, and gone on from."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai

from ledger.events import ObservationAppended, SegmentGenerated
from rollout.episode import Episode, EpisodeServices
from rollout.openai.reading import Reader
from rollout.openai.server import Endpoint
from rollout.openai.session import Session
from rollout.protocol import SamplingParams
from rollout.trajectory import Trajectory
from tests.rollout.test_openai import Sink
from tests.sglang.asking import until
from tests.sglang.models import EOS_TOKEN_ID, byte_tokenizer
from tests.sglang.servers import Served, pool_of

Talk = Callable[[openai.AsyncOpenAI, Session], Awaitable[None]]


def talk_to(server: Served, python: str, logs: Path, talk: Talk) -> tuple[Session, Sink]:
    """Open a session of the endpoint before the server, and let an OpenAI client use it."""

    async def main() -> tuple[Session, Sink]:
        tokenizer, sink, numbers = byte_tokenizer(), Sink(), itertools.count(1)
        pool = pool_of(python, server.model, logs, urls=[server.address])
        await pool.start()
        services = EpisodeServices(
            engine=pool,
            sink=sink,
            tokenizer=tokenizer,
            params=SamplingParams(max_new_tokens=300, stop_token_ids=(EOS_TOKEN_ID,)),
            run_id="openai",
            branch="main",
            run_seed=1,
            source="tests",
            take_index=lambda: next(numbers),
        )
        at = Trajectory(
            index=0,
            group_index=0,
            rollout_id=0,
            rollout_step=0,
            prompt_tokens=np.array([1, 2, 3], np.int32),
            text="",
            label=None,
            metadata={},
        )
        endpoint = Endpoint(Reader(tokenizer))
        await endpoint.start()
        session = endpoint.open("s", Episode(at, services))
        try:
            async with openai.AsyncOpenAI(
                base_url=f"{endpoint.url}/v1", api_key="sk-s", max_retries=0
            ) as client:
                await talk(client, session)
        finally:
            await endpoint.close()
            await pool.close()
        return session, sink

    return asyncio.run(main())


def test_turns_go_on_from_the_ids_that_were_sampled(
    dense: Served, sglang_python: str, tmp_path: Path
) -> None:
    async def talk(client: openai.AsyncOpenAI, session: Session) -> None:
        messages: list[Any] = []
        for question in ("one?", "two?", "three?"):
            messages.append({"role": "user", "content": question})
            stream = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=12, stream=True
            )
            said = ""
            async for chunk in stream:
                said += "".join(c.delta.content or "" for c in chunk.choices)
            messages.append({"role": "assistant", "content": said})

    session, sink = talk_to(dense, sglang_python, tmp_path, talk)
    assert len(session.samples) == 2
    at = session.samples[1].trajectory
    segments: list[SegmentGenerated] = sink.of(SegmentGenerated)
    assert [one.turn for one in segments] == [0, 1, 2]
    assert all(one.span_versions.tolist() == [0] for one in segments)
    assert all(len(one.rollout_log_probs) == len(one.tokens) for one in segments)
    # Random weights say bytes that are no text: encoded anew they would be others.
    drifts = [json.loads(str(one.engine_report))["request"]["history_drift"] for one in segments]
    assert drifts[0] == 0
    assert max(drifts) > 0
    # The prefix cache of the server has what it sampled itself.
    assert (segments[2].cached_tokens or 0) >= len(at.prompt_tokens) + 12
    pieces = sink.of(ObservationAppended)
    assert [one.source for one in pieces] == ["user", "user"]
    assert "two?" in str(pieces[0].text)


def test_a_client_that_goes_away_stops_the_server_and_comes_back_for_the_rest(
    dense: Served, sglang_python: str, tmp_path: Path
) -> None:
    question: list[Any] = [{"role": "user", "content": "long?"}]

    async def talk(client: openai.AsyncOpenAI, session: Session) -> None:
        began = dense.decoded()
        asking = asyncio.ensure_future(
            client.chat.completions.create(model="m", messages=question, max_tokens=250)
        )
        await until(lambda: dense.decoded() >= began + 10)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await session.settle()
        answer = await client.chat.completions.create(
            model="m", messages=question, max_tokens=250, extra_body={"return_token_ids": True}
        )
        sampled = session.samples[1].trajectory.response().tolist()
        assert answer.choices[0].model_dump()["token_ids"] == sampled

    _, sink = talk_to(dense, sglang_python, tmp_path, talk)
    segments = sink.of(SegmentGenerated)
    assert segments[0].finish_reason == "abort"
    assert [one.turn for one in segments] == [0, 0]
    assert 0 < len(segments[0].tokens) < 250
    assert segments[0].sampling_seed == segments[1].sampling_seed
    assert segments[1].start == len(segments[0].tokens)
