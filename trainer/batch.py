"""The batch of a step: everything that enters it, as flat arrays read from the ledger's events.

B samples, T tokens of all prompts and responses one after the other, N response tokens likewise.
The order of samples is the one asked for; no token ever becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ledger.views import TableSource
from trainer.batch_pieces import read_pieces
from trainer.batch_routing import BY_ENGINE, RoutingSource, read_routing
from trainer.batch_rows import distinct_samples
from trainer.batch_scores import read_scores
from trainer.kept_sets import KeptSets

__all__ = ["Batch", "batch_digest", "load_batch"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """The samples of one step, as recorded. Arrays are read-only by convention."""

    indices_B: npt.NDArray[np.int64]
    """The samples, in training order."""
    group_index_B: npt.NDArray[np.int64]
    rollout_id_B: npt.NDArray[np.int64]
    rewards_B: npt.NDArray[np.float64]
    """What the estimator gets: of the last score of each sample."""
    raw_rewards_B: npt.NDArray[np.float64]
    prompt_lengths_B: npt.NDArray[np.int64]
    response_lengths_B: npt.NDArray[np.int64]
    tokens_T: npt.NDArray[np.int32]
    """Prompt then response of each sample."""
    sampled_N: npt.NDArray[np.uint8]
    """1 where the engine sampled the token, 0 in observations."""
    loss_mask_N: npt.NDArray[np.uint8]
    """1 where the token enters the loss."""
    rollout_log_probs_N: npt.NDArray[np.float32]
    """By the engine; NaN where nothing was sampled."""
    weight_versions_N: npt.NDArray[np.int64]
    """The version that sampled each token; -1: nothing was sampled, or the engine did not say."""
    logprob_temperatures_B: npt.NDArray[np.float64]
    """What the engine divided logits by before it took log-probabilities."""
    logprob_processed_B: npt.NDArray[np.bool_]
    """True where log-probabilities are of the distribution after top-p and top-k."""
    truncated_B: npt.NDArray[np.bool_]
    """True where the response ended at the limit of new tokens."""
    expert_ids: tuple[npt.NDArray[np.integer], ...] | None
    """Of each sample [tokens − 1, MoE layers, K] experts that are replayed; None: none are."""
    expert_weights: tuple[npt.NDArray[np.float32], ...] | None = None
    """Of each sample [tokens − 1, MoE layers, K] gate weights that are replayed; None: none are."""
    num_experts: int | None = None
    """Experts a layer, as the routing was recorded."""
    part_names: tuple[str, ...] = ()
    """Names of the P parts that any of the rewards has, sorted."""
    reward_parts_BP: npt.NDArray[np.float64] | None = None
    """Parts of the last score of each sample; NaN where it lacks the part."""
    kept_ids_K: npt.NDArray[np.int32] | None = None
    """The ids that top-p and top-k left at each token, the sets one after the other; None where
    no sample has recorded sets."""
    kept_lengths_N: npt.NDArray[np.int64] | None = None
    """Ids in the set of each token; 0 where it has none."""

    @property
    def offsets_T(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """[B+1] Sample b is tokens_T[offsets_T[b]:offsets_T[b+1]]."""
        return _offsets(self.prompt_lengths_B + self.response_lengths_B)

    @property
    def offsets_N(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """[B+1] The response of sample b is offsets_N[b]:offsets_N[b+1] of every array [N]."""
        return _offsets(self.response_lengths_B)

    @property
    def kept_sets(self) -> KeptSets | None:
        """What top-p and top-k left at each of the N response tokens, where it was recorded."""
        if self.kept_ids_K is None or self.kept_lengths_N is None:
            return None
        return KeptSets(self.kept_ids_K, self.kept_lengths_N)


def load_batch(
    reader: TableSource,
    indices: Sequence[int] | npt.NDArray[np.int64],
    *,
    routing: RoutingSource | None = BY_ENGINE,
) -> Batch:
    """Read the samples `indices`, in that order, from what `reader` sees.

    `routing` says whose choices of experts are read, where any were recorded; None: nobody's.

    Raises:
        InvalidArgument: no sample, or one twice.
        NotFound: a sample without prompt, response or score, named; or samples without routing
            where others have it.
        InvalidEvent: pieces of a response, spans or routing rows with a hole or an overlap, named
            with sample and offsets; segments of a sample that disagree on how log-probabilities
            were taken.
    """
    indices_B = distinct_samples(indices)
    pieces = read_pieces(reader, indices_B)
    scores = read_scores(reader, indices_B, pieces.rollout_id_B)
    lengths_B = pieces.prompt_lengths_B + pieces.response_lengths_B
    experts = None if routing is None else read_routing(reader, indices_B, lengths_B, routing)
    return Batch(
        indices_B=indices_B,
        group_index_B=pieces.group_index_B,
        rollout_id_B=pieces.rollout_id_B,
        rewards_B=scores.rewards_B,
        raw_rewards_B=scores.raw_rewards_B,
        prompt_lengths_B=pieces.prompt_lengths_B,
        response_lengths_B=pieces.response_lengths_B,
        tokens_T=pieces.tokens_T,
        sampled_N=pieces.sampled_N,
        loss_mask_N=pieces.sampled_N,
        rollout_log_probs_N=pieces.rollout_log_probs_N,
        weight_versions_N=pieces.weight_versions_N,
        logprob_temperatures_B=pieces.logprob_temperatures_B,
        logprob_processed_B=pieces.logprob_processed_B,
        truncated_B=pieces.truncated_B,
        expert_ids=None if experts is None else experts.expert_ids,
        expert_weights=None if experts is None else experts.expert_weights,
        num_experts=None if experts is None else experts.num_experts,
        part_names=scores.part_names,
        reward_parts_BP=scores.reward_parts_BP,
        kept_ids_K=pieces.kept_ids_K,
        kept_lengths_N=pieces.kept_lengths_N,
    )


_APART = frozenset({"expert_ids", "expert_weights", "num_experts", "part_names", "reward_parts_BP"})
"""Fields that are no array of every step."""


def batch_digest(batch: Batch, extra: Sequence[tuple[str, npt.NDArray[np.generic]]] = ()) -> bytes:
    """blake3 (32 bytes) over names, dtypes, shapes and bytes of all arrays of the batch, in order.

    `extra` are arrays that enter the step besides, such as the old log-probs of a later step of a
    rollout, or the parts of the rewards where the estimator looks at them. Floats count by their
    bits. What a batch does not have (None) is left out.
    """
    digest = blake3(b"trainer.batch.1")
    named = [
        (f.name, value)
        for f in fields(batch)
        if f.name not in _APART and (value := getattr(batch, f.name)) is not None
    ]
    routing: list[tuple[str, npt.NDArray[np.generic]]]
    routing = [("expert_ids", ids) for ids in batch.expert_ids or ()]
    routing += [("expert_weights", gates) for gates in batch.expert_weights or ()]
    for name, array in [*named, *routing, *extra]:
        digest.update(f"\x1f{name}:{array.dtype.str}:{array.shape}\x1f".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return digest.digest()


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
