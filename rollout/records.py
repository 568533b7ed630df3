"""The events of a rollout, made from what the worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.events import (
    IndexerRecorded,
    PromptIssued,
    RoutingRecorded,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
)
from ledger.routing import routing_of
from rollout.history import IssuedGroup
from rollout.protocol import AsyncEngine, Engine, GenerationResult, SamplingParams
from rollout.rewards import Reward, ScoredSample, checked_reward

__all__ = [
    "Sample",
    "Verifier",
    "indexer_recorded",
    "prompt_issued",
    "response_text",
    "retokenization_drift",
    "routing_recorded",
    "sample_decided",
    "sample_scored",
    "segment_generated",
]


def response_text(
    tokenizer: Any,
    tokens: npt.NDArray[np.int32],
    finish_reason: str,
    stop_token_ids: Sequence[int],
) -> str:
    """What a verifier reads: the response as text, without the stop token that ended it."""
    said = tokens
    if finish_reason == "stop" and said[-1] in stop_token_ids:
        said = said[:-1]
    text: str = tokenizer.decode(said.tolist(), skip_special_tokens=False)
    return text


def prompt_issued(
    group: IssuedGroup,
    *,
    rollout_step: int,
    source: str,
    source_row: int,
    retry_of: int | None = None,
) -> PromptIssued:
    """The event that gives a prompt out; `retry_of`: in the place of that group."""
    return PromptIssued(
        prompt_id=blake3(group.tokens.astype("<i4").tobytes()).digest(),
        group_index=group.group_index,
        rollout_step=rollout_step,
        round=group.round,
        indices=group.indices,
        rollout_ids=group.rollout_ids,
        tokens=group.tokens,
        text=group.text,
        label=group.label,
        source=source,
        source_row=source_row,
        data_cursor=source_row + 1,
        metadata=canonical_json(group.metadata) if group.metadata else None,
        retry_of=retry_of,
    )


def segment_generated(
    group_index: int,
    result: GenerationResult,
    *,
    rollout_id: int,
    rollout_step: int,
    params: SamplingParams,
    seed: int,
    engine: Engine | AsyncEngine | Verifier,
    drift: int,
    segment: int = 0,
    turn: int = 0,
    start: int = 0,
) -> SegmentGenerated:
    """The event of an engine call; by default the only one of a single-turn sample.

    `start` is the offset in the response of its first token; `rollout_step` the one that issued the
    sample.
    """
    return SegmentGenerated(
        index=result.index,
        rollout_id=rollout_id,
        group_index=group_index,
        rollout_step=rollout_step,
        segment=segment,
        turn=turn,
        start=start,
        tokens=result.tokens,
        rollout_log_probs=result.log_probs,
        sampler_log_probs=result.sampler_log_probs,
        logprob_mode=result.logprob_mode,
        logprob_temperature=result.logprob_temperature,
        span_starts=result.span_starts,
        span_ends=result.span_ends,
        span_versions=result.span_versions,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=np.array(params.stop_token_ids, dtype=np.int32),
        sampling_seed=seed,
        finish_reason=result.finish_reason,
        engine=engine.name,
        engine_version=engine.version,
        batch_rows=result.batch_rows,
        batch_width=result.batch_width,
        retokenization_drift=drift,
        generation_time_s=result.time_s,
        cached_tokens=result.cached_tokens,
        request_id=result.request_id,
        rollout_top_p_token_ids=result.top_p_token_ids,
        rollout_top_p_token_offsets=result.top_p_token_offsets,
        engine_report=None if result.report is None else canonical_json(result.report),
        engine_address=result.engine_address,
    )


def routing_recorded(
    result: GenerationResult, *, segment: int = 0, start: int = 0
) -> RoutingRecorded | None:
    """The event of a result's routing; None for a dense model. Raises: InvalidEvent.

    `start` is the position in the sequence of its first row: the request's `routing_start`.
    """
    ids = result.expert_ids
    if ids is None:
        return None
    return routing_of(
        ids,
        num_experts=result.num_experts,
        index=result.index,
        segment=segment,
        start=start,
        weights=result.expert_weights,
    )


def indexer_recorded(
    result: GenerationResult, *, segment: int = 0, start: int = 0
) -> IndexerRecorded | None:
    """The event of what sparse attention chose; None where the model has none of it."""
    positions = result.indexer_positions
    if positions is None:
        return None
    rows, layers, topk = positions.shape
    return IndexerRecorded(
        index=result.index,
        segment=segment,
        start=start,
        rows=rows,
        layers=layers,
        topk=topk,
        positions=positions.astype("<i4").tobytes(),
    )


class Verifier(Protocol):
    """Who gave a reward."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def version(self) -> str:
        """Its version."""


def sample_scored(sample: ScoredSample, reward: Reward, verifier: Verifier) -> SampleScored:
    """The event of a score.

    Raises:
        InvalidArgument: the reward or a part of it is not a finite number.
    """
    reward = checked_reward(reward, on=f"reward {verifier.name}, sample {sample.index}")
    return SampleScored(
        index=sample.index,
        rollout_id=sample.rollout_id,
        group_index=sample.group_index,
        raw_reward=reward.value,
        reward=reward.value,
        part_names=sorted(reward.parts),
        part_values=np.array([reward.parts[k] for k in sorted(reward.parts)], dtype=np.float64),
        verifier=verifier.name,
        verifier_version=verifier.version,
        response_text=sample.response,
    )


class Sample(Protocol):
    """What names a sample."""

    @property
    def index(self) -> int:
        """Its number in the run."""

    @property
    def rollout_id(self) -> int:
        """The execution it belongs to."""

    @property
    def group_index(self) -> int:
        """Its group."""


def sample_decided(
    sample: Sample,
    *,
    rollout_step: int,
    decision: str,
    reason: str,
    rule: str,
    consumer_version: int | None = None,
    staleness: int | None = None,
) -> SampleDecided:
    """The event of a decision; the last two for a sample that is compared with its consumer."""
    return SampleDecided(
        index=sample.index,
        rollout_id=sample.rollout_id,
        group_index=sample.group_index,
        rollout_step=rollout_step,
        decision=decision,
        reason=reason,
        rule=rule,
        consumer_version=consumer_version,
        staleness=staleness,
    )


def retokenization_drift(tokenizer: Any, responses: Sequence[npt.NDArray[np.int32]]) -> list[int]:
    """For each response, positions at which decoding and encoding again gives other ids.

    Where the lengths differ, the positions that only one of them has count too.
    """
    texts = [tokenizer.decode(r.tolist(), skip_special_tokens=False) for r in responses]
    if not texts:
        return []
    drifts = []
    for response, again in zip(
        responses, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True
    ):
        other = np.array(again, dtype=np.int32)
        shared = min(len(response), len(other))
        drifts.append(
            int((response[:shared] != other[:shared]).sum()) + abs(len(response) - len(other))
        )
    return drifts
