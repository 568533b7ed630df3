"""Measuring a weight version on prompts that it does not train on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ledger.events import EvalScored
from ledger.seeds import derive_seed
from rollout.protocol import Engine, GenerationRequest, SamplingParams
from rollout.records import response_text
from rollout.rewards import RewardFunction, ScoredSample
from rollout.tasks import PromptSource

__all__ = ["evaluate"]


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
) -> EvalScored:
    """One response to each of the first `n_prompts` prompts of `source`, scored.

    The sampling seeds derive from `seed` and the row alone, so that every version, on every branch,
    answers the same prompts with the same random numbers: differences are those of the weights.
    """
    began = time.perf_counter()
    prompts = [source.prompt(row) for row in range(n_prompts)]
    contexts = [
        np.array(tokenizer.encode(p.text, add_special_tokens=False), np.int32)
        if p.tokens is None
        else p.tokens
        for p in prompts
    ]
    results = engine.generate(
        [
            GenerationRequest(index=row, tokens=tokens, seed=derive_seed("eval", seed, row))
            for row, tokens in enumerate(contexts)
        ],
        params,
    )
    rewards = np.zeros(n_prompts, np.float64)
    for row, (prompt, tokens, result) in enumerate(zip(prompts, contexts, results, strict=True)):
        sample = ScoredSample(
            index=row,
            group_index=row,
            rollout_id=row,
            prompt=prompt.text,
            response=response_text(
                tokenizer, result.tokens, result.finish_reason, params.stop_token_ids
            ),
            tokens=np.concatenate([tokens, result.tokens]),
            response_length=len(result.tokens),
            label=prompt.label,
            metadata=dict(prompt.metadata or {}),
            finish_reason=result.finish_reason,
        )
        rewards[row] = reward(sample).value
    return EvalScored(
        weight_version=weight_version,
        name=name,
        source=source.name,
        source_rows=np.arange(n_prompts, dtype=np.int64),
        rewards=rewards,
        response_tokens=[result.tokens for result in results],
        mean_reward=float(rewards.mean()),
        temperature=params.temperature,
        seed=seed,
        verifier=reward.name,
        eval_time_s=time.perf_counter() - began,
    )
