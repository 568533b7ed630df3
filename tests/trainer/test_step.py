"""One training step: repeatable to the bit, right against plain torch, refusals with reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from ledger.encode import events_to_table
from ledger.errors import Diverged, InvalidArgument
from tests.trainer import reference
from tests.trainer.memory import MemoryReader, observation, prompt, routing, score, segment
from tests.trainer.tiny_policy import make_folder, make_state, start
from trainer.batch import Batch, load_batch
from trainer.compare import compare_steps
from trainer.forward import recorded_routing, token_log_probs
from trainer.frozen import FrozenModel, StepModels
from trainer.microbatch import Partition
from trainer.model import build_model
from trainer.partition import partition_for
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings, BatchSettings, ParallelSettings
from trainer.state import load_weights
from trainer.step import StepResult, run_step

SIZES = BatchSettings(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    num_steps_per_rollout=1,
    micro_batch_size=3,
    seq_length=12,
)
NUMBERS: dict[str, Any] = {
    "step": 5,
    "rollout_step": 5,
    "step_in_rollout": 0,
    "weight_version_in": 5,
    "weight_version_out": 6,
}
ALGORITHM = AlgorithmSettings()


def sample_tokens() -> list[list[int]]:
    """Of samples 0..3: prompt of 3 tokens and a response; sample 2 has a tool token at offset 2."""
    return [[1, 2, 3, 7, 8, 9], [1, 2, 3, 4], [5, 6, 7, 8, 9, 30, 11, 12], [5, 6, 7, 13, 14]]


def make_batch(rewards=(1.0, 0.0, 0.0, 1.0), *, state=None, routed=None, order=range(4)) -> Batch:
    """`state`: the policy that sampled, whose own log-probs are recorded; else −1 everywhere."""
    tokens = sample_tokens()
    events: list[Any] = [prompt([0, 1], [1, 2, 3], group=0), prompt([2, 3], [5, 6, 7], group=1)]
    for index, row in enumerate(tokens):
        log_probs = np.full(len(row) - 3, -1.0, np.float32)
        if state is not None:
            full, _ = token_log_probs(
                state.model,
                torch.tensor([row]),
                temperature=1.0,
                expert_ids=None if routed is None else routed[index][None],
            )
            log_probs = full.detach().numpy()[0, 2:]
        if index == 2:
            events.append(segment(2, row[3:5], log_probs[:2]))
            events.append(observation(2, row[5:6], start=2))
            events.append(segment(2, row[6:], log_probs[3:], start=3, number=1))
        else:
            events.append(segment(index, row[3:], log_probs))
        if routed is not None:
            events.append(routing(index, routed[index].numpy()))
        events.append(score(index, rewards[index]))
    return load_batch(MemoryReader(events), order)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe"), moe=True)


def plan_of(batch: Batch, sizes: BatchSettings) -> Partition:
    return partition_for(batch.prompt_lengths_B + batch.response_lengths_B, batch.indices_B, sizes)


def step(folder, batch, algorithm=ALGORITHM, sizes=SIZES, state=None, **other) -> StepResult:
    plan = other.pop("plan", None) or plan_of(batch, sizes)
    return run_step(state or make_state(folder), batch, plan, algorithm, sizes, **(NUMBERS | other))


def reference_of(model) -> StepModels:
    return StepModels(reference=FrozenModel(chunks=[model], root=None))


def content(result: StepResult) -> list[dict[str, Any]]:
    """Every event of a step as plain values, less what is a measurement."""
    rows = []
    for events in ([result.step_committed], result.signals, [result.weights]):
        measured = [c.name for c in type(events[0]).COLUMNS if c.measurement]
        table = events_to_table(events).drop_columns(measured)
        rows += [repr(row) for row in table.to_pylist()]
    return rows


def test_twice_from_the_same_state_gives_the_same_bits(folder):
    batch = make_batch()
    first, second = step(folder, batch), step(folder, batch)
    assert content(first) == content(second)
    assert (
        compare_steps(first.step_committed, second.step_committed, first.weights, second.weights)
        is None
    )
    assert first.step_committed.train_time_s > 0
    assert first.weights.root != step(folder, make_batch((0.0, 1.0, 0.0, 1.0))).weights.root


def plain_gradients(folder, batch, algorithm) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a first step sample by sample without padding, and its gradients by autograd.

    Written from the formulas: Σ over rollouts of the mean over sampled tokens of −A·ρ (ρ = 1),
    divided by the number of rollouts; or the mean over all sampled tokens.
    """
    state = make_state(folder)
    model = build_model(state.hf_config, ParallelSettings(), trainable=True)
    load_weights(model, folder)
    advantages = reference.estimator(
        algorithm.advantage_estimator,
        batch.rewards_B.tolist(),
        batch.group_index_B.tolist(),
        batch.rollout_id_B.tolist(),
    )
    total = torch.zeros((), dtype=torch.float64)
    n_sampled = int(batch.sampled_N.sum())
    for b, row in enumerate(sample_tokens()):
        log_probs, entropy = token_log_probs(
            model, torch.tensor([row]), temperature=1.0, want_entropy=True
        )
        mask = torch.from_numpy(batch.sampled_N[slice(*batch.offsets_N[b : b + 2])]).double()
        ratio = torch.exp(log_probs - log_probs.detach())[0, 2:].double()
        loss = -advantages[b] * ratio - algorithm.entropy_coef * entropy[0, 2:].double()
        if algorithm.calculate_per_token_loss:
            total = total + (loss * mask).sum() / n_sampled
        else:
            total = total + (loss * mask).sum() / mask.sum() / 4
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "algorithm",
    [
        ALGORITHM,
        AlgorithmSettings(advantage_estimator="rloo", entropy_coef=0.1),
        AlgorithmSettings(calculate_per_token_loss=True),
    ],
)
def test_loss_and_gradients_equal_those_of_plain_torch(folder, algorithm):
    """Tolerance: float32 sums in another order, over padded rows instead of single ones."""
    batch = make_batch((1.0, 0.25, 0.0, 1.0))
    state = make_state(folder, clip_grad=0.0)
    result = step(folder, batch, algorithm, state=state)
    loss, gradients = plain_gradients(folder, batch, algorithm)
    assert result.step_committed.loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())))
    assert result.step_committed.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter.main_grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_micro_batches_do_not_change_the_loss(folder):
    batch = make_batch()
    losses = [
        step(folder, batch, sizes=dataclasses.replace(SIZES, micro_batch_size=m)).step_committed
        for m in (1, 2, 3, 4)
    ]
    for other in losses[1:]:
        assert other.loss == pytest.approx(losses[0].loss, abs=1e-6)
        assert other.grad_norm == pytest.approx(losses[0].grad_norm, rel=1e-5)
    assert [len(s.micro_batch_digests) for s in losses] == [4, 2, 2, 1]


def test_signals_and_metrics(folder):
    state = make_state(folder)
    batch = make_batch(state=state)
    result = step(folder, batch, state=state)
    assert [s.index for s in result.signals] == [0, 1, 2, 3]
    tool = result.signals[2]
    assert tool.loss_mask.tolist() == [1, 1, 0, 1, 1]
    assert np.isnan(tool.log_probs).tolist() == [False, False, True, False, False]
    assert tool.advantages[2] == 0
    np.testing.assert_allclose(
        [s.advantages[0] for s in result.signals], np.array([1, -1, -1, 1]) / np.sqrt(2), atol=2e-6
    )
    committed, metrics = result.step_committed, result.metrics
    assert dict(zip(committed.metric_names, committed.metric_values, strict=True)) == metrics
    # Sampled by this very policy: at most rounding between row shapes apart, and one weight each.
    assert metrics["logprob_mismatch_max"] < 1e-5
    assert metrics["effective_sample_size"] == pytest.approx(1.0)
    assert metrics["behaviour_kl"] < 1e-9
    assert metrics["clip_fraction"] == 0.0
    assert metrics["reward_mean"] == 0.5
    assert metrics["zero_variance_groups"] == 0.0
    assert metrics["response_length_max"] == 5.0
    assert 0 < metrics["entropy"] <= np.log(32)
    assert committed.trained_tokens == 3 + 1 + 4 + 2
    assert (committed.micro_batch_rows, committed.micro_batch_width) == (3, 12)
    assert result.weights.parent_version == 5
    assert result.weights.size_bytes == 4 * sum(p.numel() for p in state.model.parameters())


def test_micro_batch_digests_follow_from_the_signals(folder):
    """In a rollout's first step: an audit needs no model."""
    from blake3 import blake3

    result = step(folder, make_batch())
    log_probs = [s.log_probs[s.loss_mask > 0] for s in result.signals]
    made = [
        blake3(np.concatenate(part).tobytes()).digest() for part in (log_probs[:3], log_probs[3:])
    ]
    assert result.step_committed.micro_batch_digests == made


def test_siblings_of_a_rollout_weigh_as_one(folder):
    """Rewards 1, 1, 1, 0; the first three are one rollout's, with 3 + 1 + 5 loss tokens."""
    rollouts, rewards = [7, 7, 7, 9], [1.0, 1.0, 1.0, 0.0]
    tokens = [row[3:] for row in sample_tokens()]
    events: list[Any] = [prompt(range(4), [1, 2, 3], rollouts=rollouts)]
    for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        events.append(segment(index, tokens[index], rollout_id=rollout))
        events.append(score(index, reward, rollout_id=rollout))
    batch = load_batch(MemoryReader(events), range(4))
    sizes = dataclasses.replace(SIZES, rollout_batch_size=1, global_batch_size=2)
    result = step(folder, batch, AlgorithmSettings(advantage_estimator="mean_baseline"), sizes)
    assert [s.advantages[0] for s in result.signals] == [0.5, 0.5, 0.5, -0.5]
    # At ρ = 1 each rollout's loss is −A, and the step's their mean.
    assert result.step_committed.loss == pytest.approx(0.0, abs=1e-7)
    assert result.metrics["reward_mean"] == 0.5


def test_the_temperature_is_the_recorded_one_and_a_wrong_record_shows(folder):
    state = make_state(folder)
    batch = make_batch(state=state)
    wrong = dataclasses.replace(batch, logprob_temperatures_B=np.full(4, 0.7))
    option = AlgorithmSettings(rollout_temperature=0.7)
    assert step(folder, batch, option).metrics["logprob_mismatch_max"] < 1e-5
    assert step(folder, wrong).metrics["logprob_mismatch_mean"] > 0.01


def test_scored_old_log_probs_are_the_current_ones_bit_for_bit(folder):
    batch = make_batch()
    state = make_state(folder)
    old = score_policy(state, batch, plan_of(batch, SIZES))
    given, none = step(folder, batch, state=state, old_log_probs_N=old), step(folder, batch)
    assert content(given) == content(none)


def test_second_step_of_a_rollout_takes_the_ratio_against_the_first_policy(folder):
    state = make_state(folder)
    batch = make_batch()
    old = score_policy(state, batch, plan_of(batch, SIZES))
    first = step(folder, batch, state=state)
    second = step(folder, batch, state=state, step_in_rollout=1, old_log_probs_N=old)
    assert np.array_equal(
        np.concatenate([s.log_probs for s in second.signals]), old, equal_nan=True
    )
    # The first step has moved the policy: the loss is no longer that of ρ = 1.
    assert second.step_committed.loss != first.step_committed.loss
    assert second.step_committed.batch_digest != first.step_committed.batch_digest
    replayed_old = np.concatenate([s.log_probs for s in second.signals])
    state = make_state(folder)
    step(folder, batch, state=state)
    again = step(folder, batch, state=state, step_in_rollout=1, old_log_probs_N=replayed_old)
    assert content(again) == content(second)


def test_the_engines_log_probs_as_old_ones(folder):
    batch = make_batch()  # −1 everywhere
    result = step(folder, batch, AlgorithmSettings(use_rollout_logprobs=True, eps_clip=0.1))
    assert result.metrics["clip_fraction"] > 0
    assert result.metrics["logprob_mismatch_mean"] > 0.1
    assert not np.array_equal(result.signals[0].log_probs, np.full(3, -1, np.float32))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    other = make_folder(tmp_path_factory.mktemp("other"), seed=9)
    start()
    state = make_state(other)
    return state.model


def test_kl_in_the_loss_and_in_the_reward(folder, other_model):
    batch = make_batch((0.0, 0.0, 0.0, 0.0))
    plain = step(folder, batch)
    assert plain.step_committed.grad_norm == 0.0
    in_loss = step(
        folder,
        batch,
        AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl"),
        models=reference_of(other_model),
    )
    assert in_loss.step_committed.grad_norm > 0
    assert in_loss.metrics["ref_kl"] > 0
    assert in_loss.step_committed.loss == pytest.approx(
        0.5 * mean_of_rollouts(in_loss, lambda s: kl_of(s)), rel=1e-4
    )
    in_reward = step(
        folder,
        batch,
        AlgorithmSettings(kl_coef=0.5, kl_loss_type="k1"),
        models=reference_of(other_model),
    )
    penalties = [-0.5 * np.nansum(s.log_probs - s.ref_log_probs) for s in in_reward.signals]
    expected = reference.estimator("grpo", penalties, [0, 0, 1, 1], [0, 1, 2, 3])
    np.testing.assert_allclose([s.advantages[0] for s in in_reward.signals], expected, rtol=1e-4)


def test_a_ratio_that_overflows_outside_the_loss_spoils_nothing(folder):
    """Its gradient would be 0 · ∞."""
    batch = make_batch()
    rollout, mask = batch.rollout_log_probs_N.copy(), batch.loss_mask_N.copy()
    rollout[1], mask[1] = -np.inf, 0
    masked = dataclasses.replace(batch, rollout_log_probs_N=rollout, loss_mask_N=mask)
    result = step(folder, masked, AlgorithmSettings(use_rollout_logprobs=True))
    assert np.isfinite(result.step_committed.grad_norm)
    assert result.step_committed.grad_norm > 0


def kl_of(signal):
    d = signal.log_probs.astype(np.float64) - signal.ref_log_probs
    return np.clip(np.exp(-d) - 1 + d, -10, 10)


def mean_of_rollouts(result, value):
    return float(np.mean([np.nanmean(value(s)) for s in result.signals]))


def routed_batch(folder, **kwargs) -> Batch:
    state = make_state(folder)
    ids = [recorded_routing(state.model, torch.tensor([row]))[0] for row in sample_tokens()]
    return make_batch(state=state, routed=ids, **kwargs)


def test_recorded_routing_is_replayed(moe_folder):
    batch = routed_batch(moe_folder)
    first, second = step(moe_folder, batch), step(moe_folder, batch)
    assert content(first) == content(second)
    assert first.metrics["logprob_mismatch_max"] < 1e-5
    assert batch.expert_ids is not None
    turned = tuple((ids + 1) % 4 for ids in batch.expert_ids)
    other = step(moe_folder, dataclasses.replace(batch, expert_ids=turned))
    assert other.metrics["logprob_mismatch_max"] > 1e-3
    assert other.weights.root != first.weights.root


@pytest.mark.parametrize(
    ("algorithm", "other", "message"),
    [
        (AlgorithmSettings(use_kl_loss=True), {}, "reference"),
        (AlgorithmSettings(kl_coef=0.1), {}, "reference"),
        (ALGORITHM, {"step_in_rollout": 1}, "score_policy"),
        (ALGORITHM, {"old_log_probs_N": np.zeros(3, np.float32)}, "11 response tokens"),
        (
            AlgorithmSettings(use_rollout_logprobs=True),
            {"old_log_probs_N": np.zeros(11, np.float32)},
            "engine",
        ),
        (ALGORITHM, {"sizes": dataclasses.replace(SIZES, seq_length=7)}, "sample 2"),
        (
            ALGORITHM,
            {"sizes": dataclasses.replace(SIZES, rollout_batch_size=4, global_batch_size=8)},
            "4 rollouts",
        ),
        (AlgorithmSettings(policy_loss="nothing"), {}, "ppo_clip"),
    ],
)
def test_what_does_not_fit_is_refused(folder, algorithm, other, message):
    with pytest.raises(InvalidArgument, match=message):
        step(folder, make_batch(), algorithm, **other)


def test_routing_must_be_there_for_experts_and_only_for_them(folder, moe_folder):
    with pytest.raises(InvalidArgument, match="never free in silence"):
        step(moe_folder, make_batch())
    with pytest.raises(InvalidArgument, match="dense model"):
        step(folder, routed_batch(moe_folder))


def test_a_loss_that_is_not_finite_leaves_the_weights(folder):
    state = make_state(folder)
    before = state.tensor_records()
    batch = make_batch((0.0, 1.0, 1.0, 0.0))
    rollout = batch.rollout_log_probs_N.copy()
    rollout[3] = -np.inf  # the only token of sample 1, of positive advantage: ρ = ∞, clipped
    rollout[0] = -np.inf  # of sample 0, of negative advantage: not clipped
    broken = dataclasses.replace(batch, rollout_log_probs_N=rollout)
    with pytest.raises(Diverged, match=r"micro-batch 0, samples \[0, 1, 2\]"):
        step(folder, broken, AlgorithmSettings(use_rollout_logprobs=True), state=state)
    assert state.tensor_records() == before


def test_a_sample_that_is_masked_out_contributes_nothing(folder):
    batch = make_batch()
    mask = batch.loss_mask_N.copy()
    mask[:3] = 0
    result = step(folder, dataclasses.replace(batch, loss_mask_N=mask))
    assert result.signals[0].advantages.tolist() == [0, 0, 0]
    assert np.isfinite(result.signals[0].log_probs).all()  # sampled all the same
    assert result.step_committed.trained_tokens == 1 + 4 + 2
    nothing = step(folder, dataclasses.replace(batch, loss_mask_N=np.zeros_like(mask)))
    assert (nothing.step_committed.loss, nothing.step_committed.grad_norm) == (0.0, 0.0)
