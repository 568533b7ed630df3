"""Episodes: what drives one loses nothing, wherever it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from ledger.events import (
    ObservationAppended,
    PromptIssued,
    RoutingRecorded,
    SegmentGenerated,
)
from ledger.fields import Event
from ledger.seeds import sample_seed
from rollout.episode import Episode, EpisodeAborted, EpisodeServices, single_turn
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from rollout.trajectory import Trajectory

MAX = 6


class Engine:
    """Says 'abc…' one token after the other; stops where it is told to, or is aborted."""

    name, version, weight_version = "letters", "1", 3

    def __init__(self, tokenizer: Any) -> None:
        self._ids = tokenizer.encode("abcdefghijklmnop", add_special_tokens=False)
        self.requests: list[GenerationRequest] = []
        self.limits: list[int] = []
        self.hang_at: int | None = None
        """Sampled tokens after which a request waits for its abort."""
        self.waiting = asyncio.Event()
        self._aborted = asyncio.Event()

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        self.requests.append(request)
        self.limits.append(params.max_new_tokens)
        count, reason = params.max_new_tokens, "length"
        if self.hang_at is not None:
            self.waiting.set()
            await self._aborted.wait()
            count, reason = self.hang_at, "abort"
            self._aborted.clear()
            self.waiting.clear()
        begin = len(request.tokens)
        tokens = np.array([self._ids[(begin + i) % 16] for i in range(count)], np.int32)
        fed = begin + count - 1 - request.routing_start
        return GenerationResult(
            index=request.index,
            tokens=tokens,
            log_probs=np.full(count, -1.0, np.float32),
            sampler_log_probs=None,
            logprob_mode="full",
            logprob_temperature=1.0,
            finish_reason=reason,
            span_starts=np.array([0], np.int32),
            span_ends=np.array([count], np.int32),
            span_versions=np.array([3], np.int64),
            expert_ids=np.zeros((fed, 1, 1), np.uint8),
            num_experts=4,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._aborted.set()


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.held: asyncio.Event | None = None

    async def append(self, events: Sequence[Event]) -> None:
        if self.held is not None:
            await self.held.wait()
        self.events += events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def run(
    tokenizer: Any, scenario: Callable[[Episode, Engine, Sink], Coroutine[Any, Any, None]]
) -> Sink:
    async def main() -> Sink:
        engine: Any = Engine(tokenizer)
        sink = Sink()
        services = EpisodeServices(
            engine=engine,
            sink=sink,
            tokenizer=tokenizer,
            params=SamplingParams(max_new_tokens=MAX),
            run_id="run",
            branch="main",
            run_seed=7,
            source="letters",
            take_index=iter(range(100, 200)).__next__,
        )
        sample = Trajectory(
            index=2,
            group_index=1,
            rollout_id=2,
            rollout_step=5,
            prompt_tokens=np.array(engine._ids[:2], np.int32),
            text="ab",
            label="c",
            metadata={},
        )
        await scenario(Episode(sample, services), engine, sink)
        return sink

    return asyncio.run(main())


def test_a_single_turn_is_one_segment_with_the_seed_of_its_place(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        await single_turn(episode)
        await single_turn(episode)  # it is finished: nothing more is asked
        assert len(engine.requests) == 1

    sink = run(tokenizer, scenario)
    (segment,) = sink.of(SegmentGenerated)
    assert (segment.index, segment.segment, segment.turn, segment.start) == (2, 0, 0, 0)
    assert segment.sampling_seed == sample_seed(7, 5, 1, 2, 0)
    (routing,) = sink.of(RoutingRecorded)
    assert (routing.start, routing.rows) == (0, 2 + MAX - 1)


def test_an_aborted_turn_goes_on_behind_what_it_has(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        engine.hang_at = 2
        task = asyncio.create_task(single_turn(episode))
        await engine.waiting.wait()
        await episode.abort()
        with pytest.raises(EpisodeAborted):
            await task
        with pytest.raises(EpisodeAborted):  # nothing begins any more
            await episode.generate()
        engine.hang_at = None
        again = Episode(episode.trajectory, episode.services)
        await single_turn(again)
        assert engine.limits == [MAX, MAX - 2]
        first, second = engine.requests
        assert second.tokens.tolist()[:2] == first.tokens.tolist()
        assert (first.seed, first.request_id) == (second.seed, "run.main.2.0")
        assert (second.request_id, second.session_id) == ("run.main.2.1", "rollout-2")

    sink = run(tokenizer, scenario)
    cut, rest = sink.of(SegmentGenerated)
    assert (cut.finish_reason, len(cut.tokens), rest.finish_reason) == ("abort", 2, "length")
    assert (rest.segment, rest.turn, rest.start, len(rest.tokens)) == (1, 0, 2, MAX - 2)
    # Rows of routing follow each other: the last token of the first part is fed in the second.
    one, two = sink.of(RoutingRecorded)
    assert (one.start, one.rows, two.start, two.rows) == (0, 3, 3, 2 + MAX - 1 - 3)


def test_an_abort_without_a_token_records_nothing(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        engine.hang_at = 0
        task = asyncio.create_task(single_turn(episode))
        await engine.waiting.wait()
        await episode.abort()
        with pytest.raises(EpisodeAborted):
            await task
        assert episode.trajectory.pieces == []

    assert run(tokenizer, scenario).events == []


def test_a_cancelled_driver_loses_no_token(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        engine.hang_at = 3
        task = asyncio.create_task(single_turn(episode))
        await engine.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [len(one.tokens) for one in episode.trajectory.pieces] == [3]

    (segment,) = run(tokenizer, scenario).of(SegmentGenerated)
    assert (segment.finish_reason, len(segment.tokens)) == ("abort", 3)


def test_a_driver_cancelled_while_a_piece_is_stored_has_it_after_settling(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        sink.held = asyncio.Event()
        task = asyncio.create_task(single_turn(episode))
        while episode._recording is None:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert episode.trajectory.pieces == []
        sink.held.set()
        await episode.settle()
        assert len(episode.trajectory.pieces) == 1

    assert len(run(tokenizer, scenario).of(SegmentGenerated)) == 1


def test_turns_observations_and_siblings(tokenizer: Any) -> None:
    async def scenario(episode: Episode, engine: Engine, sink: Sink) -> None:
        seen = np.array([5, 6, 7], np.int32)
        await episode.generate(max_new_tokens=2)
        await episode.observe(seen, "tool", "result")
        await episode.generate(max_new_tokens=4)
        assert engine.limits == [2, 4]
        at = episode.trajectory
        assert (at.response_length, at.sampled_tokens, at.next_turn) == (9, 6, 1)
        assert at.context()[4:7].tolist() == [5, 6, 7]
        other = await episode.sibling(seen, text="summary")
        await single_turn(other)
        assert episode.siblings == [other]
        with pytest.raises(InvalidArgument, match="tool, environment, user, system"):
            await episode.observe(seen, "nobody")

    sink = run(tokenizer, scenario)
    (observed,) = sink.of(ObservationAppended)
    assert (observed.turn, observed.start, observed.source) == (0, 2, "tool")
    assert [(one.turn, one.start) for one in sink.of(SegmentGenerated)] == [(0, 0), (1, 5), (0, 0)]
    (issued,) = sink.of(PromptIssued)
    assert (issued.parent_index, issued.group_index) == (2, 1)
    assert (issued.indices.tolist(), issued.rollout_ids.tolist()) == ([100], [2])
