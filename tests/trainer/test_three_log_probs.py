"""Rollout, old and current log-probs by three different models: each goes where it belongs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from blake3 import blake3

from tests.trainer.test_step import NUMBERS, SIZES, make_batch, plan_of
from tests.trainer.tiny_policy import make_folder, make_state
from trainer.forward import token_log_probs
from trainer.frozen import old_actor_of
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings
from trainer.step import run_step
from trainer.stepping import PlannedStep, take_rollout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [make_folder(tmp_path_factory.mktemp(name), seed=s) for s, name in enumerate("abc")]


def by_hand(state, batch) -> np.ndarray:
    """[N] Log-probs sample by sample; NaN where nothing was sampled."""
    parts = []
    for first, last, prompt in zip(
        batch.offsets_T[:-1], batch.offsets_T[1:], batch.prompt_lengths_B, strict=True
    ):
        row = torch.from_numpy(batch.tokens_T[first:last].astype(np.int64))[None]
        with torch.no_grad():
            log_probs, _ = token_log_probs(state.model, row, temperature=1.0)
        parts.append(log_probs.numpy()[0, prompt - 1 :])
    return np.where(batch.sampled_N > 0, np.concatenate(parts), np.float32(np.nan))


class Reader:
    """A ledger that holds the batch, for what `take_rollout` reads of it."""


def test_each_log_prob_goes_where_it_belongs(folders, monkeypatch):
    sampler, old, policy = (make_state(folder) for folder in folders)
    batch = make_batch(state=sampler)
    plan = plan_of(batch, SIZES)
    rollout_N, old_N, current_N = (by_hand(state, batch) for state in (sampler, old, policy))
    sampled = batch.sampled_N > 0
    np.testing.assert_allclose(batch.rollout_log_probs_N[sampled], rollout_N[sampled], atol=1e-5)
    monkeypatch.setattr("trainer.stepping.plan_step", lambda *_, **__: (batch, plan))
    algorithm = AlgorithmSettings(keep_old_actor=True, eps_clip=0.9, eps_clip_high=9.0)
    planned = PlannedStep(
        **{k: v for k, v in NUMBERS.items() if k != "data_time_s"}, indices=batch.indices_B
    )
    ((_, _, result),) = take_rollout(
        policy, Reader(), [planned], algorithm, SIZES, old_actor=old_actor_of(old)
    )
    # Old: recorded as the signal, and compared with the engine's in the mismatch.
    signal_N = np.concatenate([signal.log_probs for signal in result.signals])
    np.testing.assert_allclose(signal_N, old_N, atol=1e-5)
    mismatch = np.abs(old_N - batch.rollout_log_probs_N)[sampled]
    assert result.metrics["logprob_mismatch_max"] == pytest.approx(mismatch.max(), abs=1e-5)
    # Current: what the step's forward gave, and the numerator of the ratio.
    offsets = batch.offsets_N[plan.offsets_M]
    by_micro = [
        score_policy(make_state(folders[2]), batch, plan)[a:b]
        for a, b in itertools.pairwise(offsets)
    ]
    digests = [blake3(one[~np.isnan(one)].astype("<f4").tobytes()).digest() for one in by_micro]
    assert result.step_committed.micro_batch_digests == digests
    taken = batch.loss_mask_N > 0
    ratio = np.exp((current_N - old_N)[taken].astype(np.float64))
    advantages = np.concatenate([signal.advantages for signal in result.signals])[taken]
    loss_N = np.maximum(-ratio * advantages, -np.clip(ratio, 0.1, 10.0) * advantages)
    samples = np.repeat(np.arange(4), batch.response_lengths_B)[taken]
    means = [loss_N[samples == sample].mean() for sample in range(4)]
    assert result.metrics["policy_loss"] == pytest.approx(np.mean(means), abs=1e-5)
    assert result.metrics["ppo_kl"] == pytest.approx(np.mean((old_N - current_N)[taken]), abs=1e-5)
    # Another old actor is another input of the step, and another step.
    ((_, _, other),) = take_rollout(
        make_state(folders[2]),
        Reader(),
        [planned],
        algorithm,
        SIZES,
        old_actor=old_actor_of(policy),
    )
    assert other.step_committed.batch_digest != result.step_committed.batch_digest
    # Rollout: with the engine's as old ones, the ratio is taken against those.
    engine = dataclasses.replace(algorithm, keep_old_actor=False, use_rollout_logprobs=True)
    bypass = run_step(make_state(folders[2]), batch, plan, engine, SIZES, **NUMBERS)
    kl = np.mean((batch.rollout_log_probs_N - current_N)[taken])
    assert bypass.metrics["ppo_kl"] == pytest.approx(kl, abs=1e-5)
