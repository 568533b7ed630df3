"""Every estimator against the loops of `reference_advantages`, on random steps and settings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import reference_advantages as reference
from tests.trainer.advantage_cases import EVERY
from trainer.algorithms.advantages import estimate
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

# Numbers that binary floats hold exactly: who is alike and who is best is then the same for both
# implementations, and what is left to compare is the formula.
QUARTERS = np.arange(-20, 21) / 4
EIGHTHS = np.arange(17) / 8

SEEDS = st.integers(0, 2**32 - 1)
"""One number an example: to draw every token by itself takes ten times as long."""


def make_story(rng):
    """Uneven groups, siblings, observations, samples that are empty or masked; in any order."""
    samples = []
    for rollout in range(rng.integers(1, 8)):
        group, (reward, greedy, a, b) = int(rng.integers(3)), rng.choice(QUARTERS, 4).tolist()
        for _ in range(rng.choice([1, 1, 2, 3])):
            n = int(rng.integers(5))
            masks = rng.choice([1, 1, 0], n).tolist()
            columns = rng.choice(EIGHTHS, (3, n)).tolist()
            tokens = [
                reference.Token(mask=m, kl=kl, log_prob=-log_prob, teacher=-teacher, value=value)
                for m, kl, log_prob, teacher, value in zip(
                    masks, *columns, rng.choice(QUARTERS, n).tolist(), strict=True
                )
            ]
            parts = {"a": a, "b": b}
            samples.append(reference.Sample(rollout, group, reward, tokens, parts, greedy))
    rng.shuffle(samples)
    return samples


def make_options(rng):
    def one_of(*values):
        return values[rng.integers(len(values))]

    keys = one_of((), ("b",), ("b", "a"))
    return reference.Options(
        grpo_std_normalization=one_of(True, False),
        advantage_deviation=one_of("unbiased", "biased"),
        advantage_epsilon=one_of(None, 1e-4, 0.5),
        use_leave_one_out_baseline=one_of(True, False),
        grpo_std_scope=one_of("group", "batch"),
        single_sample_advantage=one_of("zero", "reward"),
        exclude_masked_rollouts=one_of(True, False),
        estimator_whitening=one_of(True, False),
        gamma=one_of(1.0, 0.9, 0.5, 0.0),
        lambd=one_of(1.0, 0.95, 0.5, 0.0),
        discount_masked_tokens=one_of(True, False),
        gdpo_reward_keys=keys,
        gdpo_reward_weights=one_of((), tuple(0.5 + i for i, _ in enumerate(keys))),
        gdpo_whitening=one_of("rollout", "token"),
        kl_coef=one_of(0.0, 0.5),
        opd_kl_coef=one_of(1.0, 0.25),
    )


def as_batch(story):
    def tokens(name, dtype=np.float32):
        # What stands where the mask is 0 means nothing: NaN shows where it is used all the same.
        return np.array(
            [getattr(t, name) if t.mask else np.nan for s in story for t in s.tokens], dtype
        )

    return RewardBatch(
        rewards_B=np.array([s.reward for s in story], np.float64),
        group_index_B=np.array([s.group for s in story], np.int64),
        rollout_id_B=np.array([s.rollout for s in story], np.int64),
        response_lengths_B=np.array([len(s.tokens) for s in story], np.int64),
        loss_mask_N=np.array([t.mask for s in story for t in s.tokens], np.uint8),
        kl_N=tokens("kl"),
        log_probs_N=tokens("log_prob"),
        teacher_log_probs_N=tokens("teacher"),
        # With discounts over masked tokens the values there are looked at.
        values_N=np.array([t.value for s in story for t in s.tokens], np.float32),
        baseline_rewards_B=np.array([s.greedy for s in story], np.float64),
        part_names=("a", "b"),
        reward_parts_BP=np.array([[s.parts["a"], s.parts["b"]] for s in story]).reshape(-1, 2),
    )


def flat(rows):
    return np.array([a for row in rows for a in row], np.float64)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=60)
@given(seed=SEEDS)
def test_equals_the_second_implementation(name, seed):
    rng = np.random.default_rng(seed)
    story, chosen = make_story(rng), make_options(rng)
    if name == "maxrl":
        # Probabilities of success, and no KL that would make them negative.
        story = [dataclasses.replace(s, reward=abs(s.reward)) for s in story]
        chosen = dataclasses.replace(chosen, kl_coef=0.0)
    expected = flat(reference.advantages(name, story, chosen))
    algorithm = AlgorithmSettings(advantage_estimator=name, **reference.as_settings(chosen))
    got = estimate(as_batch(story), algorithm)
    # float64 sums in another order over a deviation of 1e-9 at least, then float32.
    np.testing.assert_allclose(got.advantages_N, expected, rtol=1e-5, atol=1e-5)
    if name == "ppo":
        values = flat([[t.value if t.mask else 0.0 for t in s.tokens] for s in story])
        np.testing.assert_allclose(got.returns_N, expected + values, rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(seed=SEEDS)
def test_the_teachers_term_is_added_and_then_all_is_whitened(seed):
    rng = np.random.default_rng(seed)
    story, chosen = make_story(rng), make_options(rng)
    name = rng.choice([n for n in EVERY if n not in ("maxrl", "on_policy_distillation")])
    alone = flat(reference.advantages(name, story, chosen))
    term = flat(reference.advantages("on_policy_distillation", story, chosen))
    said = reference.as_settings(chosen)
    got = estimate(
        as_batch(story), AlgorithmSettings(advantage_estimator=name, use_opd=True, **said)
    )
    np.testing.assert_allclose(got.advantages_N, alone + term, rtol=1e-5, atol=1e-5)
    white = estimate(
        as_batch(story),
        AlgorithmSettings(
            advantage_estimator=name, use_opd=True, normalize_advantages=True, **said
        ),
    )
    rows, place = [], 0
    for sample in story:
        rows.append(got.advantages_N[place : place + len(sample.tokens)].astype(float).tolist())
        place += len(sample.tokens)
    expected = flat(reference.whiten_tokens(story, rows))
    np.testing.assert_allclose(white.advantages_N, expected, rtol=1e-4, atol=1e-4)
