"""Our samples as slime's."""

from __future__ import annotations

from rollout.rewards import ScoredSample
from rollout.slime.sample import Sample, Status
from rollout.trajectory import Segment, Trajectory

__all__ = ["pending_sample", "sample_of", "scored_as_slime"]

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def pending_sample(at: Trajectory, session_id: str | None = None) -> Sample:
    """A sample whose generation begins: prompt, label and metadata, and no token yet."""
    return Sample(
        group_index=at.group_index,
        index=at.index,
        rollout_id=at.rollout_id,
        prompt=at.text,
        label=at.label,
        metadata=dict(at.metadata),
        session_id=session_id or at.session_id,
    )


def sample_of(at: Trajectory, response: str, reward: float | None = None) -> Sample:
    """A recorded sample. Where nothing was sampled stands mask 0, and 0.0 as log-prob."""
    made = pending_sample(at)
    made.tokens = at.context().tolist()
    made.response, made.response_length = response, at.response_length
    made.loss_mask, made.rollout_log_probs = [], []
    for piece in at.pieces:
        n = len(piece.tokens)
        sampled = isinstance(piece, Segment)
        made.loss_mask += [int(sampled)] * n
        made.rollout_log_probs += (
            piece.log_probs.tolist() if isinstance(piece, Segment) else [0.0] * n
        )
        if isinstance(piece, Segment) and len(piece.span_versions):
            made.weight_versions.append(str(int(piece.span_versions[-1])))
    made.status = _STATUS.get(at.finish_reason or "", Status.PENDING)
    made.reward = reward
    return made


def scored_as_slime(sample: ScoredSample) -> Sample:
    """What rewards and filters get, as slime's functions expect it."""
    if sample.trajectory is not None:
        made = sample_of(sample.trajectory, sample.response, sample.reward)
        made.metadata = dict(sample.metadata)
        return made
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        prompt=sample.prompt,
        tokens=sample.tokens.tolist(),
        response=sample.response,
        response_length=sample.response_length,
        label=sample.label,
        reward=sample.reward,
        loss_mask=[1] * sample.response_length,
        status=_STATUS.get(sample.finish_reason, Status.PENDING),
        metadata=dict(sample.metadata),
    )
