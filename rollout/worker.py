"""A rollout step: prompts out, samples in, scored and decided; a stage is stored before the next.

Each stage looks in the ledger first. A job that was killed anywhere goes on by asking for the same
rollout step again: nothing is issued, generated or scored twice, and what the ledger then holds is
what an uninterrupted run would have written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, RewardFailed, explain
from ledger.fields import Event
from ledger.numbering import SAMPLE_SPAN, local_number, run_number
from ledger.seeds import sample_seed
from rollout.custom_reward import rewards_of
from rollout.filters import create_filter
from rollout.history import (
    Generated,
    IssuedGroup,
    RolloutHistory,
    next_numbers,
    read_history,
)
from rollout.protocol import Engine, GenerationRequest, GenerationResult, SamplingParams
from rollout.records import (
    prompt_issued,
    response_text,
    retokenization_drift,
    routing_recorded,
    sample_decided,
    sample_scored,
    segment_generated,
)
from rollout.rewards import RewardFunction, ScoredSample
from rollout.settings import RolloutSettings
from rollout.tasks import PromptSource, stop_token_ids

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.writer import Writer

__all__ = ["RolloutProgress", "RolloutSummary", "RolloutWorker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """Where a rollout step stands."""

    rollout_step: int
    round: int
    stage: str
    """The stage that has just ended: 'issued', 'generated', 'decided'."""
    kept_groups: int
    wanted_groups: int
    samples: int
    """Samples of the step that have a response."""
    tokens: int
    """Their response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutSummary:
    """What a finished rollout step holds; read from the ledger alone."""

    rollout_step: int
    kept_indices: npt.NDArray[np.int64]
    """[B] Samples to train on, by (group_index, index)."""
    indices: npt.NDArray[np.int64]
    """[N] All samples of the step, by (group_index, index)."""
    raw_rewards: npt.NDArray[np.float64]
    """[N] Their rewards, also of those that were dropped; fewer where samples have none."""
    mean_reward: float
    """Mean of `raw_rewards` less greedy baselines: of the policy, not of what the filter left."""
    tokens: int
    """Response tokens of all samples."""
    generation_time_s: float
    """Seconds in the engine, when the samples were generated."""
    counts: Mapping[str, int]
    """Samples by decision."""


class RolloutWorker:
    """Makes the rollout steps of one branch."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        writer: Writer,
        engine: Engine,
        source: PromptSource,
        reward: RewardFunction,
        tokenizer: Any,
        settings: RolloutSettings,
        progress: Callable[[RolloutProgress], None] | None = None,
    ) -> None:
        """`tokenizer` is a Hugging Face one. Raises InvalidArgument for a filter or stop text that
        cannot work."""
        self._ledger, self._run_id, self._branch = ledger, run_id, branch
        self._branch_number = ledger.branch_number(run_id, branch)
        self._writer, self._engine, self._source = writer, engine, source
        self._reward, self._tokenizer, self._settings = reward, tokenizer, settings
        self._filter = create_filter(settings.dynamic_sampling_filter_path)
        stop = settings.rollout_stop_token_ids
        self._params = settings.sampling(
            stop_token_ids(source, tokenizer) if stop is None else stop
        )
        self._greedy = replace(self._params, temperature=0.0, top_p=1.0, top_k=-1)
        self._progress = progress

    def rollout(self, rollout_step: int) -> RolloutSummary:
        """Make, or finish, a rollout step; returns at once where the ledger holds all of it.

        Raises:
            InvalidArgument: after `max_rounds` rounds too few groups passed the filter, or the
                engine or the reward refuses. All that was made until then is in the ledger.
        """
        settings = self._settings
        history = read_history(self._ledger.reader(self._run_id, self._branch), rollout_step)
        number = 0
        while history.kept_groups() < settings.rollout_batch_size or history.round(number):
            groups = history.round(number)
            if not groups:
                if number >= settings.max_rounds:
                    raise self._too_few(history, number)
                groups = self._issue(history, number)
                self._tell(history, number, "issued")
            if self._generate(history, groups):
                self._tell(history, number, "generated")
            if self._score_and_decide(history, groups):
                self._tell(history, number, "decided")
            number += 1
        return _summarise(history, {self._baseline(group) for group in history.groups})

    def _issue(self, history: RolloutHistory, number: int) -> list[IssuedGroup]:
        settings, step = self._settings, history.rollout_step
        count, size = settings.groups_of_round(number), settings.n_samples_per_prompt
        size += settings.greedy_baseline_key is not None
        following = next_numbers(
            self._ledger.reader(self._run_id, self._branch),
            self._ledger.reader(self._run_id, None),
            self._source.name,
        )
        group = run_number(self._branch_number, following.group, SAMPLE_SPAN)
        index = run_number(self._branch_number, following.index, SAMPLE_SPAN)
        row = following.row
        groups, events = [], []
        for i in range(count):
            prompt = self._source.prompt(row + i)
            tokens = prompt.tokens
            if tokens is None:
                encoded = self._tokenizer.encode(prompt.text, add_special_tokens=False)
                tokens = np.array(encoded, dtype=np.int32)
            indices = np.arange(index + i * size, index + (i + 1) * size, dtype=np.int64)
            made = IssuedGroup(
                round=number,
                group_index=group + i,
                indices=indices,
                rollout_ids=indices,
                tokens=tokens,
                text=prompt.text,
                label=prompt.label,
                metadata=dict(prompt.metadata or {}),
            )
            groups.append(made)
            events.append(
                prompt_issued(made, rollout_step=step, source=self._source.name, source_row=row + i)
            )
        self._writer.append(events)
        history.groups += groups
        return groups

    def _generate(self, history: RolloutHistory, groups: Sequence[IssuedGroup]) -> bool:
        """Generate what is missing; False where nothing was."""
        slots = [
            (group, int(index), int(rollout_id))
            for group in groups
            for index, rollout_id in zip(group.indices, group.rollout_ids, strict=True)
        ]
        missing = {index for _, index, _ in slots if index not in history.generated}
        if not missing:
            return False
        seeds = [
            sample_seed(
                self._settings.run_seed,
                history.rollout_step,
                local_number(group.group_index, SAMPLE_SPAN),
                local_number(index, SAMPLE_SPAN),
                0,
            )
            for group, index, _ in slots
        ]
        requests = [
            GenerationRequest(index=index, tokens=group.tokens, seed=seed)
            for (group, index, _), seed in zip(slots, seeds, strict=True)
        ]
        greedy = {self._baseline(group) for group in groups}
        params = [self._greedy if index in greedy else self._params for _, index, _ in slots]
        results = self._answers(requests, params)
        drifts = retokenization_drift(self._tokenizer, [result.tokens for result in results])
        segments: list[Event] = []
        routings: list[Event] = []
        for (group, index, rollout_id), seed, result, drift, used in zip(
            slots, seeds, results, drifts, params, strict=True
        ):
            if index not in missing:
                continue
            segments.append(
                segment_generated(
                    group.group_index,
                    result,
                    rollout_id=rollout_id,
                    rollout_step=history.rollout_step,
                    params=used,
                    seed=seed,
                    engine=self._engine,
                    drift=drift,
                )
            )
            routing = routing_recorded(result)
            if routing is not None:
                routings.append(routing)
        self._writer.append(segments + routings)
        for result in results:
            if result.index in missing:
                history.generated[result.index] = Generated(
                    tokens=result.tokens,
                    finish_reason=result.finish_reason,
                    time_s=result.time_s,
                )
        return True

    def _answers(
        self, requests: Sequence[GenerationRequest], params: Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        """The whole round again, even if only some is missing: the bits depend on the batch."""
        answers: dict[int, GenerationResult] = {}
        for one in (self._params, self._greedy):
            asked = [r for r, p in zip(requests, params, strict=True) if p is one]
            if asked:
                answers |= {result.index: result for result in self._engine.generate(asked, one)}
        return [answers[request.index] for request in requests]

    def _baseline(self, group: IssuedGroup) -> int | None:
        """The group's greedy sample, its last; None where there is none."""
        has_one = len(group.indices) > self._settings.n_samples_per_prompt
        wanted = self._settings.greedy_baseline_key is not None
        return int(group.indices[-1]) if wanted and has_one else None

    def _samples(self, history: RolloutHistory, group: IssuedGroup) -> list[ScoredSample]:
        samples = []
        for index, rollout_id in zip(group.indices, group.rollout_ids, strict=True):
            found = history.generated[int(index)]
            samples.append(
                ScoredSample(
                    index=int(index),
                    group_index=group.group_index,
                    rollout_id=int(rollout_id),
                    prompt=group.text,
                    response=response_text(
                        self._tokenizer,
                        found.tokens,
                        found.finish_reason,
                        self._params.stop_token_ids,
                    ),
                    tokens=np.concatenate([group.tokens, found.tokens]),
                    response_length=len(found.tokens),
                    label=group.label,
                    metadata=group.metadata,
                    finish_reason=found.finish_reason,
                    reward=history.rewards.get(int(index)),
                )
            )
        return samples

    def _score_and_decide(self, history: RolloutHistory, groups: Sequence[IssuedGroup]) -> bool:
        """Score and decide what is not; False where everything was."""
        kept = history.kept_groups()
        scores: list[Event] = []
        decisions: list[Event] = []
        rewards: dict[int, float] = {}
        decided: dict[int, str] = {}
        failures: dict[int, RewardFailed] = {}
        for group in groups:
            if all(int(i) in history.decisions for i in group.indices):
                continue
            samples = self._samples(history, group)
            baseline = samples.pop() if self._baseline(group) is not None else None
            every = samples if baseline is None else [baseline, *samples]
            parts: dict[str, float] = {}
            unscored = [one for one in every if one.reward is None]
            found, failed = rewards_of(self._reward, unscored)
            for sample in every:
                reward = found.get(sample.index)
                if reward is not None:
                    reward = replace(reward, parts={**reward.parts, **parts})
                    scores.append(sample_scored(sample, reward, self._reward))
                    sample.reward = rewards[sample.index] = float(reward.value)
                if sample is baseline and sample.reward is not None:
                    parts[str(self._settings.greedy_baseline_key)] = float(sample.reward)
            if failed:
                failures.update(failed)
                decisions += self._failed(every, failed, history.rollout_step, decided)
                continue
            if baseline is not None:
                decided[baseline.index] = "surplus"
                decisions.append(
                    sample_decided(
                        baseline,
                        rollout_step=history.rollout_step,
                        decision="surplus",
                        reason="baseline",
                        rule="advantage_estimator",
                    )
                )
            decision, reason, rule = self._decide(samples, kept)
            kept += decision == "kept"
            for sample in samples:
                decided[sample.index] = decision
                decisions.append(
                    sample_decided(
                        sample,
                        rollout_step=history.rollout_step,
                        decision=decision,
                        reason=reason,
                        rule=rule,
                    )
                )
        if not decisions:
            return False
        self._writer.append(scores + decisions)
        history.rewards |= rewards
        history.decisions |= decided
        if failures and not rewards:
            # Nothing says that the next round would fare better.
            raise next(iter(failures.values()))
        return True

    def _failed(
        self,
        samples: Sequence[ScoredSample],
        failed: Mapping[int, RewardFailed],
        rollout_step: int,
        decided: dict[int, str],
    ) -> list[Event]:
        """The decisions on a group of which samples have no reward: it cannot be compared."""
        events: list[Event] = []
        why = str(next(iter(failed.values()))).splitlines()[0]
        for sample in samples:
            own = failed.get(sample.index)
            decided[sample.index] = "failed" if own is not None else "filtered"
            events.append(
                sample_decided(
                    sample,
                    rollout_step=rollout_step,
                    decision=decided[sample.index],
                    reason=f"a sample of its group failed: {why}" if own is None else _short(own),
                    rule=self._reward.name,
                )
            )
        return events

    def _decide(self, samples: Sequence[ScoredSample], kept: int) -> tuple[str, str, str]:
        """Decision, reason and rule for a whole group, where `kept` groups are kept already."""
        name = self._settings.dynamic_sampling_filter_path
        found = self._filter(self._settings, samples)
        if not found.keep:
            return "filtered", found.reason or "", name
        if kept < self._settings.rollout_batch_size:
            return "kept", "", name
        return (
            "surplus",
            f"{self._settings.rollout_batch_size} groups were kept before it",
            "rollout_batch_size",
        )

    def _too_few(self, history: RolloutHistory, rounds: int) -> InvalidArgument:
        mean = np.mean(list(history.rewards.values())) if history.rewards else float("nan")
        return InvalidArgument(
            explain(
                "gathering groups for a rollout step",
                on=f"rollout step {history.rollout_step} of branch {self._branch!r}",
                expected=f"{self._settings.rollout_batch_size} groups that pass "
                f"{self._settings.dynamic_sampling_filter_path} within {rounds} rounds",
                found=f"{history.kept_groups()} of {len(history.groups)} groups passed; "
                f"mean reward {mean:.4f}",
                do="the task is too easy or too hard for this model: change the task, raise "
                "--n-samples-per-prompt, or use --dynamic-sampling-filter-path none. What was "
                "generated is in the ledger",
            )
        )

    def _tell(self, history: RolloutHistory, number: int, stage: str) -> None:
        if self._progress is not None:
            self._progress(
                RolloutProgress(
                    rollout_step=history.rollout_step,
                    round=number,
                    stage=stage,
                    kept_groups=history.kept_groups(),
                    wanted_groups=self._settings.rollout_batch_size,
                    samples=len(history.generated),
                    tokens=sum(len(g.tokens) for g in history.generated.values()),
                )
            )


def _short(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:500]


def _summarise(history: RolloutHistory, baselines: Collection[int | None]) -> RolloutSummary:
    groups = sorted(history.groups, key=lambda group: group.group_index)
    indices = np.concatenate([np.sort(group.indices) for group in groups])
    kept = np.array([history.decisions[int(i)] == "kept" for i in indices], dtype=bool)
    scored = [int(i) for i in indices if int(i) in history.rewards]
    rewards = np.array([history.rewards[i] for i in scored], dtype=np.float64)
    # All samples of a round share one engine call and carry its time.
    by_round = {g.round: history.generated[int(g.indices[0])].time_s for g in groups}
    return RolloutSummary(
        rollout_step=history.rollout_step,
        kept_indices=indices[kept],
        indices=indices,
        raw_rewards=rewards,
        mean_reward=float(rewards[[i not in baselines for i in scored]].mean()),
        tokens=sum(len(history.generated[int(i)].tokens) for i in indices),
        generation_time_s=float(sum(by_round.values())),
        counts=dict(sorted(Counter(history.decisions[int(i)] for i in indices).items())),
    )
