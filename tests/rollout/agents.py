"""Episodes for tests: an engine that says given texts, events in memory, and a second beginning."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ledger.events import (
    ObservationAppended,
    PromptIssued,
    RoutingRecorded,
    SegmentGenerated,
)
from ledger.fields import Event
from rollout.engines.scripted_async import ScriptedAsyncEngine
from rollout.episode import Episode, EpisodeServices
from rollout.models.tokenizer import EOS_TOKEN_ID
from rollout.protocol import GenerationRequest, SamplingParams
from rollout.trajectory import Observation, Segment, Trajectory

STOP = EOS_TOKEN_ID


class Sink:
    """Events in memory, in order."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    async def append(self, events: Sequence[Event]) -> None:
        self.events += events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def speaking(tokenizer: Any, *turns: str, **options: Any) -> ScriptedAsyncEngine:
    """Says turn k to a context with k stop tokens in it, and stops; a turn ending in '…' does not.

    The engine counts calls of `generate` by its `requests`.
    """

    def script(request: GenerationRequest, params: SamplingParams) -> tuple[Any, Any]:
        turn = int((request.tokens == STOP).sum())
        text = turns[turn] if turn < len(turns) else turns[-1]
        said = ids_of(tokenizer, text.rstrip("…")) + ([] if text.endswith("…") else [STOP])
        if text.endswith("…"):
            said = (said * params.max_new_tokens)[: params.max_new_tokens]
        return np.array(said, np.int32), np.full(len(said), -0.5, np.float32)

    return ScriptedAsyncEngine(script, vocab_size=len(tokenizer), **options)


def answering(tokenizer: Any, say: Callable[[str], str], **options: Any) -> ScriptedAsyncEngine:
    """Says what `say` makes of the context as text, and stops."""

    def script(request: GenerationRequest, params: SamplingParams) -> tuple[Any, Any]:
        text = say(tokenizer.decode(request.tokens.tolist(), skip_special_tokens=False))
        ids = [*ids_of(tokenizer, text), STOP]
        return np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)

    return ScriptedAsyncEngine(script, vocab_size=len(tokenizer), **options)


def repeating(transcript: Sequence[int], prompt_length: int, vocab: int, **options: Any) -> Any:
    """Says what stands in a transcript, from where the context ends to the next stop token."""
    whole = np.array(transcript, np.int32)

    def script(request: GenerationRequest, params: SamplingParams) -> tuple[Any, Any]:
        rest = whole[len(request.tokens) - prompt_length :]
        end = int(np.flatnonzero(rest == STOP)[0]) + 1
        return rest[:end], np.full(end, -0.5, np.float32)

    return ScriptedAsyncEngine(script, vocab_size=vocab, **options)


def begun(
    tokenizer: Any,
    engine: Any,
    sink: Any,
    *,
    prompt: str = "x>",
    label: str | None = None,
    metadata: dict[str, Any] | None = None,
    max_new_tokens: int = 64,
    index: int = 2,
) -> Episode:
    """An episode; where the sink has pieces of it already, it goes on behind them."""
    trajectory = Trajectory(
        index=index,
        group_index=1,
        rollout_id=index,
        rollout_step=5,
        prompt_tokens=np.array(ids_of(tokenizer, prompt), np.int32),
        text=prompt,
        label=label,
        metadata=metadata or {},
    )
    issued = sink.of(PromptIssued) if isinstance(sink, Sink) else []
    free = itertools.count(max((int(event.indices[0]) + 1 for event in issued), default=100))
    services = EpisodeServices(
        engine=engine,
        sink=sink,
        tokenizer=tokenizer,
        params=SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP,)),
        run_id="run",
        branch="main",
        run_seed=7,
        source="test",
        take_index=free.__next__,
    )
    episode = Episode(trajectory, services)
    if isinstance(sink, Sink):
        _read(episode, sink.events)
    return episode


def _read(episode: Episode, events: Sequence[Event]) -> None:
    """As `rollout.buffer_reading` does from the ledger."""
    by_index = {episode.trajectory.index: episode}
    for event in events:
        if isinstance(event, PromptIssued) and event.parent_index is not None:
            parent = by_index[event.parent_index]
            index = int(event.indices[0])
            made = Trajectory(
                index=index,
                group_index=event.group_index,
                rollout_id=int(event.rollout_ids[0]),
                rollout_step=event.rollout_step,
                prompt_tokens=event.tokens,
                text=event.text,
                label=event.label,
                metadata=parent.trajectory.metadata,
                parent_index=event.parent_index,
            )
            by_index[index] = Episode(made, parent.services)
            parent.siblings.append(by_index[index])
        elif isinstance(event, SegmentGenerated):
            by_index[event.index].trajectory.pieces.append(
                Segment(
                    segment=event.segment,
                    turn=event.turn,
                    start=event.start,
                    tokens=event.tokens,
                    log_probs=event.rollout_log_probs,
                    finish_reason=event.finish_reason,
                    span_versions=event.span_versions,
                )
            )
        elif isinstance(event, RoutingRecorded):
            by_index[event.index].trajectory.routing_rows = event.start + event.rows
        elif isinstance(event, ObservationAppended):
            by_index[event.index].trajectory.pieces.append(
                Observation(
                    turn=event.turn,
                    start=event.start,
                    tokens=event.tokens,
                    source=event.source,
                    text=event.text,
                )
            )


def driven(
    tokenizer: Any,
    function: Any,
    engine: Any,
    events: Sequence[Event] = (),
    during: Callable[[Episode], Any] | None = None,
    **options: Any,
) -> tuple[Episode, Sink]:
    """Drive an episode to its end, behind `events`; `during` runs beside it."""

    async def main() -> tuple[Episode, Sink]:
        sink = Sink(events)
        episode = begun(tokenizer, engine, sink, **options)
        if during is None:
            await function(episode)
        else:
            await asyncio.gather(function(episode), during(episode))
        return episode, sink

    return asyncio.run(main())


def said(sink: Sink) -> list[tuple[Any, ...]]:
    """What matters of the pieces, in order."""
    found: list[tuple[Any, ...]] = []
    for event in sink.events:
        if isinstance(event, SegmentGenerated):
            found.append(("sampled", event.index, event.turn, event.start, event.tokens.tolist()))
        elif isinstance(event, ObservationAppended):
            found.append(
                (event.source, event.index, event.turn, event.start, event.tokens.tolist())
            )
    return found
