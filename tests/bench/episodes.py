"""Steps of a training, made from a seed, with the distributions that real ones have.

Token ids follow Zipf's law with 10.3 bits a token (English in a byte-pair encoding has 9 to 10).
Log-probs are those of draws from a softmax, in float32, whose entropy is below 0.01 nats for half
of the tokens and above 0.66 for a fifth, as that of reasoning models (arXiv:2506.01939, section 2);
the trainer's are of the same logits with a little noise. A third of the samples has two turns with
a tool's answer between, which the mask leaves out. Synthetic all the same: real text repeats
phrases.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from blake3 import blake3

from ledger.events import (
    Event,
    ObservationAppended,
    PromptIssued,
    RoutingRecorded,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
    SignalRecorded,
    StepCommitted,
    WeightsPublished,
)
from ledger.weights import TensorRecord, weights_root

__all__ = ["Step", "Text", "make_step", "skewed_routing", "text", "version"]

GROUP_SIZE = 8
_VOCABULARY = 50_000
_CANDIDATES = 64
_NO_PARTS = np.empty(0, np.float64)
_STOP = np.array([2], np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """N tokens that follow each other."""

    tokens: np.ndarray
    """[N] int32."""
    log_probs: np.ndarray
    """[N] float32, by the engine."""
    trained: np.ndarray
    """[N] float32, by the trainer."""


def text(length: int, random: np.random.Generator) -> Text:
    """`length` tokens with both log-probs."""
    ranks = np.arange(_VOCABULARY)
    mass = np.cumsum(1 / (ranks + 2.7) ** 1.1)
    names = np.random.default_rng(0).permutation(_VOCABULARY).astype(np.int32)
    tokens = names[np.searchsorted(mass, random.random(length) * mass[-1])]
    engine, trainer = np.empty(length, np.float32), np.empty(length, np.float32)
    block = 1 << 15
    for at in range(0, length, block):
        rows = min(block, length - at)
        sharpness = np.float32(1) + random.exponential(40.0, (rows, 1)).astype(np.float32)
        logits = random.standard_normal((rows, _CANDIDATES), np.float32) * sharpness
        soft = _log_softmax(logits)
        draw = random.random((rows, 1), np.float32)
        chosen = (np.cumsum(np.exp(soft), axis=1) < draw).sum(axis=1).clip(max=_CANDIDATES - 1)
        row = np.arange(rows)
        engine[at : at + rows] = soft[row, chosen]
        logits += np.float32(0.01) * random.standard_normal(logits.shape, np.float32)
        trainer[at : at + rows] = _log_softmax(logits)[row, chosen]
    return Text(tokens, engine, trainer)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The events of one step, grouped as a training appends them."""

    issued: list[Event]
    sampled: list[Event]
    judged: list[Event]
    trained: list[Event]

    def appends(self) -> list[list[Event]]:
        """In order."""
        return [self.issued, self.sampled, self.judged, self.trained]


def make_step(
    number: int, source: Text, random: np.random.Generator, *, samples: int, response: int
) -> Step:
    """Step `number`: it samples with version `number` and makes the next one.

    Responses have half to three halves of `response` tokens, cut from `source` one after another:
    none comes twice before `source` is used up.
    """
    issued: list[Event] = []
    sampled: list[Event] = []
    judged: list[Event] = []
    trained: list[Event] = []
    first = number * samples
    at = number * samples * response
    settings = blake3(b"settings").digest()
    for index in range(first, first + samples):
        group = index // GROUP_SIZE
        length = int(random.integers(response // 2, response + response // 2))
        at %= len(source.tokens) - length
        if index % GROUP_SIZE == 0:
            issued.append(_prompt(group, number, source.tokens[at : at + 16], index))
        mask = np.ones(length, np.uint8)
        log_probs = source.trained[at : at + length]
        turns = [(0, length)]
        if index % 3 == 0:
            a, b = length // 3, length // 2
            turns = [(0, a), (b, length)]
            mask[a:b] = 0
            log_probs = np.where(mask == 1, log_probs, np.float32("nan"))
            sampled.append(_observation(index, source.tokens[at + a : at + b], a))
        for turn, (low, high) in enumerate(turns):
            piece = slice(at + low, at + high)
            sampled.append(
                _segment(index, number, turn, low, source.tokens[piece], source.log_probs[piece])
            )
        reward = float(random.random() < 0.4)
        judged += [_score(index, group, reward), _kept(index, group, number)]
        trained.append(
            SignalRecorded(
                index=index,
                step=number,
                settings_id=settings,
                loss_mask=mask,
                log_probs=log_probs,
                advantages=np.full(length, reward - 0.4, np.float32),
            )
        )
        at += length
    trained += [_committed(number, first, samples, settings), version(number + 1, number)]
    return Step(issued, sampled, judged, trained)


def _prompt(group: int, step: int, tokens: np.ndarray, index: int) -> PromptIssued:
    indices = np.arange(index, index + GROUP_SIZE)
    return PromptIssued(
        prompt_id=blake3(tokens.tobytes()).digest(),
        group_index=group,
        rollout_step=step,
        round=0,
        indices=indices,
        rollout_ids=indices,
        tokens=tokens,
        text=f"question {group}",
        label="42",
        source="bench",
        source_row=group,
        data_cursor=group + 1,
    )


def _observation(index: int, tokens: np.ndarray, start: int) -> ObservationAppended:
    return ObservationAppended(
        index=index, rollout_id=index, turn=0, start=start, tokens=tokens, source="tool"
    )


def _segment(
    index: int, step: int, turn: int, start: int, tokens: np.ndarray, log_probs: np.ndarray
) -> SegmentGenerated:
    return SegmentGenerated(
        index=index,
        rollout_id=index,
        group_index=index // GROUP_SIZE,
        rollout_step=step,
        segment=turn,
        turn=turn,
        start=start,
        tokens=tokens,
        rollout_log_probs=log_probs,
        logprob_mode="full",
        logprob_temperature=1.0,
        span_starts=np.array([0], np.int32),
        span_ends=np.array([len(tokens)], np.int32),
        span_versions=np.array([step], np.int64),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=4096,
        stop_token_ids=_STOP,
        sampling_seed=index,
        finish_reason="stop",
        engine="bench",
        engine_version="1",
        generation_time_s=1.0,
    )


def _score(index: int, group: int, reward: float) -> SampleScored:
    return SampleScored(
        index=index,
        rollout_id=index,
        group_index=group,
        raw_reward=reward,
        reward=reward,
        part_names=[],
        part_values=_NO_PARTS,
        verifier="bench",
        verifier_version="1",
    )


def _kept(index: int, group: int, step: int) -> SampleDecided:
    return SampleDecided(
        index=index,
        rollout_id=index,
        group_index=group,
        rollout_step=step,
        decision="kept",
        reason="",
        rule="bench",
    )


def _committed(number: int, first: int, samples: int, settings: bytes) -> StepCommitted:
    return StepCommitted(
        step=number,
        rollout_step=number,
        step_in_rollout=0,
        weight_version_in=number,
        weight_version_out=number + 1,
        indices=np.arange(first, first + samples),
        micro_batch_offsets=np.array([0, samples], np.int32),
        micro_batch_ranks=np.array([0], np.int32),
        micro_batch_rows=samples,
        micro_batch_width=4096,
        settings_id=settings,
        settings="{}",
        layout="{}",
        learning_rate=1e-6,
        loss=0.1,
        grad_norm=1.0,
        metric_names=["entropy"],
        metric_values=np.array([0.5]),
        batch_digest=bytes(32),
        micro_batch_digests=[bytes(32)],
        gradient_digest=bytes(32),
        optimizer_digest=bytes(32),
        random_state_digest=bytes(32),
        num_threads=1,
        trained_tokens=samples,
    )


def version(number: int, step: int | None) -> WeightsPublished:
    """A weight version of one small tensor; without a step, the first of its run."""
    record = TensorRecord("w", "float32", (1,), bytes(32))
    return WeightsPublished(
        weight_version=number,
        parent_version=None if step is None else step,
        step=step,
        tensor_names=["w"],
        tensor_dtypes=["float32"],
        tensor_shapes=[np.array([1], np.int64)],
        tensor_checksums=[record.checksum],
        root=weights_root([record]),
        size_bytes=4,
        transport="none",
        acknowledged_by=[],
    )


def skewed_routing(
    samples: int, tokens: int, random: np.random.Generator, *, layers: int = 48, topk: int = 8
) -> list[RoutingRecorded]:
    """Routing with 8 of 128 experts that are not equally liked: each layer has its own favourites.

    Ids as a router gives them: the k largest of its scores, no expert twice for a token.
    """
    experts = 128
    liked = np.exp(random.gumbel(0.0, 1.0, (layers, experts))).astype(np.float32)
    made: list[RoutingRecorded] = []
    for index in range(samples):
        # The k first to arrive are the k largest of log(liked) plus Gumbel noise.
        arrival = random.standard_exponential((tokens, layers, experts), np.float32) / liked
        top = np.argpartition(arrival, topk, axis=2)[:, :, :topk]
        order = np.argsort(np.take_along_axis(arrival, top, 2), axis=2)
        ids = np.take_along_axis(top, order, 2).astype(np.uint8)
        made.append(
            RoutingRecorded(
                index=index,
                segment=0,
                start=0,
                rows=tokens,
                layers=layers,
                topk=topk,
                num_experts=experts,
                dtype="uint8",
                expert_ids=ids.tobytes(),
            )
        )
    return made
