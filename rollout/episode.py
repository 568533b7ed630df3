"""An episode: what an environment, an agent or a custom function does with a sample, recorded.

Whoever drives it asks for generations and adds observations; each is durable before the driver goes
on, so that an episode that is cut anywhere has lost nothing that an engine was paid for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.errors import EngineFailed, InvalidArgument, explain
from ledger.events import ObservationAppended, PromptIssued
from ledger.fields import Event
from ledger.invariants import OBSERVERS
from ledger.numbering import SAMPLE_SPAN, local_number
from ledger.seeds import sample_seed
from rollout.protocol import (
    AsyncEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    nothing_sampled,
)
from rollout.records import (
    Verifier,
    indexer_recorded,
    response_text,
    retokenization_drift,
    routing_recorded,
    segment_generated,
)
from rollout.rewards import Reward
from rollout.sink import Appender
from rollout.trajectory import Observation, Segment, Trajectory

__all__ = [
    "Episode",
    "EpisodeAborted",
    "EpisodeFunction",
    "EpisodeServices",
    "GenerationCut",
    "single_turn",
]


class EpisodeAborted(Exception):
    """The episode was told to stop; all it has is recorded, and it may go on later."""


class GenerationCut(Exception):
    """One generation was ended by `Episode.cut`; what it has is recorded, and the turn is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeServices:
    """What the episodes of a rollout share."""

    engine: AsyncEngine
    sink: Appender
    tokenizer: Any
    """A Hugging Face one."""
    params: SamplingParams
    run_id: str
    branch: str
    run_seed: int
    source: str
    """Name of the prompt source, for siblings."""
    take_index: Callable[[], int]
    """A number for one more sample of the run, given once."""
    evaluation: bool = False
    """Whether a version is measured, and nothing is trained."""
    adopt: Callable[[Trajectory], None] = lambda trajectory: None
    """Told of the trajectory of each sibling that is begun."""


class Episode:
    """One sample, and those that its agent begins besides. One driver at a time uses it."""

    def __init__(self, trajectory: Trajectory, services: EpisodeServices) -> None:
        """`trajectory` may have pieces already: then it goes on behind them."""
        self.trajectory = trajectory
        self.services = services
        self.siblings: list[Episode] = []
        """Samples of the same execution that this one began, in order."""
        self._given: set[int] = set()
        """Siblings that this run of the driver has begun."""
        self.reward: Reward | None = None
        """What the driver itself says of the execution; None: the reward function is asked."""
        self._aborted = asyncio.Event()
        self._cut = False
        self._request: str | None = None
        self._recording: asyncio.Future[None] | None = None

    @property
    def session_name(self) -> str:
        """A name that no other episode has which runs at the same time."""
        at, services = self.trajectory, self.services
        if not services.evaluation:
            return at.session_id
        which = blake3(f"{services.run_id}/{services.branch}".encode()).hexdigest()[:8]
        return f"evaluation-{which}-{at.rollout_id}"

    @property
    def is_aborted(self) -> bool:
        """Whether it was told to stop: the next generation would not begin."""
        return self._aborted.is_set()

    async def wait_aborted(self) -> None:
        """Return once it was told to stop: for drivers that wait for something else meanwhile."""
        await self._aborted.wait()

    async def abort(self) -> None:
        """Stop: a generation that runs ends with what it has, and none begins any more."""
        self._aborted.set()
        for one in self.siblings:
            await one.abort()
        if self._request is not None:
            await self.services.engine.abort([self._request])

    async def cut(self) -> None:
        """End the generation that runs, with what it has: its driver no longer wants the rest.

        The next generation goes on with the turn. Nothing happens where none runs.
        """
        if self._request is not None:
            self._cut = True
            await self.services.engine.abort([self._request])

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        noted: Mapping[str, Any] | None = None,
    ) -> GenerationResult:
        """Continue the sequence with what the engine samples; it is recorded before this returns.

        `max_new_tokens` limits the turn, tokens that it has from before an abort included; None:
        as the rollout's settings say. `params` replaces those of the rollout. `noted`, which must
        survive JSON, is kept with the segment, as `request` of its engine report.

        Raises:
            EpisodeAborted: it was told to stop. What was sampled until then is recorded.
            GenerationCut: `cut` was called. What was sampled until then is recorded.
            InvalidArgument: the turn has its tokens already, or the model cannot take the request.
            EngineFailed: no engine gave an answer.
        """
        if self.is_aborted:
            raise EpisodeAborted
        at, services = self.trajectory, self.services
        params = services.params if params is None else params
        limit = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        params = replace(params, max_new_tokens=limit - at.sampled_in_turn)
        turn, segment, start = at.next_turn, at.next_segment, at.response_length
        seed = sample_seed(
            services.run_seed,
            at.rollout_step,
            local_number(at.group_index, SAMPLE_SPAN),
            local_number(at.index, SAMPLE_SPAN),
            turn,
        )
        self._request = f"{services.run_id}.{services.branch}.{at.index}.{segment}"
        request = GenerationRequest(
            index=at.index,
            tokens=at.context(),
            seed=seed,
            request_id=self._request,
            session_id=at.session_id,
            routing_start=at.routing_rows,
        )
        self._cut = False
        call = asyncio.ensure_future(self._ask(request, params))
        try:
            result = await asyncio.shield(call)
        except asyncio.CancelledError:
            # Whoever gave up on the driver does not throw away what was sampled.
            self._aborted.set()
            await services.engine.abort([self._request])
            with contextlib.suppress(EngineFailed):  # then there is nothing to keep
                result = await call
                if len(result.tokens):
                    await self._whole(
                        self._record(result, noted, params, seed, turn, segment, start)
                    )
            raise
        finally:
            self._request = None
        if len(result.tokens):
            await self._whole(self._record(result, noted, params, seed, turn, segment, start))
        if result.finish_reason == "abort":
            if self._cut:
                raise GenerationCut
            self._aborted.set()
            raise EpisodeAborted
        return result

    async def _ask(self, request: GenerationRequest, params: SamplingParams) -> GenerationResult:
        """Ask the engine, unless this was told to stop before the engine could know the request."""
        if self.is_aborted or self._cut:
            return nothing_sampled(request, params)
        return await self.services.engine.generate(request, params)

    async def settle(self) -> None:
        """Wait until what was being recorded when the driver was cancelled is recorded.

        Before that the trajectory may lack a piece that the ledger has.
        """
        if self._recording is not None and not self._recording.done():
            await asyncio.wait([self._recording])

    async def _whole(self, recording: Coroutine[Any, Any, None]) -> None:
        """Record a piece, and add it to the trajectory, even where the driver is cancelled."""
        self._recording = asyncio.ensure_future(recording)
        await asyncio.shield(self._recording)

    async def _record(
        self,
        result: GenerationResult,
        noted: Mapping[str, Any] | None,
        params: SamplingParams,
        seed: int,
        turn: int,
        segment: int,
        start: int,
        engine: Verifier | None = None,
    ) -> None:
        at, services = self.trajectory, self.services
        if noted is not None:
            result = replace(result, report={**(result.report or {}), "request": dict(noted)})
        (drift,) = retokenization_drift(services.tokenizer, [result.tokens])
        events: list[Event | None] = [
            segment_generated(
                at.group_index,
                result,
                rollout_id=at.rollout_id,
                rollout_step=at.rollout_step,
                params=params,
                seed=seed,
                engine=services.engine if engine is None else engine,
                drift=drift,
                segment=segment,
                turn=turn,
                start=start,
            ),
            routing_recorded(result, segment=segment, start=at.routing_rows),
            indexer_recorded(result, segment=segment, start=at.routing_rows),
        ]
        await services.sink.append([event for event in events if event is not None])
        at.pieces.append(
            Segment(
                segment=segment,
                turn=turn,
                start=start,
                tokens=result.tokens,
                log_probs=result.log_probs,
                finish_reason=result.finish_reason,
                span_versions=result.span_versions,
            )
        )
        reported = result.expert_ids if result.expert_ids is not None else result.indexer_positions
        if reported is not None:
            at.routing_rows += len(reported)

    async def adopt(
        self, result: GenerationResult, *, engine: Verifier, params: SamplingParams, seed: int
    ) -> None:
        """Add a segment that somebody else sampled, by name and version `engine`.

        It is recorded before this returns. `seed` is the one that was offered for it.
        """
        at = self.trajectory
        await self._whole(
            self._record(
                result,
                None,
                params,
                seed,
                at.next_turn,
                at.next_segment,
                at.response_length,
                engine,
            )
        )

    async def observe(
        self, tokens: npt.NDArray[np.int32], source: str, text: str | None = None
    ) -> None:
        """Add [n] tokens that were not sampled; they end the turn. Recorded before this returns.

        `source` is 'tool', 'environment', 'user' or 'system'. Raises InvalidArgument for another.
        """
        if source not in OBSERVERS:
            raise InvalidArgument(
                explain(
                    "adding an observation",
                    on=f"sample {self.trajectory.index}",
                    expected=f"a source of {', '.join(OBSERVERS)}",
                    found=source,
                )
            )
        await self._whole(self._observe(tokens, source, text))

    async def _observe(self, tokens: npt.NDArray[np.int32], source: str, text: str | None) -> None:
        at = self.trajectory
        turn = at.pieces[-1].turn if at.pieces else 0
        start = at.response_length
        await self.services.sink.append(
            [
                ObservationAppended(
                    index=at.index,
                    rollout_id=at.rollout_id,
                    turn=turn,
                    start=start,
                    tokens=tokens,
                    source=source,
                    text=text,
                )
            ]
        )
        at.pieces.append(
            Observation(turn=turn, start=start, tokens=tokens, source=source, text=text)
        )

    async def sibling(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        text: str = "",
        metadata: Mapping[str, Any] | None = None,
        once: bool = False,
    ) -> Episode:
        """Begin another sample of the same execution, with [P] prompt tokens of its own.

        For a sub-agent, or a context that was compacted. It shares the rollout's reward, and counts
        with this sample as one rollout.

        `once` is for drivers that do everything again where an episode goes on after a cut: the
        first recorded sibling with the same tokens that this run has not been given is given, with
        the pieces that it has.

        Raises:
            EpisodeAborted: this sample was told to stop.
        """
        if once:
            for one in self.siblings:
                is_given = one.trajectory.index in self._given
                if not is_given and np.array_equal(one.trajectory.prompt_tokens, tokens):
                    self._given.add(one.trajectory.index)
                    return one
        if self.is_aborted:
            raise EpisodeAborted
        at, services = self.trajectory, self.services
        index = services.take_index()
        kept = dict(at.metadata if metadata is None else metadata)
        await services.sink.append(
            [
                PromptIssued(
                    prompt_id=blake3(tokens.astype("<i4").tobytes()).digest(),
                    group_index=at.group_index,
                    rollout_step=at.rollout_step,
                    round=0,
                    indices=np.array([index], dtype=np.int64),
                    rollout_ids=np.array([at.rollout_id], dtype=np.int64),
                    tokens=tokens,
                    text=text,
                    label=at.label,
                    source=services.source,
                    source_row=0,
                    data_cursor=0,
                    metadata=canonical_json(kept) if kept else None,
                    parent_index=at.index,
                )
            ]
        )
        made = Episode(
            Trajectory(
                index=index,
                group_index=at.group_index,
                rollout_id=at.rollout_id,
                rollout_step=at.rollout_step,
                prompt_tokens=tokens,
                text=text,
                label=at.label,
                metadata=kept,
                parent_index=at.index,
            ),
            services,
        )
        self._given.add(index)
        self.siblings.append(made)
        services.adopt(made.trajectory)
        if self.is_aborted:
            await made.abort()
        return made

    @property
    def unbegun(self) -> Sequence[Episode]:
        """Recorded siblings that this run of the driver has not begun (with `once`)."""
        return [one for one in self.siblings if one.trajectory.index not in self._given]

    def response_text(self, tokens: npt.NDArray[np.int32], finish_reason: str) -> str:
        """Sampled [n] tokens as text, without the stop token that ended them."""
        stop: Sequence[int] = self.services.params.stop_token_ids
        return response_text(self.services.tokenizer, tokens, finish_reason, stop)


class EpisodeFunction(Protocol):
    """Drives an episode to its end."""

    async def __call__(self, episode: Episode) -> None:
        """Return when the episode has ended; it may set `episode.reward`.

        It can be called for an episode that has pieces already, and goes on behind them.

        Raises:
            EpisodeAborted: as it came from `Episode.generate`.
            Exception: the execution failed. It is recorded as such, never as a reward of zero.
        """


async def single_turn(episode: Episode) -> None:
    """The `EpisodeFunction` of one answer to a prompt."""
    at = episode.trajectory
    # An abort may have come with the last token that it could have.
    full = at.sampled_in_turn >= episode.services.params.max_new_tokens
    if at.finish_reason in ("stop", "length") or (full and at.pieces):
        return
    await episode.generate()
