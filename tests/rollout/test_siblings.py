"""Siblings: several samples of one rollout, by a compacted context or a sub-agent."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ledger.errors import EnvironmentFailed
from ledger.events import PromptIssued, SegmentGenerated
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.turns import PlainTurns
from rollout.episode import EpisodeAborted
from rollout.rewards import Reward
from tests.rollout.agents import Sink, answering, begun, driven, ids_of, said
from tests.rollout.test_environments import Counting

ASKED = "sum up:"


def say(context):
    """Short turns, a summary where it is asked for, and 'end' after the second summary."""
    if context.endswith(ASKED):
        return "so far"
    return "end" if "so far6>" in context else "abc"


def compacting(tokenizer, make=Counting, **limits):
    limits = {"compact_at": 24, "compact_prompt": ASKED, "max_turns": 20, **limits}
    return EnvironmentEpisode("test", make, PlainTurns(tokenizer), EpisodeLimits(**limits))


def texts(tokenizer, sink):
    """Of each sample its prompt and what follows."""
    found = {2: "x>|"}
    for event in sink.events:
        if isinstance(event, PromptIssued):
            found[int(event.indices[0])] = tokenizer.decode(event.tokens.tolist()) + "|"
    for _, index, _, _, ids in said(sink):
        found[index] += tokenizer.decode(ids)
    return found


def test_a_context_that_gets_long_is_summed_up_and_goes_on_in_a_sibling(tokenizer):
    episode, sink = driven(tokenizer, compacting(tokenizer), answering(tokenizer, say))
    assert texts(tokenizer, sink) == {
        2: "x>|abc<eos>0>abc<eos>1>abc<eos>2>abc<eos>sum up:so far<eos>",
        100: "x>so far3>|abc<eos>4>abc<eos>5>abc<eos>sum up:so far<eos>",
        101: "x>so far6>|end<eos>",
    }
    issued = sink.of(PromptIssued)
    assert [(int(e.indices[0]), e.parent_index) for e in issued] == [(100, 2), (101, 100)]
    assert {int(e.rollout_ids[0]) for e in issued} == {2}
    assert {e.group_index for e in issued} == {1}
    # The reward is the rollout's; summaries are no turns of the environment.
    assert episode.reward.value == 7 * 3 + 3
    assert episode.reward.parts["turns"] == 8.0


def test_killed_anywhere_siblings_go_on_and_none_is_begun_twice(tokenizer):
    whole, sink = driven(tokenizer, compacting(tokenizer), answering(tokenizer, say))
    total = len(sink.of(SegmentGenerated))
    for kept in range(len(sink.events) + 1):
        engine = answering(tokenizer, say)
        again, other = driven(tokenizer, compacting(tokenizer), engine, sink.events[:kept])
        assert texts(tokenizer, other) == texts(tokenizer, sink), f"cut after {kept} events"
        assert again.reward == whole.reward
        had = sum(isinstance(event, SegmentGenerated) for event in sink.events[:kept])
        assert len(engine.requests) == total - had


def test_a_summary_that_is_as_long_again_ends_the_episode(tokenizer):
    def long(context):
        return "a long summary of it all" if context.endswith(ASKED) else "abc"

    episode, sink = driven(tokenizer, compacting(tokenizer), answering(tokenizer, long))
    assert sink.of(PromptIssued) == []
    assert episode.reward.parts["truncated"] == 1.0
    assert [kind for kind, *_ in said(sink)][-1] == "sampled"


def test_an_environment_that_ends_before_a_recorded_sibling_fails_the_sample(tokenizer):
    _, sink = driven(tokenizer, compacting(tokenizer), answering(tokenizer, say))
    with pytest.raises(EnvironmentFailed, match="does not repeat itself"):
        driven(
            tokenizer, compacting(tokenizer, max_turns=5), answering(tokenizer, say), sink.events
        )


async def with_helpers(episode):
    """A driver of one's own: two sub-agents, then the answer. It does everything again."""
    at, tokenizer = episode.trajectory, episode.services.tokenizer

    async def ask(question):
        tokens = np.array(ids_of(tokenizer, question), np.int32)
        helper = await episode.sibling(tokens, text=question, once=True)
        if not helper.trajectory.pieces:
            await helper.generate()
        return helper.response_text(helper.trajectory.response(), "stop")

    found = await asyncio.gather(ask("1+1="), ask("2+2="))
    if not at.pieces:
        await episode.observe(np.array(ids_of(tokenizer, ",".join(found)), np.int32), "tool")
    if at.finish_reason is None:
        await episode.generate()
    episode.reward = Reward(value=1.0)


def helped(context):
    return {"1+1=": "2", "2+2=": "4"}.get(context, "done")


def test_sub_agents_are_siblings_and_are_found_again(tokenizer):
    _, sink = driven(tokenizer, with_helpers, answering(tokenizer, helped))
    assert texts(tokenizer, sink) == {
        2: "x>|2,4done<eos>",
        100: "1+1=|2<eos>",
        101: "2+2=|4<eos>",
    }
    for kept in range(len(sink.events) + 1):
        _, other = driven(tokenizer, with_helpers, answering(tokenizer, helped), sink.events[:kept])
        assert sorted(texts(tokenizer, other).values()) == sorted(texts(tokenizer, sink).values())


def test_no_sibling_begins_after_an_abort(tokenizer):
    async def main():
        sink = Sink()
        episode = begun(tokenizer, answering(tokenizer, helped), sink)
        await episode.abort()
        with pytest.raises(EpisodeAborted):
            await episode.sibling(episode.trajectory.prompt_tokens)
        return sink

    assert asyncio.run(main()).events == []
