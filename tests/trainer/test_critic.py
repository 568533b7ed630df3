"""The critic: its values, its loss, its gradients, and that its state goes on exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ledger.errors import InvalidArgument
from ledger.weights import weights_root
from tests.trainer.test_step import SIZES, make_batch, plan_of, step
from tests.trainer.tiny_policy import config, make_folder, make_state, start
from trainer.compare import compare_steps
from trainer.critic import create_critic, value_loss
from trainer.critic_step import score_values
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings

LR = OptimizerSettings(lr=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("dense"))


def critic(folder, **other):
    start()
    return create_critic(folder, config(moe=False), ParallelSettings(), LR, seed=3, **other)


def test_value_loss_by_hand():
    # Old 1.0, clip 0.2, return 2.0: moving to 1.5 counts as 1.2; and from 1.5 to 0.9 stays 0.9.
    values = torch.tensor([1.5, 0.9, 2.5], requires_grad=True)
    loss, clipped = value_loss(values, torch.ones(3), torch.full((3,), 2.0), 0.2)
    torch.testing.assert_close(
        loss, torch.tensor([(2.0 - 1.2) ** 2, (2.0 - 0.9) ** 2, (2.0 - 1.2) ** 2])
    )
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    # Where the clipped error is the larger one, nothing pulls the value on.
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -2.2, 0.0]))


def test_a_new_critic_is_the_policys_trunk_with_a_head_from_the_seed(folder):
    from transformers import AutoModelForTokenClassification

    from trainer.weights import write_safetensors

    one, other = critic(folder), critic(folder)
    assert one.tensor_records() == other.tensor_records()
    named = dict(one.export_weights())
    assert named["score.weight"].shape == (1, 16)
    assert "lm_head.weight" not in named
    start()
    differently = create_critic(folder, config(moe=False), ParallelSettings(), LR, seed=4)
    differs = [
        a.name
        for a, b in zip(one.tensor_records(), differently.tensor_records(), strict=True)
        if a != b
    ]
    assert differs == ["score.weight"]
    # Hugging Face's value model gives the same values.
    saved = folder / "critic"
    saved.mkdir()
    write_safetensors(saved, one.export_weights(), one.hf_config)
    theirs = AutoModelForTokenClassification.from_pretrained(saved, attn_implementation="eager")
    tokens = torch.tensor([[1, 2, 3, 7, 8, 9]])
    positions = torch.arange(6)[None]
    mask = torch.triu(torch.ones(1, 1, 6, 6, dtype=torch.bool), diagonal=1)
    ours = one.model(tokens, positions, mask)
    assert ours.shape == (1, 6, 1)
    np.testing.assert_allclose(
        ours.detach().numpy(), theirs(tokens).logits.detach().numpy(), atol=1e-6
    )


def test_a_critic_of_another_shape_is_refused(folder, tmp_path):
    with pytest.raises(InvalidArgument, match="hidden_size"):
        create_critic(
            folder, {**config(moe=False), "hidden_size": 32}, ParallelSettings(), LR, seed=3
        )


PPO = AlgorithmSettings(advantage_estimator="ppo", gamma=0.9, lambd=0.8)


def with_critic(folder):
    state = make_state(folder)
    state.critic = critic(folder)
    return state


def values_by_hand(state, batch) -> list[torch.Tensor]:
    """Of each sample's response tokens, from a forward of its own, with a gradient."""
    found = []
    for first, last, prompt in zip(
        batch.offsets_T[:-1], batch.offsets_T[1:], batch.prompt_lengths_B, strict=True
    ):
        tokens = torch.from_numpy(batch.tokens_T[first:last].astype(np.int64))[None]
        width = tokens.shape[1]
        mask = torch.triu(torch.ones(1, 1, width, width, dtype=torch.bool), diagonal=1)
        values = state.model(tokens, torch.arange(width)[None], mask)
        found.append(values[0, prompt - 1 : -1, 0])
    return found


def test_a_step_of_the_critic_against_plain_torch(folder):
    batch = make_batch()
    state = with_critic(folder)
    by_hand = values_by_hand(state.critic, batch)
    result = step(folder, batch, PPO, state=state)
    values_N = np.concatenate([signal.values for signal in result.signals])
    np.testing.assert_allclose(
        values_N, torch.cat([v.detach() for v in by_hand]).numpy(), atol=1e-5
    )
    # GAE by its recursion, over loss tokens alone.
    for signal, reward in zip(result.signals, batch.rewards_B, strict=True):
        taken = signal.loss_mask > 0
        values = [*signal.values[taken].astype(np.float64), 0.0]
        advantage, advantages = 0.0, []
        for t in range(int(taken.sum()) - 1, -1, -1):
            last = t == taken.sum() - 1
            delta = (reward if last else 0.0) + 0.9 * values[t + 1] - values[t]
            advantage = delta + 0.9 * 0.8 * advantage
            advantages.insert(0, advantage)
        np.testing.assert_allclose(signal.advantages[taken], advantages, atol=1e-5)
    # Nothing has moved yet, so no clip: the mean over rollouts of the mean squared error.
    again = with_critic(folder)
    losses = [
        (values - torch.from_numpy(signal.returns))[torch.from_numpy(signal.loss_mask) > 0]
        .square()
        .mean()
        for values, signal in zip(values_by_hand(again.critic, batch), result.signals, strict=True)
    ]
    loss = torch.stack(losses).mean()
    assert result.metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    parameters = dict(again.critic.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    norm = torch.sqrt(sum(g.square().sum() for g in gradients)).item()
    assert result.metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
    committed = result.step_committed
    assert committed.critic_root == weights_root(state.critic.tensor_records())
    assert committed.critic_root != weights_root(again.critic.tensor_records())
    assert committed.critic_optimizer_digest == state.critic.optimizer_digest()
    same = step(folder, batch, PPO, state=with_critic(folder))
    assert compare_steps(committed, same.step_committed, result.weights, same.weights) is None
    packed = dataclasses.replace(
        SIZES, seq_length=None, use_dynamic_batch_size=True, max_tokens_per_gpu=64
    )
    other = step(folder, batch, PPO, sizes=packed, state=with_critic(folder))
    assert other.metrics["value_loss"] == pytest.approx(result.metrics["value_loss"], rel=1e-5)
    moved = step(
        folder, batch, dataclasses.replace(PPO, value_clip=1e-6), state=with_critic(folder)
    )
    difference = compare_steps(
        dataclasses.replace(committed, critic_gradient_digest=b"other"),
        committed,
        result.weights,
        result.weights,
    )
    assert difference.quantity == "critic gradients"
    assert moved.metrics["value_clip_fraction"] == 0.0


def test_old_values_clip_the_later_steps_of_a_rollout(folder):
    batch = make_batch()
    plan = plan_of(batch, SIZES)
    state = with_critic(folder)
    old_log_probs_N = score_policy(state, batch, plan)
    old_N = score_values(state.critic, batch, plan)
    far_N = old_N + np.float32(1.0)
    later = {"step_in_rollout": 1, "old_log_probs_N": old_log_probs_N}
    near = step(folder, batch, PPO, state=with_critic(folder), old_values_N=old_N, **later)
    far = step(folder, batch, PPO, state=with_critic(folder), old_values_N=far_N, **later)
    assert near.metrics["value_clip_fraction"] == 0.0
    assert far.metrics["value_clip_fraction"] == 1.0
    assert near.step_committed.batch_digest != far.step_committed.batch_digest
    for wrong, message in (
        ({"step_in_rollout": 1, "old_log_probs_N": old_log_probs_N}, "score_values"),
        ({"old_values_N": old_N}, "values in the first step"),
        ({**later, "old_values_N": old_N[:-1]}, "one for each of"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            step(folder, batch, PPO, state=with_critic(folder), **wrong)
    with pytest.raises(InvalidArgument, match="a critic beside the policy"):
        step(folder, batch, PPO)
