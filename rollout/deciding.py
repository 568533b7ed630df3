"""Decisions as events, and the words for them."""

from __future__ import annotations

from ledger.errors import InvalidArgument, explain
from ledger.events import SampleDecided
from rollout.buffer import DROPPED, DataBuffer
from rollout.records import sample_decided
from rollout.settings import RolloutSettings
from rollout.trajectory import Trajectory

__all__ = ["decided", "too_few", "why_stale"]


def decided(
    at: Trajectory,
    rollout_step: int,
    decision: str,
    reason: str,
    rule: str,
    *,
    consumer: int | None = None,
    staleness: int | None = None,
) -> SampleDecided:
    """The event of a decision on one sample."""
    return sample_decided(
        at,
        rollout_step=rollout_step,
        decision=decision,
        reason=reason,
        rule=rule,
        consumer_version=consumer,
        staleness=staleness,
    )


def why_stale(staleness: int | None, bound: int) -> str:
    """Why a group is too old to be consumed; `staleness` None: the engine did not say."""
    if staleness is None:
        return "the engine did not say which version sampled it"
    return f"staleness {staleness}, above {bound}"


def too_few(
    buffer: DataBuffer, settings: RolloutSettings, branch: str, rollout_step: int
) -> InvalidArgument:
    """The error of a step in which too many groups were dropped."""
    made = buffer.decided.get(rollout_step, {}).values()
    counts = {name: sum(one == name for one in made) for name in sorted(DROPPED)}
    return InvalidArgument(
        explain(
            "gathering groups for a rollout step",
            on=f"rollout step {rollout_step} of branch {branch!r}",
            expected=f"{settings.rollout_batch_size} groups that pass "
            f"{settings.dynamic_sampling_filter_path} within {settings.max_rounds} rounds",
            found=", ".join(f"{count} groups {name}" for name, count in counts.items()),
            do="the task is too easy or too hard for this model: change the task, raise "
            "--n-samples-per-prompt, or use --dynamic-sampling-filter-path none. What was "
            'generated is in the ledger; ask why: ledger sql "select decision, reason, count(*) '
            f'from decisions where rollout_step = {rollout_step} group by all"',
        )
    )
