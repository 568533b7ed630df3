"""A step on Megatron's DDP and optimizer: repeatable, and the same as torch's on Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ledger.errors import Diverged, InvalidArgument
from ledger.weights import weights_root
from tests.trainer.megatron_models import MOE, Tiny, random_tokens
from trainer.settings import OptimizerSettings, ParallelSettings

Models = Callable[[str], Tiny]


def fresh(tiny: Tiny, seed: int = 1, **optimizer: Any) -> Any:
    from trainer.state import create_state

    settings = OptimizerSettings(**{"lr": 1e-3, "weight_decay": 0.1, **optimizer})
    return create_state(tiny.folder, ParallelSettings(), settings, seed=seed)


def forward_backward(state: Any, *, seed: int, moe: bool) -> float:
    """Two micro-batches through Megatron's schedule; returns the mean loss."""
    from trainer.megatron import get_forward_backward_func
    from trainer.model import token_log_probs

    def forward(micro_batches: Any, model: Any) -> Any:
        log_probs, _ = token_log_probs(
            model, next(micro_batches), temperature=1.0, free_routing=moe
        )
        return log_probs, lambda out: (-out.mean(), {"loss": -out.detach().mean()})

    state.zero_grad()
    tokens = random_tokens(4, 12, seed=seed)
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(tokens.split(2)),
        model=state.chunks,
        num_microbatches=2,
        seq_length=12,
        micro_batch_size=2,
        forward_only=False,
    )
    return float(sum(loss["loss"] for loss in losses) / 2)


def step(state: Any, *, seed: int, moe: bool) -> tuple[Any, ...]:
    """One step and everything that names what came out of it."""
    loss = forward_backward(state, seed=seed, moe=moe)
    gradients = weights_root(state.gradient_records())
    stepped = state.optimizer_step()
    return (
        loss,
        gradients,
        stepped,
        weights_root(state.tensor_records()),
        state.optimizer_digest(),
        state.random_state_digest(),
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_steps_repeat_bit_for_bit(tiny: Models, kind: str) -> None:
    runs = []
    for _ in range(2):
        state = fresh(tiny(kind))
        runs.append([step(state, seed=i, moe=kind in MOE) for i in range(3)])
    assert runs[0] == runs[1]
    roots = {record[3] for record in runs[0]}
    digests = {record[4] for record in runs[0]}
    assert len(roots) == len(digests) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_are_adamw_on_clipped_gradients(tiny: Models, kind: str) -> None:
    """Against torch's AdamW on the Hugging Face model; matrices are decayed, norms are not."""
    import transformers

    state = fresh(tiny(kind), clip_grad=0.5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny(kind).folder, attn_implementation="eager"
    )
    named = dict(theirs.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-8)
    for i in range(3):
        loss = forward_backward(state, seed=i, moe=False)
        _, norm, _ = state.optimizer_step()
        adam.zero_grad()
        tokens = random_tokens(4, 12, seed=i)
        log_probs = theirs(tokens).logits[:, :-1].log_softmax(-1)
        expected = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.step()
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert norm == pytest.approx(float(expected_norm.detach()), rel=1e-4)
        assert norm > 0.5
    for name, tensor in state.export_weights():
        torch.testing.assert_close(tensor, named[name], rtol=0, atol=3e-5)


def test_gradients_are_recorded_under_canonical_names(tiny: Models) -> None:
    state = fresh(tiny("llama"))
    forward_backward(state, seed=0, moe=False)
    gradients, weights = state.gradient_records(), state.tensor_records()
    assert [(r.name, r.shape) for r in gradients] == [(r.name, r.shape) for r in weights]
    assert weights_root(gradients) != weights_root(weights)
    before = gradients
    forward_backward(state, seed=0, moe=False)
    assert state.gradient_records() == before
    forward_backward(state, seed=1, moe=False)
    assert state.gradient_records() != before


def test_the_norm_is_taken_where_nothing_is_clipped(tiny: Models) -> None:
    norms = []
    for clip_grad in (1.0, 0.0):
        state = fresh(tiny("llama"), clip_grad=clip_grad)
        forward_backward(state, seed=0, moe=False)
        norms.append(state.optimizer_step()[1])
    assert norms[0] == norms[1] > 0


def test_the_schedule_gives_the_rate_of_each_step(tiny: Models) -> None:
    state = fresh(
        tiny("llama"), lr=4e-4, lr_warmup_iters=2, lr_decay_iters=6, lr_decay_style="linear"
    )
    rates = []
    for i in range(8):
        forward_backward(state, seed=i, moe=False)
        rates.append(state.optimizer_step()[2])
    # Megatron's warm-up begins at 0; then down to min_lr 0 over the 4 steps that remain.
    assert rates == pytest.approx([0, 2e-4, 4e-4, 3e-4, 2e-4, 1e-4, 0, 0], abs=1e-12)
    assert state.steps == state.adam_step() == 8


def test_a_spoiled_gradient_stops_the_training(tiny: Models) -> None:
    state = fresh(tiny("llama"))
    forward_backward(state, seed=0, moe=False)
    next(iter(state.model.parameters())).main_grad.view(-1)[0] = float("nan")
    with pytest.raises(Diverged, match="nan"):
        state.optimizer_step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr_decay_style": "steps"}, "constant, linear"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-iters"),
        ({"min_lr": 1.0}, "--min-lr"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "--lr-warmup-iters"),
    ],
)
def test_impossible_settings_are_refused(
    tiny: Models, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        fresh(tiny("llama"), **change)


def test_the_random_state_is_a_function_of_the_seed(tiny: Models) -> None:
    digests = [fresh(tiny("llama"), seed=seed).random_state_digest() for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


def test_the_generators_are_the_states_own(tiny: Models) -> None:
    """Whoever draws in the process between steps changes nothing, and is not disturbed."""
    state = fresh(tiny("llama"))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn, digests = [], []
    for i in range(2):
        drawn.append(torch.rand(2))
        forward_backward(state, seed=i, moe=False)
        torch.rand(i + 1)  # as dropout would
        state.optimizer_step()
        digests.append(state.random_state_digest())
    assert torch.equal(torch.cat(drawn), expected)
    assert len(set(digests)) == 2
    again = fresh(tiny("llama"))
    for i in range(2):
        forward_backward(again, seed=i, moe=False)
        torch.rand(i + 1)
        again.optimizer_step()
        assert again.random_state_digest() == digests[i]
