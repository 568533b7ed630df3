"""Events of the rollout side: prompts, segments, observations, routing, scores, decisions.

A sample's sequence is its prompt followed by its response. The response is made of pieces —
segments (sampled by the engine) and observations (everything else) — each of which says at which
response offset it begins (`start`), so that a missing piece shows as a hole.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ledger.fields import Event, column, event

__all__ = [
    "UNKNOWN_VERSION",
    "EvalScored",
    "IndexerRecorded",
    "ObservationAppended",
    "PromptIssued",
    "PromptsLeftOut",
    "RoutingRecorded",
    "SampleDecided",
    "SampleScored",
    "SegmentGenerated",
]

UNKNOWN_VERSION = -1
"""In `span_versions`: the engine did not say which version sampled these tokens."""

_tokens = pa.list_(pa.int32())
_floats = pa.list_(pa.float32())


@event("prompt_issued", layout=2)
class PromptIssued(Event):
    """A prompt was given out for a group of samples. One row a group, and one a sibling sample."""

    prompt_id: bytes = column(
        1, pa.binary(32), "blake3 of the token ids (int32, little-endian): the prompt's identity."
    )
    group_index: int = column(2, pa.int64(), "The group; unique in the run.")
    rollout_step: int = column(3, pa.int64(), "The outer iteration that asked for it.")
    round: int = column(
        4, pa.int32(), "0, then 1, 2, … where a filter made the step ask for more prompts."
    )
    indices: np.ndarray = column(
        5, pa.list_(pa.int64()), "[G] The samples of the group; unique in the run."
    )
    rollout_ids: np.ndarray = column(
        6, pa.list_(pa.int64()), "[G] The execution each sample belongs to."
    )
    tokens: np.ndarray = column(7, _tokens, "[P] Prompt token ids, as the engine gets them.")
    text: str = column(8, pa.string(), "The prompt as text. The ids are the truth.")
    label: str | None = column(9, pa.string(), "What the verifier compares with.", nullable=True)
    source: str = column(10, pa.string(), "The task or data set, with its settings.")
    source_row: int = column(11, pa.int64(), "Row in the source.")
    data_cursor: int = column(12, pa.int64(), "The source's position after this prompt was taken.")
    metadata: str | None = column(13, pa.string(), "JSON for the verifier.", nullable=True)
    retry_of: int | None = column(
        14,
        pa.int64(),
        "The group in whose place this one was issued: it failed, or became too old.",
        nullable=True,
        since=2,
    )
    parent_index: int | None = column(
        15,
        pa.int64(),
        "The sample in whose episode this one began, as a sub-agent or with a compacted context; "
        "NULL for a prompt of the source.",
        nullable=True,
        since=2,
    )


@event("segment_generated", layout=3)
class SegmentGenerated(Event):
    """One engine call for one sample: only its new tokens. R is their number."""

    index: int = column(1, pa.int64(), "The sample.")
    rollout_id: int = column(2, pa.int64(), "The execution it belongs to.")
    group_index: int = column(3, pa.int64(), "The prompt's group.")
    rollout_step: int = column(4, pa.int64(), "The outer iteration.")
    segment: int = column(5, pa.int32(), "Number of the engine call within the sample, from 0.")
    turn: int = column(6, pa.int32(), "Number of the turn within the episode, from 0.")
    start: int = column(7, pa.int32(), "Offset in the response of the first new token.")
    tokens: np.ndarray = column(8, _tokens, "[R] New token ids, as sampled.")
    rollout_log_probs: np.ndarray = column(
        9, _floats, "[R] Natural log-probability of each token by the engine, before the update."
    )
    sampler_log_probs: np.ndarray | None = column(
        10,
        _floats,
        "[R] What the sampler itself saw, where rollout_log_probs were recomputed by a prefill.",
        nullable=True,
    )
    logprob_mode: str = column(
        11,
        pa.string(),
        "'full': of the whole vocabulary's distribution; 'processed': after top-p/top-k.",
    )
    logprob_temperature: float = column(
        12, pa.float64(), "What the logits were divided by before the log-probabilities were taken."
    )
    span_starts: np.ndarray = column(
        13, _tokens, "[S] First token (offset in this segment) of each weight-version span."
    )
    span_ends: np.ndarray = column(14, _tokens, "[S] One past the last token of each span.")
    span_versions: np.ndarray = column(
        15,
        pa.list_(pa.int64()),
        "[S] The weight version that sampled the span; -1 where the engine did not say.",
    )
    temperature: float = column(16, pa.float64(), "Sampling temperature.")
    top_p: float = column(17, pa.float64(), "Nucleus mass; 1.0 is off.")
    top_k: int = column(18, pa.int32(), "Number of candidates; -1 is off.")
    max_new_tokens: int = column(19, pa.int32(), "Limit given to the engine.")
    stop_token_ids: np.ndarray = column(20, _tokens, "Ids that end the generation.")
    sampling_seed: int = column(21, pa.int64(), "Seed of this call; see ledger.seeds.")
    finish_reason: str = column(22, pa.string(), "'stop', 'length' or 'abort'.")
    engine: str = column(23, pa.string(), "Name of the engine.")
    engine_version: str = column(24, pa.string(), "Version of the engine.", measurement=True)
    batch_rows: int | None = column(
        25, pa.int32(), "Rows of the batch the log-probs were computed in.", nullable=True
    )
    batch_width: int | None = column(
        26, pa.int32(), "Tokens a row of that batch, padding included.", nullable=True
    )
    retokenization_drift: int | None = column(
        27,
        pa.int32(),
        "Positions at which decoding and encoding again gives other ids; 0 is none.",
        nullable=True,
    )
    generation_time_s: float | None = column(
        28,
        pa.float64(),
        "Seconds of the engine call (shared by its batch).",
        nullable=True,
        measurement=True,
    )
    cached_tokens: int | None = column(
        29,
        pa.int32(),
        "Prompt tokens served from the prefix cache.",
        nullable=True,
        measurement=True,
    )
    request_id: str | None = column(
        30, pa.string(), "The engine's name of the request.", nullable=True, measurement=True
    )
    rollout_top_p_token_ids: np.ndarray | None = column(
        31,
        _tokens,
        "Ids that top-p and top-k left to choose from, the sets of all tokens one after the other; "
        "NULL where log-probs are 'full'.",
        nullable=True,
        since=2,
    )
    rollout_top_p_token_offsets: np.ndarray | None = column(
        32,
        _tokens,
        "[R+1] The set of token t is rollout_top_p_token_ids[offsets[t]:offsets[t+1]].",
        nullable=True,
        since=2,
    )
    engine_report: str | None = column(
        33,
        pa.string(),
        "JSON: what else the engine's answer said (what ended it, retractions, latencies, "
        "speculative decoding, data-parallel rank, its own words for the version).",
        nullable=True,
        measurement=True,
        since=3,
    )
    engine_address: str | None = column(
        34,
        pa.string(),
        "Which of several engines answered.",
        nullable=True,
        measurement=True,
        since=3,
    )


@event("observation_appended", layout=1)
class ObservationAppended(Event):
    """Tokens between segments that nobody sampled: mask 0, no log-probability."""

    index: int = column(1, pa.int64(), "The sample.")
    rollout_id: int = column(2, pa.int64(), "The execution it belongs to.")
    turn: int = column(3, pa.int32(), "The turn it ends.")
    start: int = column(4, pa.int32(), "Offset in the response of its first token.")
    tokens: np.ndarray = column(5, _tokens, "Token ids.")
    source: str = column(6, pa.string(), "'tool', 'environment', 'user' or 'system'.")
    text: str | None = column(7, pa.string(), "The observation as text.", nullable=True)


@event("routing_recorded", layout=2)
class RoutingRecorded(Event):
    """The experts that each token was sent to. Rows are tokens − 1: the last token is never fed."""

    index: int = column(1, pa.int64(), "The sample.")
    segment: int = column(
        2, pa.int32(), "The engine call that reported it; -1 where the trainer's policy did."
    )
    start: int = column(
        3, pa.int32(), "First row: position in the whole sequence, prompt included."
    )
    rows: int = column(4, pa.int32(), "Token positions covered.")
    layers: int = column(5, pa.int32(), "Mixture-of-experts layers, in model order.")
    topk: int = column(6, pa.int32(), "Experts a token.")
    num_experts: int = column(7, pa.int32(), "Experts a layer.")
    dtype: str = column(8, pa.string(), "'uint8' up to 256 experts, else 'uint16'.")
    expert_ids: bytes = column(
        9, pa.large_binary(), "[rows, layers, topk] ids, C order; order of the top-k kept."
    )
    weights: bytes | None = column(
        10,
        pa.large_binary(),
        "[rows, layers, topk] float32 gate weights: what the output of each expert is multiplied "
        "by.",
        nullable=True,
    )
    policy_version: int | None = column(
        11,
        pa.int64(),
        "NULL: the engine chose these experts while it sampled. Else the trainer's old policy "
        "did, in its forward before the first step of the rollout: the weight version of that "
        "policy.",
        nullable=True,
        since=2,
    )


@event("indexer_recorded", layout=1)
class IndexerRecorded(Event):
    """The earlier tokens that sparse attention chose for each token; rows as of routing."""

    index: int = column(1, pa.int64(), "The sample.")
    segment: int = column(2, pa.int32(), "The engine call that reported it.")
    start: int = column(
        3, pa.int32(), "First row: position in the whole sequence, prompt included."
    )
    rows: int = column(4, pa.int32(), "Token positions covered.")
    layers: int = column(5, pa.int32(), "Layers with an indexer, in model order.")
    topk: int = column(6, pa.int32(), "Positions chosen for a token.")
    positions: bytes = column(
        7,
        pa.large_binary(),
        "[rows, layers, topk] int32 positions, little-endian, C order, as the engine gave them "
        "(below 0: fewer were there to choose from).",
    )


@event("sample_scored", layout=1)
class SampleScored(Event):
    """A verifier gave a reward. Scoring again appends; the last one counts."""

    index: int = column(1, pa.int64(), "The sample.")
    rollout_id: int = column(2, pa.int64(), "The execution it belongs to: its reward counts once.")
    group_index: int = column(3, pa.int64(), "The prompt's group.")
    raw_reward: float = column(4, pa.float64(), "What the verifier said.")
    reward: float = column(5, pa.float64(), "What the estimator gets, after shaping.")
    part_names: list[str] = column(6, pa.list_(pa.string()), "Names of the parts of the reward.")
    part_values: np.ndarray = column(7, pa.list_(pa.float64()), "Their values.")
    verifier: str = column(8, pa.string(), "Name of the reward function.")
    verifier_version: str = column(9, pa.string(), "Its version.")
    response_text: str | None = column(10, pa.string(), "The text that was judged.", nullable=True)


@event("sample_decided", layout=2)
class SampleDecided(Event):
    """Whether a sample goes on to training, and by which rule."""

    index: int = column(1, pa.int64(), "The sample.")
    rollout_id: int = column(2, pa.int64(), "The execution it belongs to.")
    group_index: int = column(3, pa.int64(), "The prompt's group.")
    rollout_step: int = column(4, pa.int64(), "The outer iteration.")
    decision: str = column(
        5,
        pa.string(),
        "'kept', 'filtered', 'aborted', 'surplus', 'stale', 'recycled' or 'failed'.",
    )
    reason: str = column(6, pa.string(), "Why, in a few words; empty for 'kept'.")
    rule: str = column(7, pa.string(), "The filter or setting that decided.")
    consumer_version: int | None = column(
        8,
        pa.int64(),
        "The weight version that the rollout step trains first; NULL where nothing consumes it.",
        nullable=True,
        since=2,
    )
    staleness: int | None = column(
        9,
        pa.int64(),
        "Versions from the oldest one that sampled a token of it to consumer_version, counted by "
        "local numbers (ledger.numbering).",
        nullable=True,
        since=2,
    )


@event("prompts_left_out", layout=1)
class PromptsLeftOut(Event):
    """Rows of a source that no prompt is made of. N is their number."""

    source: str = column(1, pa.string(), "The task or data set, with its settings.")
    source_rows: np.ndarray = column(
        2, pa.list_(pa.int64()), "[N] Rows of the data, in the order of its files, from 0."
    )
    prompt_tokens: np.ndarray = column(3, _tokens, "[N] Tokens of each prompt.")
    reason: str = column(4, pa.string(), "Why, in a few words.")
    rule: str = column(5, pa.string(), "The setting that decided.")


@event("eval_scored", layout=2)
class EvalScored(Event):
    """A weight version was measured on prompts that it does not train on. N is their number."""

    weight_version: int = column(1, pa.int64(), "The version that was measured.")
    name: str = column(2, pa.string(), "Name of the evaluation.")
    source: str = column(3, pa.string(), "The task or data set, with its settings.")
    source_rows: np.ndarray = column(4, pa.list_(pa.int64()), "[N] Rows in the source.")
    rewards: np.ndarray = column(
        5, pa.list_(pa.float64()), "[N] Raw rewards; NaN where the verifier gave none."
    )
    response_tokens: list[np.ndarray] = column(
        6, pa.list_(_tokens), "[N] Sampled token ids of each response."
    )
    mean_reward: float = column(7, pa.float64(), "Mean of `rewards`, NaN left out.")
    temperature: float = column(8, pa.float64(), "Sampling temperature; 0 is greedy.")
    seed: int = column(9, pa.int64(), "Root of the sampling seeds.")
    verifier: str = column(10, pa.string(), "Name of the reward function.")
    eval_time_s: float | None = column(
        11, pa.float64(), "Seconds it took.", nullable=True, measurement=True
    )
    top_p: float | None = column(
        12, pa.float64(), "Nucleus mass; NULL: as in the rollout.", nullable=True, since=2
    )
    top_k: int | None = column(
        13, pa.int32(), "Number of candidates; NULL: as in the rollout.", nullable=True, since=2
    )
    max_new_tokens: int | None = column(
        14, pa.int32(), "Limit of a response; NULL: as in the rollout.", nullable=True, since=2
    )
