"""Decisions as events, and the words for them."""

from __future__ import annotations

from collections.abc import Mapping

from ledger.errors import InvalidArgument, explain
from ledger.events import SampleDecided
from rollout.buffer import DROPPED, FINAL, BufferedGroup, DataBuffer
from rollout.records import sample_decided
from rollout.settings import RolloutSettings

__all__ = ["group_decisions", "too_few", "why_stale"]


def group_decisions(
    group: BufferedGroup,
    rollout_step: int,
    decision: str,
    reason: str,
    rule: str,
    *,
    baseline: int | None = None,
    consumer: int | None = None,
    reasons: Mapping[int, str] | None = None,
) -> list[SampleDecided]:
    """The events of a decision on a whole group, less samples that are finally decided already.

    `baseline` is its greedy sample, which is never trained on. With `consumer`, the version that
    trains next, each says how old its tokens are. `reasons` are those of single samples.
    """
    events = []
    for index, sample in group.samples.items():
        at = sample.trajectory
        if sample.decision in FINAL:
            continue  # whoever drove the episode decided it
        said = (decision, (reasons or {}).get(index, reason), rule)
        of, staleness = None, None
        if at.rollout_id == baseline and decision in ("kept", "filtered", "stale", "surplus"):
            said = ("surplus", "baseline", "advantage_estimator")
        elif decision == "kept" and not at.sampled_tokens:
            # Its agent asked in its own words: what is trained on are the siblings.
            said = ("surplus", "nothing was sampled", "episode")
        elif consumer is not None:
            of, staleness = consumer, sample.staleness(consumer)
        events.append(
            sample_decided(
                at,
                rollout_step=rollout_step,
                decision=said[0],
                reason=said[1],
                rule=said[2],
                consumer_version=of,
                staleness=staleness,
            )
        )
    return events


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
