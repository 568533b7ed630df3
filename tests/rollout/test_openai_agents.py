"""Agents that are started by an episode: their reward, their end, and what they do not notice."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from blake3 import blake3

from ledger import Ledger, open_ledger
from ledger.check import check_ledger
from ledger.errors import InvalidArgument
from ledger.events import ObservationAppended, PromptIssued, SegmentGenerated
from ledger.fields import Event
from rollout.coordinator import Coordinator
from rollout.engines.scripted_async import ManualClock
from rollout.episode import Episode, EpisodeAborted
from rollout.openai.agent import AgentFailed, AgentTask, ExternalAgent
from rollout.rewards import create_reward
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.sink import EventSink
from rollout.tasks import create_source
from rollout.trajectory import Observation, Segment, Trajectory
from tests.bench.episodes import version
from tests.rollout.test_openai import Table, say, user

HERE = "tests.rollout.test_openai_agents"


async def ask(given: AgentTask, *texts: str) -> list[str]:
    """What the model says to one conversation, question by question."""
    messages: list[Any] = []
    said = []
    async with aiohttp.ClientSession() as http:
        for text in texts:
            messages.append(user(text))
            body = {"model": "m", "messages": messages}
            async with http.post(f"{given.base_url}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
            said.append(messages[-1]["content"])
    return said


async def twice(given: AgentTask) -> float:
    """An agent that asks two questions, and is content with the answers "a" and "b"."""
    return float(await ask(given, f"{given.prompt}?", "and?") == ["a", "b"])


def fails(given: AgentTask) -> None:
    """A plain function, which runs in a thread."""
    raise RuntimeError("no idea")


async def hangs(given: AgentTask) -> None:
    """An agent that never ends."""
    await asyncio.Event().wait()


def with_agent(
    texts: list[str], use: Callable[[Table, ExternalAgent], Awaitable[None]], **agent: Any
) -> Table:
    """An endpoint without sessions, and an agent that opens its own."""

    async def main() -> Table:
        table = Table(texts, clock=agent.pop("clock", None))
        made = ExternalAgent(table.endpoint, **agent)
        await table.endpoint.start()
        try:
            await use(table, made)
        finally:
            await made.close()
            assert not table.endpoint.sessions
            await table.endpoint.close()
        return table

    return asyncio.run(main())


def test_a_function_is_given_its_session_and_gives_the_reward() -> None:
    async def use(table: Table, agent: ExternalAgent) -> None:
        episode = table.episode("task")
        await agent(episode)
        assert episode.reward is not None
        assert episode.reward.value == 1.0
        (sibling,) = episode.siblings
        assert len(sibling.trajectory.segments) == 2

    table = with_agent(["a", "b"], use, function_path=f"{HERE}:twice")
    assert "task?" in table.script.asked[0]
    # The run's sampling is pinned.
    assert {s.temperature for s in table.sink.of(SegmentGenerated)} == {1.0}


def test_agents_that_fail_or_hang_are_failures_without_a_reward() -> None:
    async def use(table: Table, agent: ExternalAgent) -> None:
        episode = table.episode()
        with pytest.raises(AgentFailed, match=why):
            await agent(episode)
        assert episode.reward is None

    why = "RuntimeError: no idea"
    with_agent([], use, function_path=f"{HERE}:fails")
    why = "did not end within"
    with_agent([], use, function_path=f"{HERE}:hangs", timeout_s=0.01)

    async def cancelled(table: Table, agent: ExternalAgent) -> None:
        running = asyncio.ensure_future(agent(table.episode()))
        while not table.endpoint.sessions:
            await asyncio.sleep(0)
        running.cancel()
        assert await asyncio.gather(running, return_exceptions=True) != [None]
        assert not table.endpoint.sessions

    with_agent([], cancelled, function_path=f"{HERE}:hangs")
    with pytest.raises(InvalidArgument, match="both"):
        with_agent([], cancelled, command="x", function_path="y:z")
    with pytest.raises(InvalidArgument, match="--agent-function-path"):
        with_agent([], cancelled, function_path=f"{HERE}:missing")


AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert "label" not in task
body = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("working")
print(json.dumps({"reward": len(said), "parts": {"said": 1}}))
sys.exit(len(said) > 5)
"""


def test_a_command_is_told_by_its_environment_and_its_input(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)

    async def use(table: Table, agent: ExternalAgent) -> None:
        good, bad = table.episode("how long?"), table.episode("too long")
        await agent(good)
        assert good.reward is not None
        assert (good.reward.value, good.reward.parts) == (3.0, {"said": 1.0})
        with pytest.raises(AgentFailed, match="status 1"):
            await agent(bad)

    with_agent(["abc", "abcdef"], use, command=f"{sys.executable} -S {program}")


def test_an_agent_from_outside_claims_a_session_and_posts_its_reward() -> None:
    async def use(table: Table, agent: ExternalAgent) -> None:
        episode = table.episode("outside")
        running = asyncio.ensure_future(agent(episode))
        async with aiohttp.ClientSession() as http:
            url = f"{table.endpoint.url}/v1/sessions"
            while not table.endpoint.sessions:
                await asyncio.sleep(0)
            async with http.post(f"{url}/claim") as answer:
                found = await answer.json()
            assert found["prompt"] == "outside"
            async with http.post(f"{url}/claim") as answer:
                assert answer.status == 404
            body = {"model": "m", "messages": [user("q")]}
            async with http.post(f"{found['base_url']}/chat/completions", json=body) as answer:
                assert answer.status == 200
            async with http.post(
                f"{url}/{found['session']}/reward", json={"reward": 0.25}
            ) as answer:
                assert answer.status == 200
        await running
        assert episode.reward is not None
        assert episode.reward.value == 0.25

    with_agent(["a"], use)


def test_an_agent_does_not_notice_that_its_episode_was_aborted_and_went_on() -> None:
    clock = ManualClock()

    async def use(table: Table, agent: ExternalAgent) -> None:
        first = table.episode("task")
        running = asyncio.ensure_future(agent(first))
        await clock.until(lambda: bool(table.engine.running))
        await clock.advance(1)
        await first.abort()
        with pytest.raises(EpisodeAborted):
            await running
        assert [len(s.tokens) for s in table.sink.of(SegmentGenerated)] == [1]
        second = Episode(first.trajectory, table.services)
        running = asyncio.ensure_future(agent(second))
        for _ in range(2):
            await clock.until(lambda: bool(table.engine.running))
            await clock.advance(5)
        await running
        assert second.reward is not None
        assert second.reward.value == 1.0

    table = with_agent(["a", "b"], use, function_path=f"{HERE}:twice", clock=clock)
    segments = table.sink.of(SegmentGenerated)
    assert [(s.index, s.turn, s.finish_reason) for s in segments] == [
        (1, 0, "abort"),
        (1, 0, "stop"),
        (1, 1, "stop"),
    ]


@pytest.mark.parametrize("upto", range(1, 5))
def test_an_agent_that_is_started_again_gets_its_recorded_answers(upto: int) -> None:
    """Killed after any piece: what was answered is answered so again, the rest is sampled."""

    async def whole(table: Table, agent: ExternalAgent) -> None:
        await agent(table.episode("task"))

    before = with_agent(["a", "b"], whole, function_path=f"{HERE}:twice")
    events = before.sink.events[:upto]
    issued = events[0]
    assert isinstance(issued, PromptIssued)

    async def again(table: Table, agent: ExternalAgent) -> None:
        root = table.episode("task")
        at = _recorded(issued, events[1:])
        root.siblings.append(Episode(at, table.services))
        await agent(root)
        assert root.reward is not None
        assert root.reward.value == 1.0
        assert len(root.siblings) == 1
        again = at.context()
        assert np.array_equal(again, _context(before))

    left = ["a", "b"][sum(isinstance(e, SegmentGenerated) for e in events) :]
    table = with_agent(left, again, function_path=f"{HERE}:twice")
    assert len(table.script.asked) == len(left)


def _context(table: Table) -> Any:
    issued = table.sink.of(PromptIssued)[0]
    pieces = [e.tokens for e in table.sink.events if not isinstance(e, PromptIssued)]
    return np.concatenate([issued.tokens, *pieces])


def _recorded(issued: PromptIssued, events: Sequence[Event]) -> Trajectory:
    """The sample as the data buffer reads it back."""
    at = Trajectory(
        index=int(issued.indices[0]),
        group_index=issued.group_index,
        rollout_id=int(issued.rollout_ids[0]),
        rollout_step=issued.rollout_step,
        prompt_tokens=issued.tokens,
        text=issued.text,
        label=None,
        metadata={},
        parent_index=issued.parent_index,
    )
    for e in events:
        if isinstance(e, SegmentGenerated):
            at.pieces.append(
                Segment(
                    segment=e.segment,
                    turn=e.turn,
                    start=e.start,
                    tokens=e.tokens,
                    log_probs=e.rollout_log_probs,
                    finish_reason=e.finish_reason,
                    span_versions=e.span_versions,
                )
            )
        elif isinstance(e, ObservationAppended):
            at.pieces.append(
                Observation(
                    turn=e.turn, start=e.start, tokens=e.tokens, source=e.source, text=e.text
                )
            )
    return at


def test_what_a_session_does_is_a_ledger_without_a_finding(tmp_path: Path) -> None:
    async def main(writer: Any) -> None:
        table = Table(["abab", "b", "c", "STOP d"], weight_version=0)
        sink = EventSink(writer.append)
        root = table.episode("task")
        root.services = replace(table.services, sink=sink)
        await sink.append([_issued(root.trajectory)])
        await table.endpoint.start()
        table.endpoint.open("s1", root)
        one = await say(table, [user("q")])
        more = [user("q"), one.choices[0].message, user("r")]
        await asyncio.gather(say(table, more), say(table, more))
        await say(table, [user("s")], stop="STOP")
        await table.endpoint.close()
        await sink.close()

    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="rollout") as writer:
            writer.append([version(0, None)])
            asyncio.run(main(writer))
        reader = ledger.reader("r")
        prompts = reader.table("prompt_issued", ["parent_index", "rollout_ids"])
        assert prompts["parent_index"].to_pylist() == [None, 0, 1, 0]
        assert {i for ids in prompts["rollout_ids"].to_pylist() for i in ids} == {0}
        assert reader.table("segment_generated", ["index"]).num_rows == 4
        assert not check_ledger(reader).findings


def _issued(at: Trajectory) -> PromptIssued:
    return PromptIssued(
        prompt_id=blake3(at.prompt_tokens.astype("<i4").tobytes()).digest(),
        group_index=at.group_index,
        rollout_step=at.rollout_step,
        round=0,
        indices=np.array([at.index]),
        rollout_ids=np.array([at.rollout_id]),
        tokens=at.prompt_tokens,
        text=at.text,
        label=at.label,
        source="tests",
        source_row=0,
        data_cursor=1,
    )


async def in_their_own_words(given: AgentTask) -> float:
    """Asks what the prompt does not say."""
    await ask(given, f"Please: {given.prompt}")
    return float(given.session[-1] in "02468")


def test_agents_fill_a_rollout_step_and_what_they_asked_is_kept(tmp_path: Path) -> None:
    async def main(ledger: Ledger, writer: Any) -> None:
        table = Table(["abc"] * 4, weight_version=0)
        await table.endpoint.start()
        agent = ExternalAgent(table.endpoint, function_path=f"{HERE}:in_their_own_words")
        coordinator = Coordinator(
            ledger,
            "r",
            "main",
            writer,
            table.engine,
            create_source("addition", seed=3),
            create_reward("exact_line"),
            table.tokenizer,
            RolloutSettings(
                run_seed=1,
                rollout_batch_size=2,
                n_samples_per_prompt=2,
                rollout_max_response_len=40,
                rollout_stop_token_ids=(table.tokenizer.eos_token_id,),
            ),
            RolloutShape(),
            drive=agent,
        )
        summary = await coordinator.rollout(0, 0)
        assert summary.counts == {"kept": 4, "surplus": 4}
        assert sorted(summary.raw_rewards.tolist()) == [0.0] * 4 + [1.0] * 4
        await coordinator.close()
        await agent.close()
        await table.endpoint.close()

    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="rollout") as writer:
            writer.append([version(0, None)])
            asyncio.run(main(ledger, writer))
        reader = ledger.reader("r")
        said = reader.table("sample_decided", ["decision", "reason"])
        assert set(said["reason"].to_pylist()) == {"", "nothing was sampled"}
        assert not check_ledger(reader).findings
