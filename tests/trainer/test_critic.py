"""The critic: its values, its loss, its gradients, and that its state goes on exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ledger.errors import InvalidArgument
from tests.trainer.tiny_policy import config, make_folder, start
from trainer.critic import create_critic, value_loss
from trainer.settings import OptimizerSettings, ParallelSettings

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
