"""Measuring a weight version on prompts that it does not train on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ledger.errors import Diverged, RewardFailed, explain
from ledger.evaluations import Evaluation
from ledger.events import EvalScored
from ledger.seeds import derive_seed
from rollout.protocol import Engine, GenerationRequest, GenerationResult, SamplingParams
from rollout.records import response_text
from rollout.rewards import RewardFunction, ScoredSample
from rollout.tasks import PromptSource

__all__ = ["EvaluationRun", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """One evaluation that can be made of any version."""

    name: str
    source: PromptSource
    reward: RewardFunction
    n_prompts: int
    """The first rows of the source."""
    n_samples: int = 1
    """Responses to each of them."""
    params: SamplingParams
    seed: int
    says_sampling: bool = False
    """Whether its events say how they sampled; else it is as in the rollout."""

    @property
    def key(self) -> Evaluation:
        """What its events are compared by."""
        said = self.says_sampling
        return Evaluation(
            self.name,
            self.source.name,
            self.n_prompts * self.n_samples,
            self.seed,
            self.reward.name,
            self.params.temperature,
            self.params.top_p if said else None,
            self.params.top_k if said else None,
            self.params.max_new_tokens if said else None,
        )

    def measure(self, engine: Engine, tokenizer: Any, weight_version: int) -> EvalScored:
        """As `evaluate`."""
        return evaluate(
            engine,
            self.source,
            self.reward,
            tokenizer,
            name=self.name,
            n_prompts=self.n_prompts,
            n_samples=self.n_samples,
            params=self.params,
            seed=self.seed,
            weight_version=weight_version,
            says_sampling=self.says_sampling,
        )


def evaluate(
    engine: Engine,
    source: PromptSource,
    reward: RewardFunction,
    tokenizer: Any,
    *,
    name: str,
    n_prompts: int,
    params: SamplingParams,
    seed: int,
    weight_version: int,
    n_samples: int = 1,
    says_sampling: bool = False,
) -> EvalScored:
    """`n_samples` responses to each of the first `n_prompts` prompts of `source`, scored.

    The sampling seeds derive from `seed`, the row and the number of the response alone, so that
    every version, on every branch, answers the same prompts with the same random numbers:
    differences are those of the weights. Where the verifier gives no reward, NaN stands for it, and
    the mean is over the others.

    Raises:
        RewardFailed: it gave none at all.
        Diverged: an answer is not of `weight_version`, from its first to its last token.
    """
    began = time.perf_counter()
    rows = np.repeat(np.arange(n_prompts, dtype=np.int64), n_samples)
    prompts = [source.prompt(row) for row in range(n_prompts)]
    contexts = [
        np.array(tokenizer.encode(p.text, add_special_tokens=False), np.int32)
        if p.tokens is None
        else p.tokens
        for p in prompts
    ]
    results = engine.generate(
        [
            GenerationRequest(
                index=index, tokens=contexts[row], seed=_seed(seed, int(row), index % n_samples)
            )
            for index, row in enumerate(rows)
        ],
        params,
    )
    _require_version(results, weight_version, engine.name)
    rewards = np.full(len(rows), np.nan)
    failed: RewardFailed | None = None
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        prompt = prompts[row]
        sample = ScoredSample(
            index=index,
            group_index=int(row),
            rollout_id=index,
            prompt=prompt.text,
            response=response_text(
                tokenizer, result.tokens, result.finish_reason, params.stop_token_ids
            ),
            tokens=np.concatenate([contexts[row], result.tokens]),
            response_length=len(result.tokens),
            label=prompt.label,
            metadata=dict(prompt.metadata or {}),
            finish_reason=result.finish_reason,
        )
        try:
            rewards[index] = reward(sample).value
        except RewardFailed as error:
            failed = error
    given = rewards[~np.isnan(rewards)]
    if failed is not None and not len(given):
        raise failed
    return EvalScored(
        weight_version=weight_version,
        name=name,
        source=source.name,
        source_rows=rows,
        rewards=rewards,
        response_tokens=[result.tokens for result in results],
        mean_reward=float(given.mean()),
        temperature=params.temperature,
        seed=seed,
        verifier=reward.name,
        eval_time_s=time.perf_counter() - began,
        top_p=params.top_p if says_sampling else None,
        top_k=params.top_k if says_sampling else None,
        max_new_tokens=params.max_new_tokens if says_sampling else None,
    )


def _seed(seed: int, row: int, number: int) -> int:
    return derive_seed("eval", seed, row) if number == 0 else derive_seed("eval", seed, row, number)


def _require_version(results: Sequence[GenerationResult], weight_version: int, engine: str) -> None:
    """A measurement is of one version: raise Diverged where an answer says otherwise, or is cut."""
    for result in results:
        versions = sorted(set(result.span_versions.tolist()))
        if versions != [weight_version] or result.finish_reason == "abort":
            raise Diverged(
                explain(
                    "evaluating a weight version",
                    on=f"version {weight_version}, engine {engine}, answer {result.index}",
                    expected=f"every token sampled by version {weight_version}, to the end",
                    found=f"versions {versions} (-1: it does not say), ended by "
                    f"{result.finish_reason!r}",
                    do="nothing was recorded; look at which clients the engine has besides, or "
                    "leave out --eval-interval where it does not say its version",
                )
            )
