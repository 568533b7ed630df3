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
QUARTERS = st.integers(-20, 20).map(lambda i: i / 4)
EIGHTHS = st.integers(0, 16).map(lambda i: i / 8)


@st.composite
def stories(draw):
    """Uneven groups, siblings, observations, samples that are empty or masked; in any order."""
    samples = []
    for rollout in range(draw(st.integers(1, 7))):
        group, reward, greedy = draw(st.integers(0, 2)), draw(QUARTERS), draw(QUARTERS)
        parts = {"a": draw(QUARTERS), "b": draw(QUARTERS)}
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            tokens = [
                reference.Token(
                    mask=draw(st.sampled_from([1, 1, 0])),
                    kl=draw(EIGHTHS),
                    log_prob=-draw(EIGHTHS),
                    teacher=-draw(EIGHTHS),
                    value=draw(QUARTERS),
                )
                for _ in range(draw(st.integers(0, 4)))
            ]
            samples.append(reference.Sample(rollout, group, reward, tokens, parts, greedy))
    return draw(st.permutations(samples))


@st.composite
def options(draw):
    keys = draw(st.sampled_from([(), ("b",), ("b", "a")]))
    choose = st.sampled_from
    return reference.Options(
        grpo_std_normalization=draw(st.booleans()),
        advantage_deviation=draw(choose(["unbiased", "biased"])),
        advantage_epsilon=draw(choose([None, 1e-4, 0.5])),
        use_leave_one_out_baseline=draw(st.booleans()),
        grpo_std_scope=draw(choose(["group", "batch"])),
        single_sample_advantage=draw(choose(["zero", "reward"])),
        exclude_masked_rollouts=draw(st.booleans()),
        estimator_whitening=draw(st.booleans()),
        gamma=draw(choose([1.0, 0.9, 0.5, 0.0])),
        lambd=draw(choose([1.0, 0.95, 0.5, 0.0])),
        discount_masked_tokens=draw(st.booleans()),
        gdpo_reward_keys=keys,
        gdpo_reward_weights=draw(choose([(), tuple(0.5 + i for i, _ in enumerate(keys))])),
        gdpo_whitening=draw(choose(["rollout", "token"])),
        kl_coef=draw(choose([0.0, 0.5])),
        opd_kl_coef=draw(choose([1.0, 0.25])),
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
@settings(max_examples=25)
@given(story=stories(), chosen=options())
def test_equals_the_second_implementation(name, story, chosen):
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


@settings(max_examples=30)
@given(
    story=stories(),
    chosen=options(),
    name=st.sampled_from([n for n in EVERY if n not in ("maxrl", "on_policy_distillation")]),
)
def test_the_teachers_term_is_added_and_then_all_is_whitened(name, story, chosen):
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
